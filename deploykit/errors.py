"""Every error of deploykit, by the name under which programs import it."""

from deploykit.lib.errors import (
    BackendUnavailable,
    CannotWrite,
    ConfigError,
    DeploykitError,
    FunctionFailed,
    JobFileError,
    NeverStarts,
    NotFound,
    NotPermitted,
    OutputLost,
    RunFailed,
    SubmitRefused,
    TimedOut,
    TryAgain,
    Uncertain,
    UsageError,
)

__all__ = [
    "BackendUnavailable",
    "CannotWrite",
    "ConfigError",
    "DeploykitError",
    "FunctionFailed",
    "JobFileError",
    "NeverStarts",
    "NotFound",
    "NotPermitted",
    "OutputLost",
    "RunFailed",
    "SubmitRefused",
    "TimedOut",
    "TryAgain",
    "Uncertain",
    "UsageError",
]
