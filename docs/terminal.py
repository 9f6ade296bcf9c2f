"""Draw the README's picture of a terminal from two real runs: `python docs/terminal.py`.

The first run trains, the second one fails on rank 1 only. Folder and host are replaced, long lines
are cut, and the warnings of slow ranks that a busy machine brings are left out.
"""

# ruff: noqa: INP001

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from svg import Picture

HERE = Path(__file__).resolve().parent
ENTRYPOINTS = HERE.parent / "entrypoints"
JOB = """\
name: digits
entrypoint: {script: train.py, args: [--epochs, 3]}
resources: {processes_per_node: 2, time_limit: 10m}
"""
FAILING = """\
import os
import time

import torch

if os.environ["RANK"] == "1":
    torch.load("weights.pt")
time.sleep(600)  # rank 0 is stopped, and prints nothing of its own
"""
SHOWN = ("submit --backend local --run digits-1 --wait", "diagnose digits-2")
SILENT = (
    "submit --backend local --run digits-2 --wait"
    " --set entrypoint.script=finetune.py --set entrypoint.args=[]"
)
COLUMNS = 116
COLORS = {
    r"\$ ": "prompt",
    r"\S+: succeeded|  fix ": "good",
    r"\S+: failed|[a-z]+_[a-z_]+: |  proof ": "bad",
    r"  \w+ ": "small",
}
"""The style of a line, by how it begins; the first that matches counts."""


def main() -> None:
    """Run both and write docs/pictures/run.svg."""
    with tempfile.TemporaryDirectory() as folder:
        lines = session(Path(folder))
    (HERE / "pictures/run.svg").write_text(str(picture(lines)), encoding="utf-8")


def session(folder: Path) -> list[str]:
    """What the terminal shows, line by line."""
    shutil.copytree(ENTRYPOINTS / "trainer", folder / "trainer")
    shutil.copy(ENTRYPOINTS / "train.py", folder)
    (folder / "finetune.py").write_text(FAILING)
    (folder / "job.yaml").write_text(JOB)
    shown = [f"$ deploykit {SHOWN[0]}", *deploykit(SHOWN[0], folder)]
    deploykit(SILENT, folder)
    return [*shown, "", f"$ deploykit {SHOWN[1]}", *deploykit(SHOWN[1], folder)]


def deploykit(words: str, folder: Path) -> list[str]:
    """Run one command in the folder; the lines that it prints to either stream."""
    program = Path(sys.executable).with_name("deploykit")
    done = subprocess.run(  # noqa: S603 - the words above
        [program, *words.split()],
        cwd=folder,
        env={**os.environ, "DEPLOYKIT_HOME": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = done.stdout.replace(f"{folder}/state", "~/.local/state/deploykit")
    text = text.replace(str(folder), "~/digits").replace(socket.gethostname(), "laptop")
    lines = (line for line in text.splitlines() if " is slow: " not in line)
    return [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…" for line in lines]


def picture(lines: list[str]) -> Picture:
    """The lines as a terminal's window."""
    drawn = Picture(
        (880, 34 + 18 * len(lines)), "A run on this machine, and a failed run diagnosed"
    )
    drawn.rect((1, 1), (878, 32 + 18 * len(lines)), "plain")
    for number, line in enumerate(lines):
        color = next((style for begin, style in COLORS.items() if re.match(begin, line)), "")
        drawn.text((16, 26 + 18 * number), line, f"code {color}".rstrip())
    return drawn


if __name__ == "__main__":
    main()
