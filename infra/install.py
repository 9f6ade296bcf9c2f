"""Install this checkout into an environment, with the build of PyTorch that suits the machine.

    python3 infra/install.py .venv -e '.[train]'    # a folder, and what to give to `pip install`

Without an NVIDIA driver, torch comes from PyTorch's CPU index if that answers within 3 seconds.
Otherwise it comes from the default package index, the only one that an installation requires.
A torch of the pinned version stays, whichever build it is. TORCH_INDEX names another index for
torch, such as a company's mirror; if it is empty, torch comes from the default index.

uv installs: the one on PATH, or one that pip puts into the environment. uv does not read pip's
configuration, so where only pip is configured for an index, a proxy or a certificate, pip installs.

This script runs before anything is installed, so it uses the standard library alone.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from http.client import HTTPException
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 3
CPU_SIZE = "0.2 GB to download, 1.4 GB on disk"
USUAL_SIZE = "up to 2.7 GB to download, 5.8 GB on disk"
"""Wheels of torch 2.13.0 and its dependencies for x86-64; the environment with `.[train]`."""
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
PIP_SETTINGS = re.compile(r"\.(.*index.*|find-links|proxy|cert|client-cert|trusted-host)=")
UV_SETTINGS = re.compile(r"UV_.*(INDEX|LINKS)")


def main(folder: str, *requirements: str) -> None:
    """Create the environment unless it exists, install torch, then the rest."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the user chooses the Python that runs this
        sys.exit(
            f"deploykit needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}.\n"
            "Choose another Python, for example: make PYTHON=python3.12 run"
        )
    if not Path(folder, "bin/pip").exists() and not run([sys.executable, "-m", "venv", folder]):
        sys.exit(1)
    python = str(Path(folder, "bin/python"))
    installers = find_installers(python)
    install_torch(python, installers[0])
    for installer in installers:
        if run([*installer, *requirements]):
            return
        if installer is not installers[-1]:
            say("uv failed; trying pip.")
    sys.exit("The installation failed; see the errors above and docs/how-to/install.md.")


def find_installers(python: str) -> list[list[str]]:
    """Return the commands that install into the environment of `python`, the best one first."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip += ["-c", str(CONSTRAINTS)]
    pip_configured = PIP_SETTINGS.search(output([python, "-m", "pip", "config", "list"]))
    if pip_configured and not any(map(UV_SETTINGS.match, os.environ)):
        return [pip]
    beside_python = str(Path(python).parent)
    uv = shutil.which("uv") or shutil.which("uv", path=beside_python)
    if not uv and run([*pip, "uv"], quiet=True):
        uv = shutil.which("uv", path=beside_python)
    if not uv:
        return [pip]
    return [[uv, "pip", "install", "-q", "--python", python, "-c", str(CONSTRAINTS)], pip]


def install_torch(python: str, installer: list[str]) -> None:
    """Install torch from the CPU index where that suits; print which index is used, and why."""
    version = dict(re.findall(r"^(.+)==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE))["torch"]
    installed = output([python, "-c", "import importlib.metadata as m; print(m.version('torch'))"])
    if installed.strip().partition("+")[0] == version:
        return
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    if not index:
        reason = "TORCH_INDEX is empty"
    elif index == CPU_INDEX and has_nvidia_driver():
        reason = "this machine has an NVIDIA driver"
    elif problem := why_unreachable(index):
        reason = f"{index} cannot be used: {problem}"
    else:
        size = f", {CPU_SIZE}" if index == CPU_INDEX else ""
        say(f"Installing PyTorch {version} from {index}{size}")
        torch = ["--no-deps", f"torch=={version}"]
        if run([*installer, *torch], quiet=True, PIP_INDEX_URL=index, UV_INDEX=index):
            return
        reason = f"{index} has no suitable build for this machine"
    say(f"Installing PyTorch {version} from the default index, {USUAL_SIZE} ({reason})")


def has_nvidia_driver() -> bool:
    """Return whether this machine, or the container with this program, can see an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def why_unreachable(index: str) -> str:
    """Return why a package index does not list torch, or nothing if it does."""
    answers: queue.Queue[str] = queue.Queue()
    # In a thread, since a time-out of urlopen covers neither a slow resolver nor a slow answer.
    threading.Thread(target=lambda: answers.put(ask(index)), daemon=True).start()
    try:
        return answers.get(timeout=SECONDS)
    except queue.Empty:
        return f"no answer within {SECONDS} s"


def ask(index: str) -> str:
    """Request the page of torch, however long that takes."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/"):
            return ""
    except (OSError, ValueError, HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def say(line: str) -> None:
    """Print a line before the programs that follow print theirs."""
    print(line, flush=True)


def run(command: list[str], *, quiet: bool = False, **variables: str) -> bool:
    """Run a program with these environment variables; return whether it succeeded."""
    errors = subprocess.DEVNULL if quiet else None
    done = subprocess.run(command, check=False, stderr=errors, env=os.environ | variables)
    return done.returncode == 0


def output(command: list[str]) -> str:
    """Run a program; return what it prints, and nothing if it fails."""
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
