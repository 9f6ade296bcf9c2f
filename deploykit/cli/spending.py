"""What runs have cost, for `status` and `list --cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.cost import prices
from deploykit.cost.prices import Spent
from deploykit.job.model import State
from deploykit.run.registry import Run, now


def text(run: Run, *, brief: bool = False) -> str:
    """What a run has cost, so far or in all; empty where nothing is billed or known."""
    cost = _spent(run)
    if cost is None:
        return ""
    shown = cost.total if brief else str(cost)
    return shown if State(run.state).final else f"{shown} so far"


def data(run: Run) -> dict[str, Any] | None:
    """The same as data; None where nothing is billed or known."""
    cost = _spent(run)
    return None if cost is None else cost.data()


def budgets() -> list[str]:
    """What is left of each budget, a line each."""
    from deploykit.run import budgets  # few runs have one

    return [str(use) for use in budgets.uses()]


def _spent(run: Run) -> Spent | None:
    """What a run has cost by the price in its folder."""
    path = Path(run.folder, backend.PRICE)
    return prices.spent(path, _billed(run)) if path.exists() else None


def _billed(run: Run) -> float | None:
    """Seconds that the target bills, so far or in all."""
    return run.billed if State(run.state).final else run.seconds(now())
