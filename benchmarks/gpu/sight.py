"""What the verbs show of a training on the GPU: `doctor`, `watch`, `dump`, `profile`, `report`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import failures
from runs import Machine, Size

_RUN = "gpu-seen"
_PATIENCE = 90.0
"""Seconds until a record of usage must be there."""
_BUSY = 50
"""Percent of the GPU, or of a core without one, from which on the training runs."""
Row = tuple[str, str, str]
"""A verb, what it shows, and what is wrong with that."""


def seen(machine: Machine, size: Size) -> Iterator[Row]:
    """What each verb shows of one rank that trains without end."""
    yield _doctor(machine)
    gpus = f"--set=resources.gpus_per_node={min(1, machine.gpus)}"
    place = ["--set=resources.processes_per_node=1", gpus, "--profile=torch:5:8"]
    endless = ("--steps=100000", "--epochs=100000")
    words = [*size.words(1), *endless, "--strategy=single", "--precision=bf16"]
    sent = failures.deploykit(
        machine, "submit", "entrypoints/train.py", f"--run={_RUN}", *place, "--", *words
    )
    if sent.returncode:
        yield "submit", sent.stderr.strip().splitlines()[-1], "it failed"
        return
    yield _watch(machine)
    yield _dump(machine)
    failures.deploykit(machine, "cancel", _RUN)
    failures.deploykit(machine, "wait", _RUN)
    yield _profile(machine)
    yield _report(machine)


def _doctor(machine: Machine) -> Row:
    wanted = ("--backend=local", f"--gpus-per-node={machine.gpus}", "--processes-per-node=1")
    done = failures.deploykit(machine, "doctor", *wanted, "--json")
    said = [one["message"] for one in json.loads(done.stdout or "{}").get("findings", ())]
    return "doctor", "; ".join(said) or "no findings", "" if done.returncode == 0 else "errors"


def _watch(machine: Machine) -> Row:
    """Usage of the rank once its record is complete; the first ones lack the CPU."""
    rank: dict[str, Any] = {}
    until = time.monotonic() + _PATIENCE
    needed = "gpu_percent" if machine.gpus else "cpu_percent"
    while (rank.get(needed) or 0) < _BUSY and time.monotonic() < until:
        time.sleep(2)
        answer = json.loads(
            failures.deploykit(machine, "watch", _RUN, "--once", "--json").stdout or "[]"
        )
        rank = next(iter(answer[0]["ranks"] or [{}]), {}) if answer else {}
    line = failures.deploykit(machine, "watch", _RUN, "--once").stdout
    found = re.search(r"rank 0 .*", line)
    return "watch", found.group() if found else "no rank", "" if rank.get(needed) else "no usage"


def _dump(machine: Machine) -> Row:
    done = failures.deploykit(machine, "dump", _RUN)
    frames = [line.strip() for line in done.stdout.splitlines() if "(train.py" in line]
    return "dump", frames[0] if frames else "no frame of train.py", "" if frames else "no stack"


def _profile(machine: Machine) -> Row:
    answer = json.loads(failures.deploykit(machine, "profile", _RUN, "--json").stdout or "{}")
    if not answer.get("ranks"):
        return "profile", "none", "no profile"
    one, first = answer["ranks"][0], answer["operators"][0]["name"]
    parts = {key: one[f"{key}_seconds"] / one["seconds"] for key in ("computing", "idle")}
    said = ", ".join(f"{key} {share:.0%}" for key, share in parts.items())
    where = "GPU" if one["on_gpu"] else "CPU"
    problem = "" if one["on_gpu"] == bool(machine.gpus) else "CPU times"
    return "profile", f"{where} times: {said}; costliest: {first}", problem


def _report(machine: Machine) -> Row:
    """The GPU and the driver, as the report names them."""
    file = failures.HOME / "seen.html"
    failures.deploykit(machine, "report", _RUN, "--output", str(file))
    text = re.sub(r"<[^>]+>", " ", file.read_text("utf-8")) if file.exists() else ""
    found = re.search(r"GPUs\s+(\d+ x .*?)\s+driver\s+([\d.]+)", text, re.DOTALL)
    said = f"{found[1]}, driver {found[2]}" if found else "no GPU"
    return "report", said, "" if found or not machine.gpus else "no GPU is named"
