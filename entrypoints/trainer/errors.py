"""The error of options that do not fit."""

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
