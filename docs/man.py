"""The manual page deploykit(1), in man(7)'s roff, from the parsers of the command line."""

# ruff: noqa: INP001

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from deploykit.cli import main as cli
from deploykit.lib.version import __version__

ENVIRONMENT = {
    "DEPLOYKIT_BACKEND": "The backend of a job that names none.",
    "DEPLOYKIT_HOME": "The folder for runs, bundles and the registry, in place of the one below.",
    "NO_COLOR": "If set and not empty, nothing is colored. TERM=dumb has the same effect.",
}
FILES = {
    "job.yaml": "The job file, where none is named.",
    ".deploykitignore": "Files of the source that do not travel, in the format of .gitignore.",
    "~/.local/state/deploykit/": "Runs, bundles and the registry. XDG_STATE_HOME moves it.",
}
PARTS = ("SYNOPSIS", "DESCRIPTION", "COMMANDS", "EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES")
EXAMPLES = """\
deploykit init
deploykit submit --wait -- --lr 0.1
deploykit submit --backend slurm --set resources.nodes=2
deploykit logs -f
deploykit diagnose"""
Spell = Callable[[argparse.Action], str]


def page(
    verbs: Mapping[str, argparse.ArgumentParser], codes: Iterable[tuple[str, str]], spelled: Spell
) -> str:
    """The page. `spelled` writes an argument as the reference does, in Markdown."""
    top = cli.parser(["submit"])
    parts = {
        "SYNOPSIS": [".B deploykit", ".I COMMAND", "[\\fIOPTIONS\\fR]"],
        "DESCRIPTION": [text(top.description or ""), ".PP", text(top.epilog or "")],
        "COMMANDS": [line for name, sub in verbs.items() for line in verb(name, sub, spelled)],
        "EXIT STATUS": list(tagged(codes)),
        "ENVIRONMENT": list(tagged(ENVIRONMENT.items())),
        "FILES": list(tagged(FILES.items())),
        "EXAMPLES": list(literal(EXAMPLES.splitlines())),
    }
    lines = [
        '.\\" Made by docs/generate.py',
        f'.TH DEPLOYKIT 1 "" "deploykit {__version__}" "User Commands"',
        ".SH NAME",
        "deploykit \\- run one PyTorch trainer on this machine, Slurm or SageMaker",
    ]
    for part in PARTS:
        lines += [f'.SH "{part}"', *parts[part]]
    return "\n".join(lines) + "\n"


def verb(name: str, sub: argparse.ArgumentParser, spelled: Spell) -> Iterator[str]:
    yield f'.SS "deploykit {name}"'
    for paragraph in re.split(r"\n\n+", (sub.description or "").strip()):
        lines = paragraph.splitlines()
        if all(re.match(r"deploykit |\w+: +deploykit ", line) for line in lines):
            yield from literal(lines)
        else:
            yield from (".PP", text(" ".join(lines)))
    actions = [action for action in sub._actions if action.dest != "help"]  # noqa: SLF001
    yield from tagged((spelled(one), one.help or "") for one in actions)


def tagged(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for tag, meaning in pairs:
        yield from (".TP", f"\\fB{text(tag)}\\fR", text(meaning))


def literal(lines: Iterable[str]) -> Iterator[str]:
    yield from (".PP", ".nf", *map(text, lines), ".fi")


def text(plain: str) -> str:
    """Text that roff prints as it is."""
    escaped = plain.replace("%%", "%").replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return re.sub(r"(?m)^(?=[.'])", r"\\&", escaped)
