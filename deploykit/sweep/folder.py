"""The folder of a sweep on this machine: definition, job, journal and lock.

The journal of the trials is Optuna's, one file without a server.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deploykit.job.decode import Malformed, as_data, decode, read_json
from deploykit.job.spelling import UNKNOWN_KEY
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable, NotFound, TryAgain, UsageError
from deploykit.lib.version import __version__
from deploykit.run import registry, storage
from deploykit.run.rerun import UPGRADE
from deploykit.sweep import space
from deploykit.sweep.model import SWEEP, Sweep

if TYPE_CHECKING:
    from optuna.study import Study

_ALPHABET = "23456789abcdefghjkmnpqrstvwxyz"
_RANDOM = 6
_LONGEST = 30
_JOURNAL = "journal.log"
_STOP = "stop"
_LOCK = "controller"
_RETRIED = "retried.json"
"""Numbers of failed trials, each of which gets another trial with its values, after all others."""
_LOOKS = (0.02, 0.1, 0.2)
"""Seconds to wait for another process that only checks whether the sweep is controlled."""


@dataclass(frozen=True)
class SweepRecord:
    """A started sweep: what to search, and the job of its trials."""

    id: str
    sweep: Sweep
    backend: str
    job: Mapping[str, Any]
    """The job with all overrides and defaults, as a job file for `lifecycle.prepare`."""
    source: str
    """The job file or script, as the user named it; empty if there is none."""
    overrides: Sequence[str]
    bundle: str
    """SHA-256 of the source that every trial runs."""
    created: float

    @property
    def folder(self) -> Path:
        return paths.state() / "sweeps" / self.id

    @property
    def journal(self) -> Path:
        return self.folder / _JOURNAL

    @functools.cached_property
    def points(self) -> Sequence[space.Values]:
        """The points of its grid; empty for other samplers."""
        is_grid = self.sweep.sampler == "grid"
        return list(space.points(self.sweep.parameters)) if is_grid else []

    @property
    def retried(self) -> list[int]:
        """The failed trials that are tried again, in the order of their new trials."""
        path = self.folder / _RETRIED
        return [int(number) for number in read_json(path)] if path.exists() else []

    @property
    def total(self) -> int:
        """The number of trials, with those that try a failed one again."""
        return space.trials(self.sweep) + len(self.retried)

    def retry(self, numbers: Sequence[int]) -> None:
        """Add a trial for each of these failed ones; the next controller runs them."""
        new = self.folder / f"{_RETRIED}.new"
        paths.write(new, json.dumps([*self.retried, *numbers]))
        new.replace(self.folder / _RETRIED)
        (self.folder / storage.SWEEP_FINISHED).unlink(missing_ok=True)

    @property
    def stopping(self) -> bool:
        return (self.folder / _STOP).exists()

    @property
    def finished(self) -> bool:
        """Whether a controller recorded its end. Its runs are then no longer needed."""
        return (self.folder / storage.SWEEP_FINISHED).exists()

    def finish(self) -> None:
        """Record that it has ended, with all results in its journal."""
        paths.touch(self.folder / storage.SWEEP_FINISHED)

    def ask_to_stop(self) -> None:
        """Tell the controller, if there is one, to cancel the runs and end."""
        paths.touch(self.folder / _STOP)

    def ask_to_go_on(self) -> None:
        (self.folder / _STOP).unlink(missing_ok=True)

    def new_array(self) -> Path:
        """Return a folder for its next job array. The folder does not exist yet."""
        arrays = paths.private_folder(self.folder / "arrays")
        return arrays / str(len(list(arrays.iterdir())))

    def is_controlled(self) -> bool:
        """Whether a process controls it now, as far as this machine can tell."""
        with contextlib.suppress(FileNotFoundError), (self.folder / _LOCK).open() as file:
            return not _locked(file, fcntl.LOCK_SH)
        return False


def new_id(name: str) -> str:
    """Return an unused id: a name and six random characters. Run ids begin with it."""
    short = name[:_LONGEST].strip("-")
    return f"{short}-{''.join(secrets.choice(_ALPHABET) for _ in range(_RANDOM))}"


def checked_id(text: str) -> str:
    """Return an id chosen by the user. Raises UsageError if it is invalid or in use."""
    if re.fullmatch(SWEEP.regex, text) is None:
        raise UsageError(f"invalid sweep id {text!r}", hint=SWEEP.meaning)
    if (paths.state() / "sweeps" / text / storage.SWEEP_DEFINITION).exists():
        hint = f"resume it with `deploykit sweep resume {text}`, or choose another id"
        raise UsageError(f"sweep {text} already exists", hint=hint)
    return text


def create(record: SweepRecord) -> None:
    """Write the definition of a new sweep, whole or not at all."""
    folder = paths.private_folder(record.folder)
    draft = folder / f"{storage.SWEEP_DEFINITION}.new"
    paths.write(draft, json.dumps({**as_data(record), "created": record.created}, indent=2) + "\n")
    draft.replace(folder / storage.SWEEP_DEFINITION)


def named(name: str | None) -> SweepRecord | None:
    """The sweep with exactly this id; None if there is none, or a run has the same id."""
    if name is None or registry.lookup(name):
        return None
    return next((one for one in every() if one.id == name), None)


def find(name: str | None) -> SweepRecord:
    """Return the sweep with that id or a unique prefix of it; without a name, the newest.

    Raises NotFound.
    """
    matches = [one for one in every() if name is None or one.id.startswith(name)]
    exact = [one for one in matches if one.id == name] or matches
    if exact and (name is None or len(exact) == 1):
        return exact[0]
    if matches:
        ids = "; ".join(one.id for one in matches[:5])
        raise NotFound(f"{name!r} matches {len(matches)} sweeps", hint=ids)
    for id_, why in unread().items():
        if name is None or id_.startswith(name):
            raise NotFound(f"sweep {id_} {why}", hint=UPGRADE)
    message = f"no sweep matches {name!r}" if name else "no sweeps yet"
    hint = "`deploykit sweep list` shows all sweeps; `deploykit sweep start` starts one"
    raise NotFound(message, hint=hint)


def every() -> list[SweepRecord]:
    """Return all readable sweeps, newest first."""
    records = []
    for folder in storage.sweep_folders():
        with contextlib.suppress(OSError, Malformed):
            records.append(_read(folder))
    return sorted(records, key=lambda one: (-one.created, one.id))


def unread() -> dict[str, str]:
    """Return unreadable sweeps by id, with the reason: a newer deploykit, or a damaged file."""
    reasons = {}
    for folder in storage.sweep_folders():
        try:
            _read(folder)
        except FileNotFoundError:  # not written yet
            continue
        except (OSError, Malformed) as error:
            reasons[folder.name] = str(error)
    return reasons


def _read(folder: Path) -> SweepRecord:
    """Raises OSError or Malformed."""
    data = read_json(folder / storage.SWEEP_DEFINITION)
    try:
        sweep, problems = decode(Sweep, data["sweep"])
        known = {field.name for field in fields(SweepRecord)}
        if set(data) > known or any(one.message == UNKNOWN_KEY for one in problems):
            raise Malformed(f"was created by a newer deploykit than this one ({__version__})")
        if sweep is not None:
            return SweepRecord(**{**data, "sweep": sweep})
    except (LookupError, TypeError):
        pass
    raise Malformed(f"has no valid definition in {folder / storage.SWEEP_DEFINITION}")


@contextlib.contextmanager
def controlling(record: SweepRecord) -> Iterator[None]:
    """Be the only process that controls a sweep. Raises TryAgain if another one does.

    Raises CannotWrite if another user owns the folder: Optuna's CMA-ES unpickles its journal.
    """
    path, opener = paths.private_folder(record.folder) / _LOCK, paths.private_opener
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        for pause in _LOOKS:
            if _locked(file, fcntl.LOCK_EX):
                break
            time.sleep(pause)
        else:
            raise TryAgain(
                f"another process is controlling sweep {record.id}",
                hint=f"`deploykit sweep status {record.id}` shows its progress",
            )
        yield


def runs_of(sweep: SweepRecord) -> list[registry.Run]:
    """Return the runs of all trials of a sweep, newest first."""
    rows = registry.select("run >= ? AND run < ?", (f"{sweep.id}-", f"{sweep.id}."))
    return [row for row in rows if storage.sweep_of(row.run, {sweep.id})]


def remove(sweep: SweepRecord) -> None:
    """Delete a sweep's definition and journal, but no runs.

    Raises TryAgain while it is controlled, and CannotWrite if the deletion fails.
    """
    with controlling(sweep):
        storage.remove(sweep.folder)


def _locked(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_id(sweep: str, number: int, repeat: int | None = None, attempt: int = 0) -> str:
    """Return the run id of a trial, the same for every controller."""
    seed = "" if repeat is None else f"-s{repeat}"
    again = f"-r{attempt}" if attempt else ""
    return registry.checked_id(f"{sweep}-{number}{seed}{again}")


def require_optuna() -> None:
    """Raise BackendUnavailable if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        hint = "install it with `pip install 'deploykit[sweep]'`"
        raise BackendUnavailable("sweeps require Optuna, which is not installed", hint=hint)


