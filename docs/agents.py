"""Make what agents read: a skill, from the commands themselves, and the list of all pages."""

# ruff: noqa: INP001

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import words

from deploykit.cli import main as cli

HERE = Path(__file__).resolve().parent


def skill(exit_codes: Sequence[tuple[str, str]]) -> str:
    """SKILL.md, for a folder of skills of an agent."""
    lines = []
    for title, verbs in cli.GROUPS.items():
        lines += [f"{title}:", *(f"* `{verb}`: {text}" for verb, text in verbs.items()), ""]
    codes = "\n".join(f"* {code}: {meaning}" for code, meaning in exit_codes)
    return words.part("skill").format(commands="\n".join(lines).strip(), codes=codes)


def llms() -> str:
    """llms.txt (https://llmstxt.org): every page of the site, with its first sentence."""
    index = (HERE / "index.md").read_text(encoding="utf-8")
    summary = " ".join(index.split("\n\n")[1].split())
    groups = []
    for title, pages in _toctrees(index):
        links = "\n".join(_link(page) for page in pages)
        groups.append(f"## {title}\n\n{links}")
    return "\n\n".join(["# deploykit", f"> {summary}", *groups]) + "\n"


def _toctrees(index: str) -> Iterator[tuple[str, list[str]]]:
    """The pages of the site under each caption."""
    for tree in re.finditer(r"```\{toctree\}\n(.*?)```", index, re.DOTALL):
        options, _, pages = tree[1].partition("\n\n")
        caption = re.search(r":caption: (.*)", options)
        yield (caption[1] if caption else "Pages"), pages.split()


def _link(page: str) -> str:
    """A page, with the sentence that it begins with, if it begins with one."""
    text = (HERE / f"{page}.md").read_text(encoding="utf-8")
    parts = [part for part in text.split("\n\n") if not part.startswith("<!--")]
    title, first = parts[0].removeprefix("# ").strip(), " ".join(parts[1].split())
    if first.startswith(("```", "|", "!", "#", "See ")):
        return f"- [{title}]({page}.html)"
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    sentence = re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":")
    return f"- [{title}]({page}.html): {sentence}"
