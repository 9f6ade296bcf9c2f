"""Errors of options, checkpoints and ranks that do not fit."""

from __future__ import annotations


class ConfigError(ValueError):
    """Options, task and ranks do not fit together. Raised on every rank, before training starts.

    ``train.py`` prints it as one line. Any other exception, such as one of your model, keeps its
    traceback.
    """

    exit_code = 1


class UnusableCheckpoints(ConfigError):
    """There are checkpoints, and none can be used. To train from the start would lose them all."""

    exit_code = 65
    """EX_DATAERR of sysexits.h."""


class UnequalRanksError(ConfigError):
    """Ranks that must run the same layers do not. Raised on all of them, also in training.

    `first` is whether this rank is the first of them, which prints it.
    """

    def __init__(self, message: str, *, first: bool) -> None:
        super().__init__(message)
        self.first = first


class InvalidFile(ValueError):
    """A file of a checkpoint is damaged, or not one that this trainer writes; it says what."""
