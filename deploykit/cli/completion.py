"""Print a shell completion script for commands, options, run ids, backends and states.

bash: deploykit completion bash > ~/.local/share/bash-completion/completions/deploykit
zsh:  deploykit completion zsh > ~/.zfunc/_deploykit   (a folder in your fpath)
fish: deploykit completion fish > ~/.config/fish/completions/deploykit.fish
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable

import shtab

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.diagnose.guides import GUIDES
from deploykit.job.model import State
from deploykit.lib.errors import UsageError
from deploykit.run import registry

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Words that are offered: bash would run a command that is written into one."""
_NEWEST = 1000
"""Runs that are offered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=["bash", "zsh", "fish"], help="your shell")
    parser.add_argument(
        "--list",
        choices=list(_LISTS),
        help="print a list of words, for use by the completion script",
    )


def run(args: argparse.Namespace) -> int:
    if args.list is not None:
        output.say(*filter(_SAFE.fullmatch, _LISTS[args.list]()))
        return 0
    if args.shell is None:
        raise UsageError("SHELL is required", hint="choose bash, zsh or fish")
    parser = args.whole()
    for verb in _verbs(parser).values():
        for action in verb._actions:  # noqa: SLF001 - argparse has no public list of them
            _complete(action, "unfinished" if verb.prog.endswith(" cancel") else "runs")
    functions = {"bash": _bash, "zsh": _zsh, "fish": lambda _: ""}[args.shell]
    preamble = "\n".join(map(functions, _LISTS)).strip()
    script = shtab.complete(parser, shell=args.shell, preamble=preamble)
    if args.shell == "zsh":  # shtab's `(*)` completes only the first of several words
        script = re.sub(r'"\(\*\)::?', '"*:', script)
    output.block(f"{script}\n")
    return 0


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (verbs,) = (one for one in parser._actions if isinstance(one.choices, dict))  # noqa: SLF001
    return dict(verbs.choices or {})


def _complete(action: argparse.Action, runs: str) -> None:
    """Set what completes an argument, by its metavar."""
    words = {"RUN": runs, "BACKEND": "backends", "STATE": "states", "NAME": "guides"}
    files = {"FILE": shtab.FILE, "FILE|SCRIPT": shtab.FILE, "FOLDER": shtab.DIRECTORY}
    if action.metavar in files:
        action.complete = files[action.metavar]  # type: ignore[attr-defined]
    elif action.metavar in words:
        name = words[str(action.metavar)]
        function = f"_deploykit_{name}"
        fish = f"(deploykit completion --list {name} 2>/dev/null)"
        action.complete = {"bash": function, "zsh": function, "fish": fish}  # type: ignore[attr-defined]


def _bash(name: str) -> str:
    words = f'"$(deploykit completion --list {name} 2>/dev/null)"'
    return f'_deploykit_{name}() {{ compgen -W {words} -- "$1"; }}'


def _zsh(name: str) -> str:
    words = f'(${{(f)"$(deploykit completion --list {name} 2>/dev/null)"}})'
    return f"_deploykit_{name}() {{ local -a words; words={words}; compadd -a words }}"


def _runs() -> Iterable[str]:
    return [row.run for row in registry.select(limit=_NEWEST)]


def _unfinished() -> Iterable[str]:
    """As far as this machine knows: asking the targets would take seconds."""
    return [row.run for row in registry.unfinished(_NEWEST)]


def _backends() -> Iterable[str]:
    return backend.names()


def _states() -> Iterable[str]:
    return [state.value for state in State]


def _guides() -> Iterable[str]:
    return GUIDES


_LISTS: dict[str, Callable[[], Iterable[str]]] = {
    "runs": _runs,
    "unfinished": _unfinished,
    "backends": _backends,
    "states": _states,
    "guides": _guides,
}
"""What a shell asks for while a command line is typed; none asks a target."""
