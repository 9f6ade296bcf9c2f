"""Weights & Biases, through its own package, which the Python that runs deploykit must have.

A run is sent whole once it has ended: then all values can be sent by ascending step, which W&B
demands, and it drops a step that is not above the last, so that nothing is doubled. Without an API
key it is written as an offline run, for ``wandb sync`` or for a later `deploykit sync` with a key.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploykit.lib.errors import BackendUnavailable
from deploykit.observe.metrics.points import Value
from deploykit.observe.trackers.contract import About, Ending, Memory


def make(where: str, about: About, memory: Memory) -> WandB:
    """A run of the project `where`, ``PROJECT`` or ``ENTITY/PROJECT``."""
    return WandB(where, about, memory)


class WandB:
    """One run of a project; see `deploykit.observe.trackers.contract.Tracker`."""

    def __init__(self, where: str, about: About, memory: Memory) -> None:
        self._entity, _, self._project = where.rpartition("/")
        self._about, self._memory = about, memory
        self._sent: dict[str, int] = {}
        self._run: Any = None

    @property
    def url(self) -> str:
        """The page of the run, or the folder of an offline run."""
        return str(self._memory.get("url") or f"{self._entity or 'you'}/{self._project}")

    def clean(self, name: str) -> str:
        """Every name is allowed."""
        return name

    def begin(self) -> Mapping[str, int]:
        """The steps that were sent, as they are remembered: an offline run counts only offline."""
        if self._memory.get("mode") not in {_mode(), "online"}:
            return {}
        return dict(self._memory["sent"])

    def send(self, values: Sequence[Value]) -> None:
        """Log the values. Raises BackendUnavailable."""
        with _asked():
            self._run = self._run or self._opened()
            for one in values:
                self._run.log({one.name: one.value}, step=one.step)
        self._sent.update({one.name: one.step for one in values})

    def end(self, ending: Ending | None) -> None:
        """Finish the run, and wait until all was sent. Raises BackendUnavailable."""
        if self._run is None:
            return
        with _asked():
            url = self._run.url or self._run.dir
            self._run.finish(exit_code=int(ending is not None and ending.state != "succeeded"))
        self._memory |= {"mode": _mode(), "url": url, "sent": self._sent}

    def _opened(self) -> Any:
        import wandb  # few have it

        folder = self._about.folder / "wandb"
        if _mode() == "offline":
            shutil.rmtree(folder, ignore_errors=True)  # of a sending that was interrupted
        quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
        quiet |= {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}
        return wandb.init(
            project=self._project,
            entity=self._entity or None,
            id=self._about.run,
            name=self._about.run,
            config=dict(self._about.params),
            tags=[self._about.tags["backend"]],
            dir=str(self._about.folder),
            mode=_mode(),
            resume=None if _mode() == "offline" else "allow",
            settings=wandb.Settings(**quiet),
        )


def _mode() -> str:
    """``online`` or ``offline``: W&B's own variable, else whether there is a key."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen in {"online", "offline"}:
        return chosen
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """Raise BackendUnavailable for any error of the package."""
    try:
        yield
    except Exception as error:
        raise BackendUnavailable(
            f"wandb: {type(error).__name__}: {error}",
            hint="see https://docs.wandb.ai; to retry, run `deploykit sync`",
        ) from error
