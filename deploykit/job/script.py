"""A job without a job file, and the job file that `deploykit init` writes.

On the command line a script or a module is a job, with defaults for everything else. If a job file
lies beside the script, or in the current folder above it, its settings apply and the script
replaces its entrypoint.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job import checks, machine, spelling
from deploykit.job import file as jobfile
from deploykit.job.file import Draft, Overrides
from deploykit.lib import paths, quoting
from deploykit.lib.errors import NotFound, UsageError

_ALONE = Path("command line")
"""Shown in messages instead of a job file; relative locations start at the current folder."""
_PLAIN = re.compile(r"(?!(?:-|~|null)\Z)[\w./+~-][\w./+~@%=:-]*(?<!:)", re.ASCII | re.IGNORECASE)
"""Text that needs no quotes in YAML, in a list either: `jobfile` reads 0.10 as it is written."""
TRAINER = "train.py"
"""The trainer that `init` writes if there is no script."""
TASK = "task.py"
"""The task that `init` writes beside the reference trainer."""
INFERENCE = "inference.py"
"""What `init` writes to serve the model of a script."""
TASK_ARGS = ("--task", "task:task")
"""Arguments of the reference trainer that run that task."""
_MAX_SCRIPTS = 500
"""Scripts that `init` reads in a folder."""
_OFFERED = 8
"""Scripts that are listed."""
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
_CPU_RANKS = 2
"""Ranks on a machine without a GPU: enough to see that they work together."""


def read(path: Path, overrides: Overrides = ()) -> Draft:
    """The job of the script `path`, or of the entrypoint in `overrides`. Raises as jobfile.read."""
    keys = [text.partition("=")[0] if isinstance(text, str) else text[0] for text in overrides]
    given = "entrypoint" in keys
    if path.suffix != ".py" and not given:
        return jobfile.read(path, overrides)  # reports what is missing
    if path.suffix == ".py" and given:
        message = f"both a script ({path}) and an entrypoint are given"
        raise UsageError(message, hint="give only one of them")
    if path.suffix != ".py":
        return _named(jobfile.override(Draft(_ALONE, {}, {}), overrides))
    script = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links, as `source` does
    if not os.path.isfile(script):  # noqa: PTH113 - Path.is_file() raises on a name too long
        scripts = sorted(file.name for file in script.parent.glob("*.py"))
        hint = spelling.did_you_mean(path.name, scripts)
        listing = f"Python files there: {', '.join(scripts[:_OFFERED]) or 'none'}"
        raise NotFound(f"script {path} not found", hint=hint or listing)
    file = _beside(script)
    if file is not None:
        draft = _replaced(jobfile.read(file), script)
    else:  # the source is the current folder, or that of a script elsewhere
        source = Path.cwd() if Path.cwd() in script.parents else script.parent
        entry = {"script": script.relative_to(source).as_posix()}
        draft = Draft(_ALONE, {"source": str(source), "entrypoint": entry}, {})
    return _named(jobfile.override(draft, overrides))


def _beside(script: Path) -> Path | None:
    """The job file whose entrypoint the script replaces."""
    here = Path.cwd()
    folders = [script.parent, *([here] if here in script.parents else [])]
    files = (folder / jobfile.DEFAULT for folder in folders)
    job_file = next((file for file in files if file.is_file()), None)
    return job_file.relative_to(here) if job_file and here in job_file.parents else job_file


def _replaced(draft: Draft, script: Path) -> Draft:
    """The job of a file, with another script; the file's arguments are those of its own script."""
    source = draft.data.get("source", ".")
    folder = os.path.abspath(_folder(draft) / str(source))  # noqa: PTH100 - as above
    within = script.relative_to(folder) if Path(folder) in script.parents else script
    entry = draft.data.get("entrypoint")
    own = entry.get("script") if isinstance(entry, dict) else None
    if not isinstance(own, str) or Path(own) != within:
        draft.data["entrypoint"] = {"script": within.as_posix()}
    return draft


def _folder(draft: Draft) -> Path:
    """The folder from which relative locations start."""
    return draft.source.parent if isinstance(draft.source, Path) else Path()


def _named(draft: Draft) -> Draft:
    """Name the draft after its script or module, unless it has a name."""
    entry = draft.data.get("entrypoint")
    if "name" not in draft.data and isinstance(entry, dict):
        script = Path(str(entry.get("script", ""))).stem
        module = str(entry.get("module", "")).rpartition(".")[2]
        draft.data["name"] = spelling.near_name(script or module) or "job"
    return draft


def text(draft: Draft, arguments: Sequence[str], folder: Path) -> str:
    """The draft as a job file in `folder`; `arguments` come after those that it has."""
    data = dict(_moved(draft, folder))
    if arguments:
        entry = data["entrypoint"]
        data["entrypoint"] = {**entry, "args": [*(entry.get("args") or ()), *arguments]}
    order = ("name", "backend", "source", "entrypoint", "resources")
    known = {key: data[key] for key in order if key in data}
    return "\n".join([*_block({**known, **data}), ""])


def _moved(draft: Draft, folder: Path) -> Iterator[tuple[str, Any]]:
    """The values, with locations relative to another folder."""
    old, new = Path(os.path.realpath(_folder(draft))), os.path.realpath(folder)

    def seen(location: Any) -> Any:
        if isinstance(location, dict) and "path" in location:
            return {**location, "path": seen(location["path"])}
        if not isinstance(location, str) or "://" in location or location.startswith("~"):
            return location
        return os.path.relpath(old / location, new)

    data = draft.data if str(old) == new else {"source": ".", **draft.data}
    for key, value in data.items():
        if key == "source" or (str(old) != new and key in {"output", "checkpoints"}):
            yield key, seen(value)
        elif str(old) != new and key == "data" and isinstance(value, dict):
            yield key, {name: seen(location) for name, location in value.items()}
        else:
            yield key, value


