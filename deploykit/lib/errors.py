"""The tree of errors. Each class has the exit code that the command line returns.

From Python the same classes are raised. All can be pickled, to cross into another process.

The codes are those of BSD's ``sysexits.h`` (64 to 78), so that none can be confused with a code
of the trainer (1, 2, or 128 + a signal), which ``wait`` and ``submit --wait`` return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # dataclasses would slow down --help
    from deploykit.lib.problem import Problem


class DeploykitError(Exception):
    """An error that the user can act on.

    `message` says what happened, and `hint` what to do next; a traceback shows both. `transient`
    says whether a retry can help. `meaning` explains the exit code in the reference.
    """

    exit_code = 70
    meaning = "an unexpected error in deploykit; the message names a log file"
    transient = False
    problems: tuple[Problem, ...] = ()
    """Of a job or a command line, all of them; `str()` lists them below the message."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(hint)

    def __str__(self) -> str:
        return "\n  ".join([self.message, *map(str, self.problems)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[DeploykitError], args: tuple[Any, ...], values: Any) -> DeploykitError:
    """A pickled error: by its values, since `__init__` takes others than `args`."""
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError takes them only in __init__
    error.__dict__.update(values)
    return error


class UsageError(DeploykitError):
    """The command line or an argument is invalid: see the message or `problems`."""

    exit_code = 64
    meaning = "the command line is invalid"

    def __init__(
        self, message: str, *, hint: str | None = None, problems: Sequence[Problem] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


def _counted(source: str, problems: Sequence[Problem]) -> str:
    """The message for a file with problems, which are listed below it."""
    count = sum(problem.severity == "error" for problem in problems)
    return f"{source}: {count} problem{'s' if count != 1 else ''}"


class JobFileError(DeploykitError):
    """The job file, or a file it refers to, has problems; all of them are listed."""

    exit_code = 65
    meaning = "the job file has problems; all of them are listed"

    def __init__(
        self, source: str, problems: Sequence[Problem], *, hint: str | None = None
    ) -> None:
        super().__init__(_counted(source, problems), hint=hint)
        self.source = source
        self.problems = tuple(problems)


class ConfigError(DeploykitError):
    """The user's config file has problems."""

    exit_code = 78
    meaning = "the config file has problems; all of them are listed"

    def __init__(self, path: str, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        super().__init__(_counted(path, problems), hint=hint)
        self.problems = tuple(problems)


class NotFound(DeploykitError):
    """A file, run or job does not exist."""

    exit_code = 66
    meaning = "no such file or run; `diagnose`: a log could not be read"


class BackendUnavailable(DeploykitError):
    """A program, a package, a host or a service cannot be used."""

    exit_code = 69
    meaning = "the backend cannot be used from here (a program, package or service is missing)"


class SubmitRefused(DeploykitError):
    """The backend rejected the job; nothing was started."""

    exit_code = 76
    meaning = "the backend refused the job; nothing was started"


class CannotWrite(DeploykitError):
    """deploykit cannot write one of its own files."""

    exit_code = 73
    meaning = "a file could not be written (disk full or read-only)"


class CannotPackage(DeploykitError):
    """The model of a run cannot be rebuilt."""

    exit_code = 72
    meaning = "`export`, `deploy`: the model could not be rebuilt; nothing was written"


class OutputLost(CannotWrite):
    """Standard output or standard error cannot be written, although the pipe is open."""


class Uncertain(DeploykitError):
    """The connection failed while the job was sent: it may exist."""

    exit_code = 74
    meaning = "the connection failed during submit, so the job may exist; see `deploykit status`"


class TryAgain(DeploykitError):
    """A transient error; nothing was started, so try again."""

    exit_code = 75
    meaning = "a transient error (busy scheduler, throttling, a concurrent submit); try again"
    transient = True


class NotPermitted(DeploykitError):
    """The user lacks a permission at the target, or is not logged in."""

    exit_code = 77
    meaning = "permission denied by the backend"


class TimedOut(DeploykitError, TimeoutError):
    """A run did not end within the time given to `Run.wait`; it continues."""

    exit_code = 124
    meaning = "`wait --timeout` expired; the run continues"


class NeverStarts(DeploykitError):
    """A run is queued, but can never start. `sysexits.h` has no such code."""

    exit_code = 81
    meaning = "`wait`, `submit --wait`: the run is queued, but can never start"


class JobMissing(DeploykitError):
    """The target has no job of the run. `sysexits.h` has no such code."""

    exit_code = 83
    meaning = "`wait`, `submit --wait`: the target has no job for the run"


class RunFailed(DeploykitError):
    """A run failed or was cancelled. `run` is its id, `exit_code` that of `deploykit wait`."""

    exit_code = 1
    meaning = "`wait`, `submit --wait`: the run failed without its own exit code"

    def __init__(
        self, message: str, *, run: str, exit_code: int = 1, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.run = run
        self.exit_code = exit_code


class FunctionFailed(RunFailed):
    """A function given to `launch` raised an exception on a rank.

    `rank` is the first to fail, `kind` is the name of the exception's class, and `traceback` is its
    text from that rank. `__cause__` is the exception itself, if it could be sent back.
    """

    def __init__(self, rank: int, kind: str, traceback: str, *, run: str) -> None:
        last = traceback.strip().rpartition("\n")[2]
        super().__init__(f"rank {rank}: {last}", run=run, hint=f"on rank {rank}:\n{traceback}")
        self.rank = rank
        self.kind = kind
        self.traceback = traceback
