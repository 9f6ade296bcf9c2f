"""How long a run will be, as the arguments of its trainer tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_TOTALS = (
    *("max_steps", "max_train_steps", "total_steps", "num_steps", "steps", "train_steps"),
    *("num_train_steps", "max_iters", "num_iters", "train_iters", "iterations", "max_iterations"),
)
_EPOCHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "n_epochs", "train_epochs")


class Length(NamedTuple):
    """How long a run will be, as its arguments tell: steps and epochs, each with its source."""

    total: int | None = None
    total_source: str = ""
    epochs: int | None = None
    epochs_source: str = ""


def of(arguments: Sequence[str]) -> Length:
    """What the arguments of a trainer say: ``--max-steps 500``, ``--trainer.max_epochs=3``."""
    by_option: dict[str, tuple[int, str]] = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        name = option.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()
        text = value if equals else after
        if (equals or option.startswith("-")) and re.fullmatch(r"[1-9][0-9]{0,14}", text):
            by_option[name] = int(text), f"argument {option}"
    total = next((by_option[name] for name in _TOTALS if name in by_option), (None, ""))
    epochs = next((by_option[name] for name in _EPOCHS if name in by_option), (None, ""))
    return Length(*total, *epochs)
