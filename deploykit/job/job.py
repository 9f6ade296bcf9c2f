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
    node_local: bool
    extras: Sequence[str]
    groups: Sequence[str]
    modules: Sequence[str]


class TrackKeys(TypedDict, total=False):
    """The section `track`: where the metrics of a run are sent."""

    mlflow: str
    tensorboard: str | os.PathLike[str]
    trackio: str
    wandb: str


class NotifyKeys(TypedDict, total=False):
    """The section `notify`: receivers of messages, and the events to report."""

    to: Sequence[str]
    events: Sequence[str]
    command: Sequence[str]


class RestartPolicyKeys(TypedDict, total=False):
    """The section `restarts`: whether failed ranks start again."""

    policy: Literal["cause", "always", "never"]
    back_off: str | timedelta


class InputChannelKeys(TypedDict, total=False):
    """A channel of `data` that is copied to the nodes: a path, and how."""

    path: str | os.PathLike[str]
    stage: Literal["node", "shard", "shared"]
    stage_folder: str


class Job(Mapping[str, Any]):
    """A job, with the keys of a job file as arguments and sections as mappings.

        Job(
            name="digits",
            entrypoint={"script": "train.py", "args": ["--lr", 0.1]},
            resources={"nodes": 2, "processes_per_node": 4, "time_limit": "30m"},
            slurm={"partition": "gpu"},
        )

    It is checked when it is used: `check`, `plan` and `submit` raise JobFileError with every
    problem. Relative paths start at the current folder. None means that a key is omitted.
    `sections` are backend sections.
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
        data: Mapping[str, str | os.PathLike[str] | InputChannelKeys] | None = None,
        output: str | os.PathLike[str] | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        keep_checkpoints: int | None = None,
        outputs: Sequence[str] | None = None,
        metrics: Mapping[str, str] | None = None,
        track: TrackKeys | None = None,
        notify: NotifyKeys | None = None,
        retries: int | None = None,
        restarts: RestartPolicyKeys | None = None,
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
        keys = {key: value for key, value in locals().items() if key not in {"self", "sections"}}
        keys |= sections
        self._tree = {key: _plain(value) for key, value in keys.items() if value is not None}
        if isinstance(entrypoint, Mapping) and "args" in entrypoint:
            self._tree["entrypoint"]["args"] = _argument_list(entrypoint["args"])

    def __getitem__(self, key: str) -> Any:
        return self._tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return f"Job({', '.join(f'{key}={value!r}' for key, value in self._tree.items())})"


def source(job: str | os.PathLike[str] | Job) -> Path | Job:
    """A job as the functions of `lifecycle` take it."""
    return job if isinstance(job, Job) else Path(job)


def overrides(changes: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The overrides of `set`, as `lifecycle` takes them."""
    return [
        (str(key), _argument_list(value) if key == "entrypoint.args" else _plain(value))
        for key, value in (changes or {}).items()
    ]


def arguments(args: Iterable[Argument]) -> list[str]:
    """Arguments of the trainer as text. Raises UsageError."""
    if isinstance(args, str):
        raise UsageError(f"args={args!r}: expected a list", hint=f"args={args.split()}")
    texts: list[str] = _argument_list(list(args))
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(f"args[{number}]: expected text, a number or a path, got {text!r}")
    return texts


def _argument_list(args: Any) -> Any:
    """Arguments with numbers and paths as text; anything else unchanged, for the checks."""
    args = _plain(args)
    if not isinstance(args, list):
        return args
    return [
        str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
        for item in args
    ]


def _plain(value: Any) -> Any:
    """A Python value as a job file has it: paths and times as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, timedelta):
        return f"{int(value.total_seconds())}s"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
