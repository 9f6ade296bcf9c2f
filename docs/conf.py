"""Configuration of the documentation site: `make docs-site` writes it to build/site.

Sphinx with MyST and Furo, because all three are maintained, read the same Markdown files that
GitHub shows, check every link and anchor, and load nothing from other hosts: the built pages and
the search work from a disk. MkDocs has had no release since 1.6.1 of August 2024.
"""

# ruff: noqa: INP001

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FROM_ROOT = {
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
}
"""Pages at the top of the repository, and the page of the site that shows each."""
RULES = ROOT / "deploykit/diagnose/causes"

project = "deploykit"
copyright = "the deploykit authors"  # noqa: A001 - Sphinx's name
author = "the deploykit authors"
extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt", "extra"]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
html_theme = "furo"
html_title = "deploykit"
html_static_path = ["static"]
html_extra_path = ["extra"]  # llms.txt and SKILL.md, at the top of the site
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "xcode"
pygments_dark_style = "monokai"


def setup(app: Any) -> dict[str, bool]:
    """Connect what the pages need: links that leave docs/, and the causes that are data."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}


def _read(_app: Any, name: str, source: list[str]) -> None:
    """Show a page of the repository's top in place of its stub, and mend links that leave docs/."""
    page = Path(f"{name}.md")
    stubs = {stub: top for top, stub in FROM_ROOT.items() if stub.startswith("project/")}
    original = stubs.get(page.as_posix())
    if original:
        source[0] = (ROOT / original).read_text(encoding="utf-8")
    if page.as_posix() == "reference/causes.md":
        source[0] += "".join(_causes())
    folder = ROOT if original else HERE / page.parent
    source[0] = re.sub(
        r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]+)?\)",
        lambda link: _link(link, folder, HERE / page.parent),
        source[0],
    )


def _causes() -> Iterator[str]:
    """The causes by label: what each means, what to do, and the messages that it is found by."""
    rules: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for path in sorted(RULES.glob("*.toml")):
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for rule in (*tables.get("cause", ()), *tables.get("messages", ())):
            key = rule["label"], rule["means"]
            _, messages = rules.setdefault(key, (rule.get("fix", ""), []))
            patterns = [rule["match"]] if isinstance(rule["match"], str) else rule["match"]
            for one in patterns:
                messages.append(_message(one["match"] if isinstance(one, dict) else one))
    shown = ""
    for (label, means), (fix, messages) in sorted(rules.items()):
        yield f"\n## `{label}`\n" if label != shown else ""
        shown = label
        steps = re.sub(r"\{\w+(?:\|([^}]*))?\}", lambda found: found[1] or "...", fix.strip())
        yield f"\n**{means}**\n\n"
        yield from (
            f"* {re.sub('^@[a-z,]+ ', '', step)}\n" for step in _escaped(steps).splitlines()
        )
        yield f"\n{{.messages}}\nMessages: {_escaped('; '.join(messages))}\n"


def _message(pattern: str) -> str:
    """The words of a regular expression, without its syntax."""
    text = re.sub(r"\(\?(?:P<\w+>|[:=!]|<[=!])", " ", pattern)  # the beginnings of groups
    text = re.sub(r"\[(\w)\w\]", r"\1", text)  # [Ee]rror
    text = re.sub(r"\[(?:\\.|[^\]\\])+\]|\\[dDwWsSbB]", "…", text)  # classes of characters
    text = re.sub(r"(?<!\\)(?:\{[\d,]+\}|[*+?^$])", "", text)
    text = re.sub(r"(?<!\\)[()|]", " ", text).replace("\\", "")
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """A text that Markdown and links leave as it is."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~$&])", r"\\\1", text)


def _link(link: re.Match[str], folder: Path, shown_in: Path) -> str:
    """The link as the site needs it; folders become plain text, since a site cannot show them."""
    text, target, anchor = link[1], link[2], link[3] or ""
    if "://" in target:
        return link[0]
    path = (folder / target).resolve()
    if path.is_dir():
        return text
    if path.parent == ROOT:
        path = HERE / FROM_ROOT.get(path.name, path)
    return f"[{text}]({os.path.relpath(path, shown_in)}{anchor})"
