"""Draw the page of `watch`, in tmux at two sizes, and a report: `python docs/live_page.py`."""

# ruff: noqa: INP001

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from svg import Picture

HERE = Path(__file__).resolve().parent
PAGES = {"watch.png": (80, 24, ["digits-1"]), "watch-wide.png": (120, 24, [])}
"""Columns and rows of the terminal, and the runs, by the picture; no run is all unfinished ones."""
REPORT, REPORT_SIZE = "digits-4", (1010, 945)
"""The run of report.png, and the pixels of the page that it shows, smaller by REPORT_SCALE."""
REPORT_SCALE = 0.7
JOB = """\
name: digits
entrypoint: {script: train.py, args: []}
resources: {processes_per_node: 1, time_limit: 10m}
"""
RUNS = {"digits-1": (2, 0.1), "digits-2": (1, 0.3), "digits-3": (1, 1), "digits-4": (1, 10)}
"""Their ranks and learning rates, the last one too high."""
SCRIPT = """\
import sys
import time
from random import random
lr = float(sys.argv[1])
for step in range(1, 601):
    loss = 3 / step**0.4 / (1 + lr) + random() / 5
    if lr > 1 and step == 80:
        raise FloatingPointError(f"the loss is nan at step {step}")
    speed = 640 + 40 * random()
    print(f"step {step}/600 loss {loss:.4f} images_per_second={speed:.0f}", flush=True)
    time.sleep(0.05 / (1 + lr / 4))
"""


COLORS = {"31": "#c62828", "32": "#2f8f55", "35": "#8e24aa", "36": "#00799c", "90": "#b4bcc6"}
"""Of the screen's SGR numbers (ECMA-48, 8.3.117)."""
PAPER, INK = "#f4f6f8", "#1f2933"
_SGR = re.compile(r"\x1b\[([0-9;]*)m")


def main() -> None:
    """Watch a run until its curve has grown, and write the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DEPLOYKIT_HOME"] = f"{folder}/state"
        Path(folder, "job.yaml").write_text(JOB)
        Path(folder, "train.py").write_text(SCRIPT)
        for run, (ranks, rate) in RUNS.items():
            words = ["--backend", "local", "--run", run, "--processes-per-node", str(ranks)]
            deploykit("submit", *words, "--", str(rate), folder=folder)
        try:
            pages = {name: page(folder, *PAGES[name]) for name in PAGES}
        finally:
            for run in RUNS:
                deploykit("cancel", run, folder=folder)
                deploykit("wait", run, folder=folder)
        deploykit("report", REPORT, "--output", f"{folder}/report.html", folder=folder)
        report = Path(folder, "report.html").read_text(encoding="utf-8")
    photograph(anonymous(report, folder), REPORT_SIZE, HERE / "pictures/report.png", REPORT_SCALE)
    for name, lines in pages.items():
        drawn = picture(lines, *PAGES[name][:2])
        html = f"<meta charset=utf-8><body style='margin:0'>{drawn}"
        photograph(html, drawn.size, HERE / "pictures" / name)


def photograph(html: str, shape: tuple[float, float], path: Path, scale: float = 1) -> None:
    """Write the top of a page as PNG, by Chromium."""
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        sys.exit("chromium-headless-shell is required to draw docs/pictures/*.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(html, encoding="utf-8")
        size = [f"--window-size={shape[0]:g},{shape[1]:g}", f"--force-device-scale-factor={scale}"]
        words = ["--headless", "--no-sandbox", "--hide-scrollbars", *size, f"--screenshot={path}"]
        argv = [browser, *words, page.as_uri()]
        subprocess.run(argv, check=True, capture_output=True)  # noqa: S603 - our own page


def deploykit(*words: str, folder: str) -> None:
    argv = [sys.executable, "-m", "deploykit", *words]
    null = subprocess.DEVNULL
    subprocess.run(argv, cwd=folder, check=False, stdout=null)  # noqa: S603 - the words above


def page(folder: str, columns: int, rows: int, runs: list[str]) -> list[str]:
    """The lines on the screen once the runs are far enough."""
    watch = shlex.join([sys.executable, "-m", "deploykit", "watch", *runs])
    size, server = ["-x", str(columns), "-y", str(rows)], str(columns)
    try:
        tmux(server, "new-session", "-d", *size, "-c", folder, watch, ";", "set", "status", "off")
        tmux(server, "resize-window", *size)
        while not is_far(lines := screen(server), one=bool(runs)):
            time.sleep(0.1)
    finally:
        tmux(server, "kill-server")
    return [anonymous(line, folder) for line in lines]


def anonymous(text: str, folder: str) -> str:
    """The text with a name and a folder that any machine may have."""
    names = {socket.gethostname(): "laptop", f"{folder}/state": "~/.local/state/deploykit"}
    pattern = "|".join(rf"(?<!\w){re.escape(name)}\b" for name in names)
    return re.sub(pattern, lambda found: names[found[0]], text)


def screen(server: str) -> list[str]:
    """The lines on the screen, with their colors."""
    return [line.rstrip() for line in tmux(server, "capture-pane", "-pe")[:-1].split("\n")]


def tmux(server: str, *words: str) -> str:
    """What tmux prints; the server is one of our own, without the user's settings."""
    argv = ["tmux", "-L", f"deploykit-{os.getpid()}-{server}", "-f", "/dev/null", *words]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)  # noqa: S603 - as above
    return done.stdout


def is_far(lines: list[str], *, one: bool) -> bool:
    """Whether the page has a curve, a time left, and what both ranks use, or an error."""
    text = _SGR.sub("", "\n".join(lines))
    wanted = ("left", "rank 1", "CPU") if one else ("left", "failed", "FloatingPointError")
    return all(part in text for part in wanted) and text.count("▁") > 3  # noqa: PLR2004


def picture(lines: list[str], columns: int, rows: int) -> Picture:
    """The page as a terminal's window."""
    title = f"The live page of watch on a terminal of {columns}x{rows}"
    width, height = 32 + round(7.23 * columns), 34 + 18 * len(lines)
    drawn = Picture((width, height), title)
    drawn.rect((1, 1), (width - 2, height - 2), "plain")
    settings: set[str] = set()  # they hold until they are reset, also on the next line
    for number, line in enumerate(lines):
        parts = []
        first, *rest = _SGR.split(line)
        for setting, text in zip(["", *rest[::2]], [first, *rest[1::2]], strict=True):
            settings = changed(settings, setting.split(";"))
            parts.append((text, PAPER if "7" in settings else color(settings)))
        if PAPER in {color for text, color in parts if text}:
            drawn.rect((8, 13 + 18 * number), (width - 16, 18), "head", radius=0)
        drawn.colored((16, 26 + 18 * number), parts, "code")
    return drawn


def changed(settings: set[str], numbers: list[str]) -> set[str]:
    """The settings of the screen after one sequence."""
    if numbers == ["0"]:
        return set()
    kept = settings - set(COLORS) if any(one in {*COLORS, "39"} for one in numbers) else settings
    return kept | (set(numbers) - {"", "0", "39", "49"})


def color(settings: set[str]) -> str:
    """The color of text, if it has one."""
    return next((COLORS[one] for one in settings if one in COLORS), "")


if __name__ == "__main__":
    main()
