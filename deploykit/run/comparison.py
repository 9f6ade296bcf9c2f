"""What differs between runs: source, settings, arguments, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deploykit.run.facts import Better, Metric, RunFacts, better


@dataclass(frozen=True)
class Setting:
    """One thing that was chosen, of each run; None where a run does not have it."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """Whether it is not the same in all runs."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class MetricRow:
    """One metric of each run; None where a run does not have it."""

    name: str
    better: Better | None
    values: tuple[Metric | None, ...]

    @property
    def differs(self) -> bool:
        """Whether its last or best value is not the same in all runs."""
        return len({one and (one.last, one.best) for one in self.values}) > 1

    @property
    def has_best(self) -> bool:
        """Whether the best value of a run may be another than its last."""
        return any(one is not None and one.best is not None for one in self.values)

    def winners(self, value: Callable[[Metric], float | None]) -> frozenset[int]:
        """The places of the best values; none where all are equal or only one run has it."""
        by_run = {at: value(one) for at, one in enumerate(self.values) if one is not None}
        finite = {at: one for at, one in by_run.items() if one is not None and math.isfinite(one)}
        if self.better is None or len(set(finite.values())) < 2:  # noqa: PLR2004 - no choice
            return frozenset()
        top = (min if self.better == "less" else max)(finite.values())
        return frozenset(at for at, one in finite.items() if one == top)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in the order in which they were named."""

    facts: tuple[RunFacts, ...]
    settings: tuple[Setting, ...]
    """Those that differ."""
    same: int
    """The number of the others."""
    metrics: tuple[MetricRow, ...]
    """All, whether or not they differ."""


def of(facts: Sequence[RunFacts]) -> Comparison:
    """Compare runs."""
    settings = [one for one in _settings(facts) if any(value is not None for value in one.values)]
    different = tuple(one for one in settings if one.differs)
    same = len(settings) - len(different)
    return Comparison(tuple(facts), different, same, tuple(_metrics(facts)))


def _settings(facts: Sequence[RunFacts]) -> Iterator[Setting]:
    """The source, then keys of the job, then arguments."""
    sources = [one.source for one in facts]
    yield Setting("commit", tuple(one.commit for one in sources))
    yield Setting("uncommitted changes", tuple(one.changes for one in sources))
    yield Setting("bundle", tuple(one.bundle or None for one in sources))
    yield Setting("backend", tuple(one.row.backend for one in facts))
    names = dict.fromkeys(name for one in facts for name in one.settings)
    for name in sorted(names, key=lambda name: name.startswith(("-", "argument "))):
        yield Setting(name, tuple(one.settings.get(name) for one in facts))


def _metrics(facts: Sequence[RunFacts]) -> Iterator[MetricRow]:
    for name in dict.fromkeys(name for one in facts for name in one.metrics):
        yield MetricRow(name, better(name), tuple(one.metrics.get(name) for one in facts))
