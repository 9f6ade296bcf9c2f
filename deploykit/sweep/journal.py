"""The journal of a sweep's trials: Optuna's, one file without a server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable, NotFound
from deploykit.sweep.folder import SweepRecord

if TYPE_CHECKING:
    from optuna.study import Study

_NAME = "deploykit"
_DAMAGED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What Optuna raises for a journal that is not one of its own."""


def require() -> None:
    """Raise BackendUnavailable where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        hint = "pip install 'deploykit[sweep]'"
        raise BackendUnavailable("sweeps need Optuna, which is not installed", hint=hint)


def write(record: SweepRecord) -> Study:
    """The study of a sweep that this process controls; made where there is none."""
    paths.touch(record.journal)
    _drop_incomplete_line(record.journal)
    return _open(record, _OnlyWriter())


def read(record: SweepRecord) -> Study | None:
    """The study of a sweep, to be looked at; None before its first trial."""
    if not record.journal.exists() or not record.journal.stat().st_size:
        return None
    return _open(record, None)


def _open(record: SweepRecord, lock: Any) -> Study:
    require()
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from deploykit.sweep import samplers

    try:
        storage = JournalStorage(JournalFileBackend(str(record.journal), lock))
        return optuna.create_study(
            study_name=_NAME,
            storage=storage,
            direction=record.sweep.objective.direction,
            pruner=samplers.pruner(record.sweep),
            load_if_exists=True,
        )
    except _DAMAGED as error:
        raise NotFound(
            f"{record.journal} is not a journal that Optuna {optuna.__version__} can read: "
            f"{type(error).__name__}: {error}",
            hint="its runs are in `deploykit list`; start a new sweep",
        ) from error


def _drop_incomplete_line(path: Path) -> None:
    """Cut off what a machine that failed has written of a last line: Optuna would refuse it."""
    with path.open("rb+") as file, contextlib.suppress(OSError):
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
            os.fsync(file.fileno())


class _OnlyWriter:
    """No lock: the sweep's own is held, and unlike Optuna's it ends with the process."""

    def acquire(self) -> bool:
        """Nothing to wait for."""
        return True

    def release(self) -> None:
        """Nothing to release."""
