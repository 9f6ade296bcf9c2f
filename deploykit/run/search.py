"""Finding runs by their state, name and backend: SQLite filters, and reads what is shown."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from deploykit.run import registry
from deploykit.run import registry_layout as layout
from deploykit.run import state as run_state
from deploykit.run.registry import Run

_WILD = "*?["


@dataclass(frozen=True)
class Search:
    """What a run must be; an empty part allows all. `job` is the name of its job.

    `pattern` is in its id: a text, or with ``*``, ``?`` or ``[...]`` the whole id.
    """

    states: Collection[str] = ()
    pattern: str | None = None
    backend: str | None = None
    job: str | None = None

    def current(self, limit: int | None) -> list[Run]:
        """The newest runs that match, with their current state.

        With `states` it asks for all unfinished runs first, since they may be in one by now.
        """
        known = self._of_any_state()
        if not self.states:
            return run_state.refresh(registry.select(*known.sql, limit=limit))
        condition, values = known.sql
        unfinished = registry.select(f"{layout.UNFINISHED} AND {condition}", values)
        current = {row.run: row for row in run_state.refresh(unfinished)}
        return [current.get(row.run, row) for row in registry.select(*self.sql, limit=limit)]

    def count(self) -> int:
        """How many runs match as far as the registry knows; the target is not asked."""
        return registry.count(*self.sql)

    def _of_any_state(self) -> Search:
        return Search((), self.pattern, self.backend, self.job)

    @property
    def sql(self) -> tuple[str, tuple[str, ...]]:
        """The condition in SQL, and its values."""
        parts: dict[str, tuple[str, ...]] = {}
        if self.states:
            parts[f"state IN ({', '.join('?' * len(self.states))})"] = tuple(self.states)
        if self.pattern is not None:
            is_wild = any(letter in self.pattern for letter in _WILD)
            key = "run GLOB ?" if is_wild else "instr(run, ?) > 0"
            parts[key] = (_glob(self.pattern) if is_wild else self.pattern,)
        if self.backend is not None:
            parts["backend = ?"] = (self.backend,)
        if self.job is not None:
            parts["name = ?"] = (self.job,)
        return " AND ".join(parts) or "1", sum(parts.values(), ())


def _glob(pattern: str) -> str:
    """A pattern of the shell as SQLite's GLOB writes it: a set is negated by ``^``.

    No id holds a character that the two take differently.
    """
    return re.sub(r"\[([!^])", lambda match: "[^" if match[1] == "!" else "[", pattern)
