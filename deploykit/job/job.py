"""A job built in Python: the keys of a job file as arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

from deploykit.lib.errors import UsageError

Argument = str | int | float | os.PathLike[str]
"""An argument of the trainer; numbers become text as `str` writes them."""


class EntrypointKeys(TypedDict, total=False):
    """The section `entrypoint`: one of `script` and `module`."""

    script: str | os.PathLike[str]
    module: str
    args: Sequence[Argument]
    launcher: Literal["torchrun", "python"]


class ResourcesKeys(TypedDict, total=False):
    """The section `resources`. A time is text such as ``30m``, or a timedelta."""

    time_limit: str | timedelta
    nodes: int | str
    min_nodes: int | None
    processes_per_node: int | None
    gpus_per_node: int
    cpus_per_node: int | None
    memory: str | None


class EnvironmentKeys(TypedDict, total=False):
    """The section `environment`: one of `conda`, `venv` and `uv`, and `modules`."""

    conda: str | os.PathLike[str]
    venv: str | os.PathLike[str]
    uv: str | os.PathLike[str]
    modules: Sequence[str]


class TrackKeys(TypedDict, total=False):
    """The section `track`: where the metrics of a run are sent."""

    mlflow: str
    tensorboard: str | os.PathLike[str]
    trackio: str
    wandb: str


class Job(Mapping[str, Any]):
    """A job, with the keys of a job file as arguments, and sections as mappings.

        Job(
            name="digits",
            entrypoint={"script": "train.py", "args": ["--lr", 0.1]},
            resources={"nodes": 2, "processes_per_node": 4, "time_limit": "30m"},
            slurm={"partition": "gpu"},
        )

    Nothing is checked until it is used: `check`, `plan` and `submit` raise JobFileError with every
    problem, under the names of the keys. Relative locations begin at the current folder. A key that
    is None is as if it were not given. `sections` are those of backends.
    """

    def __init__(  # noqa: PLR0913 - the keys of a job file
        self,
        *,
        name: str,
        entrypoint: EntrypointKeys,
        resources: ResourcesKeys | None = None,
        backend: str | None = None,
        source: str | os.PathLike[str] | None = None,
        environment: EnvironmentKeys | None = None,
        env: Mapping[str, str] | None = None,
        data: Mapping[str, str | os.PathLike[str]] | None = None,
        output: str | os.PathLike[str] | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        outputs: Sequence[str] | None = None,
        metrics: Mapping[str, str] | None = None,
        track: TrackKeys | None = None,
        retries: int | None = None,
        on_stall: Literal["report", "dump", "restart"] | None = None,
        profile: str | None = None,
        preflight: bool | None = None,
        max_cost: str | None = None,
        stop_at_cap: bool | None = None,
        budget: str | None = None,
        debug: bool | None = None,
        max_bundle: str | None = None,
        log_limit: str | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in _NOT_KEYS} | sections
        self._tree = {key: plain(value) for key, value in given.items() if value is not None}
        self._tree["entrypoint"] = _with_words(self._tree["entrypoint"])

    def __getitem__(self, key: str) -> Any:
        return self._tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return f"Job({', '.join(f'{key}={value!r}' for key, value in self._tree.items())})"


_NOT_KEYS = {"self", "sections"}


def source(job: str | os.PathLike[str] | Job) -> Path | Job:
    """A job as the functions of `lifecycle` take it."""
    return job if isinstance(job, Job) else Path(job)


def plain(value: Any) -> Any:
    """A value of Python as a job file has it: paths and times as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, timedelta):
        return f"{int(value.total_seconds())}s"
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def word(value: Any) -> Any:
    """An argument of the trainer as text; what is no argument as it is, for the checks."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number else plain(value)


def overrides(given: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The overrides of `set`, as `lifecycle` takes them."""
    return [(str(key), _value(key, value)) for key, value in (given or {}).items()]


def _value(key: str, value: Any) -> Any:
    value = plain(value)
    is_args = key == "entrypoint.args" and isinstance(value, list)
    return list(map(word, value)) if is_args else value


def words(args: Iterable[Argument]) -> list[str]:
    """The arguments as text. Raises UsageError."""
    if isinstance(args, str):
        raise UsageError(f"args={args!r}: expected a list", hint=f"args={args.split()}")
    words = list(map(word, args))
    for number, one in enumerate(words):
        if not isinstance(one, str):
            raise UsageError(f"args[{number}]: expected text, a number or a path, got {one!r}")
    return words


def _with_words(entrypoint: Any) -> Any:
    args = entrypoint.get("args") if isinstance(entrypoint, dict) else None
    return {**entrypoint, "args": list(map(word, args))} if isinstance(args, list) else entrypoint
