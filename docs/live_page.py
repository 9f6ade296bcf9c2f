"""Draw the page of `watch` from a real run, on a terminal of 80x24: `python docs/live_page.py`."""

# ruff: noqa: INP001

from __future__ import annotations

import fcntl
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from svg import Picture

HERE = Path(__file__).resolve().parent
COLUMNS, ROWS = 80, 24
JOB = """\
name: digits
entrypoint: {script: train.py, args: [--max-steps, 600]}
resources: {processes_per_node: 2, time_limit: 10m}
"""
SCRIPT = """\
import time
from random import random
for step in range(1, 601):
    print(f"step {step}/600 loss {3 / step**0.4 + random() / 5:.4f}", flush=True)
    time.sleep(0.05)
"""
HOME = "\x1b[H"
"""Begins each drawing of the page (ECMA-48, 8.3.21)."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def main() -> None:
    """Watch a run until its curve has grown, and write docs/pictures/watch.svg."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DEPLOYKIT_HOME"] = f"{folder}/state"
        Path(folder, "job.yaml").write_text(JOB)
        Path(folder, "train.py").write_text(SCRIPT)
        deploykit("submit", "--backend", "local", "--run", "digits-1", folder=folder)
        try:
            lines = page(folder)
        finally:
            deploykit("cancel", "digits-1", folder=folder)
            deploykit("wait", "digits-1", folder=folder)
    (HERE / "pictures/watch.svg").write_text(str(picture(lines)), encoding="utf-8")


def deploykit(*words: str, folder: str) -> None:
    argv = [sys.executable, "-m", "deploykit", *words]
    null = subprocess.DEVNULL
    subprocess.run(argv, cwd=folder, check=False, stdout=null)  # noqa: S603 - the words above


def page(folder: str) -> list[str]:
    """The lines on the screen once the run is far enough."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    argv = [sys.executable, "-m", "deploykit", "watch", "digits-1"]
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(  # noqa: S603 - the words above
        argv, cwd=folder, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True
    ):
        os.close(its)
        seen, lines = "", [""]
        while not is_far(lines):
            seen = (seen + os.read(ours, 1 << 16).decode(errors="ignore"))[-50_000:]
            lines = last_page(seen)
        os.write(ours, b"q")
        while drained(ours):
            pass
    os.close(ours)
    return [line.replace(socket.gethostname(), "laptop") for line in lines]


def drained(end: int) -> bool:
    """Read on, until the program has closed the terminal."""
    try:
        return bool(os.read(end, 1 << 16))
    except OSError:
        return False


def last_page(seen: str) -> list[str]:
    """The last page that was drawn completely."""
    pages = seen.split(HOME)
    text = CONTROL.sub("", pages[-2]) if len(pages) > 2 else ""  # noqa: PLR2004 - with an end
    return [line.rstrip() for line in text.replace("\r", "").split("\n")]


def is_far(lines: list[str]) -> bool:
    """Whether the page has a curve, a time left, and what both ranks use."""
    text = "\n".join(lines)
    return all(part in text for part in ("left", "rank 1", "CPU")) and text.count("▁") > 3  # noqa: PLR2004


def picture(lines: list[str]) -> Picture:
    """The page as a terminal's window."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    drawn = Picture((680, 34 + 18 * len(lines)), "The live page of watch, for one run on two ranks")
    drawn.rect((1, 1), (678, 32 + 18 * len(lines)), "plain")
    for number, line in enumerate(lines):
        drawn.text((16, 26 + 18 * number), line, "code")
    return drawn


if __name__ == "__main__":
    main()
