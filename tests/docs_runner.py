"""Run the consoles of a page of the docs in one shell, and compare what they print.

A block ```console holds commands after ``$ `` and what they print, with ``...`` for any text and,
alone on a line, for any lines. ``[exit code N]`` stands where a command ends with another than 0.
A line `` `name`: `` before any other block makes a file of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = "@@ended"
_PATIENCE = 840


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the file it is, if any."""

    language: str
    text: str
    file: str | None


def blocks(page):
    return [Block(language, text, file or None) for file, language, text in _BLOCK.findall(page)]


def consoles(page):
    """Each command of the page with what it should print and its exit code."""
    for block in blocks(page):
        if block.language != "console":
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            code = re.search(r"^\[exit code (\d+)\]\n", expected, re.MULTILINE)
            expected = expected.replace(code[0], "") if code else expected
            yield command, expected, int(code[1]) if code else 0


def play(page, folder):
    """Write the page's files into `folder`, run its consoles there, and compare."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
    wanted = list(consoles(page))
    assert wanted
    script = "".join(f'{command}\necho "{_MARK} $?"\n' for command, _, _ in wanted)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        env={**os.environ, "PATH": path},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    parts = re.split(rf"^{_MARK} (\d+)\n", done.stdout, flags=re.MULTILINE)
    for (command, expected, code), said, ended in zip(
        wanted, parts[::2], parts[1::2], strict=False
    ):
        assert fits(expected, said), f"$ {command}\n{said}\n--- and the page says\n{expected}"
        assert int(ended) == code, f"$ {command}\n{said}"
    assert len(parts) == 2 * len(wanted) + 1, done.stdout


def fits(expected, said):
    """Whether the text `said` is what the page says, with its dots."""
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*?") + r"\n"
        for line in expected.splitlines()
    ]
    return re.fullmatch("".join(lines), said) is not None
