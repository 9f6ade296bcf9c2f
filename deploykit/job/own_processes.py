"""Scripts that start their own processes, or a launcher of their own, and what to do about it.

Below torchrun such a process waits until the time limit: TORCHELASTIC_USE_AGENT_STORE makes it a
client of a store that torchrun does not serve at that address.
https://github.com/pytorch/pytorch/blob/main/torch/distributed/rendezvous.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.job.model import JobSpec, Problem
from deploykit.lib import paths

if TYPE_CHECKING:
    from deploykit.job.script_calls import Found

_LARGEST = 2**20
"""Bytes of a script that is read."""
_LAUNCHERS = {
    *("accelerate.commands.launch", "deepspeed.launcher.runner", "fastai.launch"),
    *("torch.distributed.launch", "torch.distributed.run"),
}
_WORDS = re.compile(
    rb"spawn|start_processes|notebook_launcher|launch\b|\.run\b|tcp://|torchrun|deepspeed"
)
"""One of them is in every script that is worth parsing."""
_PLAIN = "launcher: python, which starts one plain process on each node"


def check(job: JobSpec) -> Iterator[Problem]:
    """Warnings about what would wait for itself below torchrun."""
    entry = job.entrypoint
    if entry.launcher != "torchrun":
        return
    if entry.module in _LAUNCHERS:
        message = f"{entry.module} starts ranks itself, in each of those that torchrun starts"
        hint = "name the script, with resources.processes_per_node, and torchrun starts the ranks"
        yield Problem("entrypoint.module", message, hint, severity="warning")
    if entry.script is not None:
        call = in_text(paths.read_below(Path(job.source), entry.script, _LARGEST) or b"")
        if call is not None:
            path = "entrypoint.launcher" if call.plain else "entrypoint.script"
            yield Problem(path, *_words(entry.script, call), severity="warning")


def _words(script: str, call: Found) -> tuple[str, str]:
    message = f"{script} {call.what} (line {call.line})"
    if call.plain:
        return f"{message}, and below torchrun such processes wait for each other", _PLAIN
    return f"{message}, where no rank of torchrun listens", "init_process_group() without it"


def in_text(text: bytes) -> Found | None:
    """What the text of a script does first that needs a plain process, or else an address."""
    if not _WORDS.search(text):
        return None
    from deploykit.job import script_calls  # to parse Python takes longer than all other checks

    return script_calls.first(text)
