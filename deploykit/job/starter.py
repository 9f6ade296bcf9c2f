"""What `deploykit init` finds in a folder, and the short job file that it writes there."""

from __future__ import annotations

import itertools
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit.job import own_processes, spelling
from deploykit.lib import paths, quoting

TRAINER = "train.py"
"""The name of the trainer that is written where no script is found."""
TASK = "task.py"
"""The name of the task that is written beside the reference trainer."""
TASK_ARGS = ("--task", "task:task")
"""The arguments with which the reference trainer runs that task."""
_LARGEST = 2**20
"""Bytes of a script that is read."""
_MOST = 500
"""Files that are read."""
_NO_SCRIPT = re.compile(r"(setup|conftest|noxfile|__\w+__|test_.*|.*_tests?)\.py")
_NO_FOLDER = re.compile(
    r"\..*|(docs?|tests?|build|dist|venv|env|node_modules|__\w+__)", re.IGNORECASE
)
_RUNS = re.compile(r"^(if __name__\b|[A-Za-z_][\w.]*\()", re.MULTILINE)
_FRAMEWORKS = r"torch|lightning|pytorch_lightning|accelerate|transformers|deepspeed|fastai"
_TRAINS = re.compile(rf"^\s*(import|from)\s+({_FRAMEWORKS})\b", re.MULTILINE)
_DISTRIBUTED = re.compile(
    r"init_process_group|torch\.distributed|DistributedDataParallel|LOCAL_RANK|WORLD_SIZE"
    r"|import (pytorch_)?lightning|from (lightning|accelerate|deepspeed)\b|\bTrainer\("
)
_FROM_PACKAGE = re.compile(r"^\s*from \.", re.MULTILINE)
_NAMES = (
    (re.compile(r"train|fine_?tun", re.IGNORECASE), 4),
    (re.compile(r"main", re.IGNORECASE), 2),
    (re.compile(r"run|fit", re.IGNORECASE), 1),
    (
        re.compile(r"eval|test|infer|predict|plot|prepare|export|convert|util|help", re.IGNORECASE),
        -3,
    ),
)
"""Points for a word in a script's name."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_ON_CPU = 2
"""Ranks on a machine without a GPU: enough to see that they work together."""


@dataclass(frozen=True)
class Script:
    """A script that a job may run. `points` say how likely it is the one that trains."""

    path: str
    """Relative, with forward slashes."""
    points: int
    distributed: bool
    """Whether several ranks of it work together; otherwise each would do all the work."""
    module: str | None = None
    """Its name for ``python -m``, where it imports from the package that it is in."""
    plain: bool = False
    """Whether it starts its other processes itself."""


def scripts(folder: Path) -> list[Script]:
    """The scripts in a folder, the likeliest first; only where there is none, those one below.

    Raises OSError where the folder cannot be read.
    """
    for level in (_here, _below):
        names = (
            name for name in sorted(level(folder)) if not _NO_SCRIPT.fullmatch(Path(name).name)
        )
        judged = [_judged(folder, name) for name in itertools.islice(names, _MOST)]
        ranked = sorted(filter(None, judged), key=lambda script: (-script.points, script.path))
        if ranked:
            return ranked
    taken = os.path.lexists(folder / TRAINER)  # whatever it is, it is not replaced
    return [Script(TRAINER, 0, distributed=False)] if taken else []


def _here(folder: Path, inside: str = "") -> Iterator[str]:
    with os.scandir(folder / inside) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield f"{inside}{entry.name}"


def _below(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        own = os.access(folder / name, os.R_OK | os.X_OK)
        if own and not _NO_FOLDER.fullmatch(name) and not (folder / name / "pyvenv.cfg").exists():
            yield from _here(folder, f"{name}/")


def _judged(folder: Path, name: str) -> Script | None:
    """The script of that name; None for a file that does nothing when it is run."""
    content = paths.read_below(folder, name, _LARGEST)
    text = (content or b"").decode(errors="replace")
    if not _RUNS.search(text):
        return None
    points = 5 * bool(_TRAINS.search(text)) + 2 * bool(_DISTRIBUTED.search(text))
    points += sum(value for word, value in _NAMES if word.search(Path(name).stem))
    package = Path(name).parent
    inside = package.name and (folder / package / "__init__.py").exists()
    module = name.removesuffix(".py").replace("/", ".")
    in_package = bool(inside and _FROM_PACKAGE.search(text))
    started = own_processes.in_text(content or b"")
    plain = started is not None and started.plain
    distributed = bool(_DISTRIBUTED.search(text))
    return Script(name, points, distributed, module if in_package else None, plain)


def gpus() -> int:
    """The GPUs of this machine that a job may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([one for one in chosen.split(",") if one.strip() not in {"", "-1"}])
    try:
        return len(os.listdir(_GPUS))  # noqa: PTH208 - only counted
    except OSError:
        return 0


def ranks(script: Script) -> tuple[str, int]:
    """The key of `resources` to set, and its value on this machine."""
    count = gpus()
    if count and script.distributed:
        return "gpus_per_node", count
    cores = len(os.sched_getaffinity(0))
    several = script.distributed and not script.plain
    return "processes_per_node", min(_ON_CPU, cores) if several else 1


def job_file(  # noqa: PLR0913 - one keyword for each line that depends on the user
    name: str,
    script: Script,
    *,
    schema: str | None,
    backend: str | None,
    sections: Sequence[str],
    args: Sequence[str] = (),
) -> str:
    """The job file. `schema` is its address for editors; `sections` are examples, one a line."""
    key, count = ranks(script)
    entry = f"module: {script.module}" if script.module else f"script: {quoting.yaml(script.path)}"
    whose = (
        "the script starts the others"
        if script.plain
        else "ranks of each node"
        if key == "processes_per_node"
        else "of each node, with a rank each"
    )
    arguments = ", ".join(map(quoting.yaml, args))
    lines = [
        *([f"# yaml-language-server: $schema={schema}"] if schema else []),
        "# `deploykit submit` runs this job; `deploykit init --full all.yaml` explains every key",
        f"name: {spelling.near_name(name) or 'job'}",
        *([f"backend: {quoting.yaml(backend)}"] if backend else []),
        "entrypoint:",
        f"  {entry}",
        *(["  launcher: python        # the script starts its processes"] if script.plain else []),
        f"{f'  args: [{arguments}]':<26}  # for one run: deploykit submit -- --lr 0.1",
        "resources:",
        "  nodes: 1",
        f"{f'  {key}: {count}':<28}# {whose}",
        "  time_limit: 4h            # then the job is stopped; optional on this machine",
        *(line for text in sections for line in _comment(text)),
    ]
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 96, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


def reference_trainer() -> dict[str, str]:
    """The texts of the reference trainer and of a first task for it, by path."""
    here = paths.shipped("entrypoints")
    files = [here / TRAINER, *sorted((here / "trainer").rglob("*.py"))]
    task = paths.shipped("templates") / TASK
    return {TASK: task.read_text(encoding="utf-8")} | {
        file.relative_to(here).as_posix(): file.read_text(encoding="utf-8") for file in files
    }


def trainer() -> str:
    """The text of the trainer for a folder without a script; it is a `Script` of that folder."""
    return (paths.shipped("templates") / TRAINER).read_text(encoding="utf-8")
