"""The tree of errors. Each class carries the exit code with which the command line ends.

The codes are those of BSD's ``sysexits.h`` (64 to 78), so that they never look like a code
of the trainer's own (1, 2, or 128 + a signal), which ``wait`` and ``submit --wait`` pass on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Problem:
    """One thing wrong (or doubtful) in a job: where, what was expected, what was probably meant.

    `path` is the path in the job file (``resources.nodes``), empty for the file as a whole.
    `line` counts from 1; None where unknown (TOML, --set, a missing key). `source` is where the
    fact behind it is written (a URL).
    """

    path: str
    message: str
    hint: str | None = None
    line: int | None = None
    severity: Literal["error", "warning"] = "error"
    source: str | None = None


class DeploykitError(Exception):
    """Something went wrong that a person can act on.

    `hint` says what to do next. `transient` says whether trying again may help.
    """

    exit_code = 70
    meaning = "an error inside deploykit; the message names a log file"
    transient = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(DeploykitError):
    """The command line is wrong: in one thing, or in all of `problems`."""

    exit_code = 64
    meaning = "the command line is wrong"

    def __init__(
        self, message: str, *, hint: str | None = None, problems: Sequence[Problem] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class JobFileError(DeploykitError):
    """The job file, or what it points to, has problems: all of them, not the first."""

    exit_code = 65
    meaning = "the job file is wrong; every problem is listed"

    def __init__(
        self, source: str, problems: Sequence[Problem], *, hint: str | None = None
    ) -> None:
        count = sum(problem.severity == "error" for problem in problems)
        super().__init__(f"{source}: {count} problem{'s' if count != 1 else ''}", hint=hint)
        self.source = source
        self.problems = tuple(problems)


class NotFound(DeploykitError):
    exit_code = 66
    meaning = "no such file or run"


class BackendUnavailable(DeploykitError):
    exit_code = 69
    meaning = "the backend cannot be used from here (a program, package or service is missing)"


class SubmitRefused(DeploykitError):
    exit_code = 76
    meaning = "the backend refused the job; nothing was started"


class CannotWrite(DeploykitError):
    exit_code = 73
    meaning = "something cannot be written (disk full, read-only)"


class OutputLost(CannotWrite):
    """Standard output or standard error takes no more, and its reader has not just gone."""


class Uncertain(DeploykitError):
    """Sending broke off and nobody could be asked: the job may exist."""

    exit_code = 74
    meaning = "sending broke off, and the job may exist; `deploykit status` finds out"


class TryAgain(DeploykitError):
    exit_code = 75
    meaning = "a passing fault (busy scheduler, throttling, another submit at work); try again"
    transient = True


class NotPermitted(DeploykitError):
    exit_code = 77
    meaning = "the far side says that you may not do this"