def _block(data: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{quoting.yaml(key)}:"
            yield from _block(value, f"{indent}  ")
        else:
            yield f"{indent}{quoting.yaml(key)}: {_flow(value)}"


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        items = (f"{quoting.yaml(key)}: {_flow(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    return str(value) if plain else quoting.data(value)


class Script(NamedTuple):
    """A script that a job may run. The more `points`, the likelier it is the trainer."""

    path: str
    """Relative, with forward slashes."""
    points: int
    distributed: bool
    """Whether its ranks work together; otherwise each rank would do all the work."""
    module: str | None = None
    """Its name for ``python -m``, if it imports from its own package."""
    root: str = ""
    """The folder that holds the package, if that is not the source: ``src``."""
    plain: bool = False
    """Whether it starts its other processes itself."""


def scripts(folder: Path) -> list[Script]:
    """The scripts in a folder, most likely first; if there are none, those one level below; if
    there are none either, those of a package in ``src``.

    Raises OSError if the folder cannot be read.
    """
    here = sorted(folder.iterdir())
    below = (file for path in here if _may_have_scripts(path) for file in sorted(path.iterdir()))
    for level in (here, below, sorted(folder.glob("src/*/*.py"))):
        files = (
            file for file in level if file.suffix == ".py" and not _NO_SCRIPT.fullmatch(file.name)
        )
        judged = [judge(folder, file) for file in itertools.islice(files, _MAX_SCRIPTS)]
        ranked = sorted(filter(None, judged), key=lambda script: (-script.points, script.path))
        if ranked:
            return ranked
    taken = os.path.lexists(folder / TRAINER)  # whatever it is, it is not replaced
    return [Script(TRAINER, 0, distributed=False)] if taken else []


def _may_have_scripts(path: Path) -> bool:
    readable = path.is_dir() and not path.is_symlink() and os.access(path, os.R_OK | os.X_OK)
    return readable and not _NO_FOLDER.fullmatch(path.name) and not (path / "pyvenv.cfg").exists()


def judge(folder: Path, file: Path) -> Script | None:
    """The script in a file; None for a file that does nothing when it is run."""
    try:
        content = file.read_bytes() if file.is_file() else b""
    except OSError:
        return None
    text = content.decode(errors="replace")
    if not _RUNS.search(text):
        return None
    distributed = bool(_DISTRIBUTED.search(text))
    points = 5 * bool(_TRAINS.search(text)) + 2 * distributed
    points += sum(value for pattern, value in _NAMES if pattern.search(file.stem))
    name = file.relative_to(folder).as_posix()
    in_package = file.parent != folder and (file.parent / "__init__.py").exists()
    is_below = name.count("/") > 1 and name.startswith("src/")
    root = "src" if is_below and not (folder / "src/__init__.py").exists() else ""
    module = name.removesuffix(".py").removeprefix(f"{root}/").replace("/", ".")
    package = re.escape(module.partition(".")[0])
    own = re.search(rf"^\s*(from \.|(from|import) {package}\b)", text, re.MULTILINE)
    start = checks.process_start(content)
    return Script(
        name,
        points,
        distributed=distributed,
        module=module if in_package and own else None,
        root=root if in_package and own else "",
        plain=start is not None and start.plain,
    )


def gpus() -> int:
    """The GPUs of this machine that a job may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in {"", "-1"}])
    return machine.gpus() or 0


def ranks(script: Script) -> tuple[str, int]:
    """The key of `resources` to set, and its value on this machine."""
    if script.distributed and (count := gpus()):
        return "gpus_per_node", count
    several = script.distributed and not script.plain
    return "processes_per_node", min(_CPU_RANKS, machine.cpus()) if several else 1


def job_file(  # noqa: PLR0913 - one keyword for each line that depends on the user
    name: str,
    script: Script,
    *,
    schema: str | None,
    backend: str | None,
    sections: Sequence[str],
    args: Sequence[str] = (),
) -> str:
    """The job file. `schema` is its address for editors; `sections` are lines of examples."""
    key, count = ranks(script)
    entry = f"module: {script.module}" if script.module else f"script: {quoting.yaml(script.path)}"
    whose = (
        "the script starts the other processes"
        if script.plain
        else "ranks per node"
        if key == "processes_per_node"
        else "one rank per GPU"
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
        f"{f'  args: [{arguments}]':<26}  # add arguments to one run: deploykit submit -- --lr 0.1",
        "resources:",
        "  nodes: 1",
        f"{f'  {key}: {count}':<28}# {whose}",
        "  time_limit: 4h            # the job is stopped after this time; optional for local runs",
    ]
    if script.root:
        lines.append(f"env: {{PYTHONPATH: {script.root}}}".ljust(28) + "# where the package is")
    return "\n".join([*lines, *(f"# {line}" for line in sections), ""])


def reference_trainer() -> dict[str, str]:
    """The texts of the reference trainer and a first task for it, by path."""
    here = paths.shipped("entrypoints")
    files = [here / TRAINER, *sorted((here / "trainer").rglob("*.py"))]
    task = paths.shipped("templates") / TASK
    return {TASK: task.read_text(encoding="utf-8")} | {
        file.relative_to(here).as_posix(): file.read_text(encoding="utf-8") for file in files
    }


def inference() -> str:
    """The text of an `inference.py` for the trainer that `init` writes."""
    return (paths.shipped("templates") / INFERENCE).read_text(encoding="utf-8")


def trainer() -> str:
    """The text of the trainer for a folder without a script."""
    return (paths.shipped("templates") / TRAINER).read_text(encoding="utf-8")
