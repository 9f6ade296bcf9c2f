"""The exit codes of deploykit and of runs, with their meanings, for `explain` and the reference."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from deploykit.cli import diagnose, doctor
from deploykit.cli import main as cli
from deploykit.lib import errors

_WITHOUT_ERROR = {
    0: "success; for `wait` and `submit --wait`: the run succeeded",
    diagnose.CAUSE_FOUND: "`diagnose` found a cause",
    diagnose.CAUSE_UNKNOWN: "`diagnose` found a failure but no cause",
    diagnose.UNFINISHED: "`diagnose`: the run is unfinished, and shows no failure so far",
    doctor.FAULT_FOUND: "`doctor` found something that would block the job, or had no permission "
    "to check",
    cli.INTERRUPTED: "interrupted with ^C; a submitted run continues",
    cli.PIPE_CLOSED: "the reader of the output closed the pipe",
    143: "`wait`, `submit --wait`: the run was cancelled",
}
OTHER = "`wait`, `submit --wait`: the run failed with this code"
LAUNCHER = {
    64: "the launcher on the node received an invalid command, or the program does not exist",
    70: "an error in the launcher itself; the node's log has the details",
    78: "the job cannot run in this environment: no PyTorch, no route to another node, a secret "
    "that cannot be read, a folder that cannot be created, missing data, or data or packages "
    "that cannot be copied or installed",
}
"""Of a run whose launcher ended it (`entrypoints/deploykit_node/cluster.py`)."""
OF_RUN = {
    75: "the trainer saved a checkpoint after a stop signal, and the run was not restarted",
    124: "the run reached its time limit (local, Slurm)",
    137: "a rank was killed (128 + 9); on Slurm, also if a node ran out of memory",
    **LAUNCHER,
}
_SIGNALS = 128
_HIGHEST = 255


def of_deploykit() -> dict[int, str]:
    """The meaning of each exit code of deploykit's own commands."""
    kinds: list[type[errors.DeploykitError]] = [errors.DeploykitError]
    kinds += errors.DeploykitError.__subclasses__()
    by_code = {kind.exit_code: kind.meaning for kind in kinds} | _WITHOUT_ERROR
    return dict(sorted(by_code.items()))


def classes(code: int) -> list[str]:
    """The classes of errors with this exit code."""
    todo: list[type[errors.DeploykitError]] = [errors.DeploykitError]
    names = []
    while todo:
        kind = todo.pop(0)
        todo += [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
        if kind.exit_code == code:
            names.append(kind.__name__)
    return names


def meanings(code: int) -> Mapping[str, str]:
    """What a code means, by what exited with it; empty for a number that is not an exit code."""
    if not 0 <= code <= _HIGHEST:
        return {}
    by_origin = {"deploykit": of_deploykit().get(code, "")}
    by_origin["run"] = OF_RUN.get(code) or _of_program(code)
    return {who: text for who, text in by_origin.items() if text}


def _of_program(code: int) -> str:
    if code == 0:
        return "every rank exited with code 0"
    try:
        name = signal.Signals(code - _SIGNALS).name
    except ValueError:
        return "the first rank to fail exited with this code"
    return f"the first rank to fail was terminated by {name} ({_SIGNALS} + {code - _SIGNALS})"