def study(record: SweepRecord) -> Study:
    """Open or create the study of a sweep that this process controls."""
    paths.touch(record.journal)
    _drop_incomplete_line(record.journal)
    return _open(record, _OnlyWriter())


def open_study(record: SweepRecord) -> Study | None:
    """Open the study of a sweep for reading; None before its first trial."""
    if not record.journal.exists() or not record.journal.stat().st_size:
        return None
    return _open(record, None)


def _open(record: SweepRecord, lock: Any) -> Study:
    require_optuna()
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from deploykit.sweep import samplers

    try:
        return optuna.create_study(
            study_name="deploykit",
            storage=JournalStorage(JournalFileBackend(str(record.journal), lock)),
            direction=record.sweep.objective.direction,
            pruner=samplers.pruner(record.sweep),
            load_if_exists=True,
        )
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        raise NotFound(
            f"{record.journal} is not a journal that Optuna {optuna.__version__} can read: "
            f"{type(e).__name__}: {e}",
            hint="start a new sweep; `deploykit list` still shows this one's runs",
        ) from e


def _drop_incomplete_line(path: Path) -> None:
    """Cut off a last line that a crash left incomplete, because Optuna would refuse it."""
    with path.open("rb+") as file, contextlib.suppress(OSError):
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
            os.fsync(file.fileno())


class _OnlyWriter:
    """No lock: the process holds the sweep's own, which unlike Optuna's ends with the process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass
