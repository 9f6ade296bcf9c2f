"""Problems of a job that are the same on every backend."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job import environments
from deploykit.job.decode import Plain
from deploykit.job.model import TRACKERS, JobSpec, Problem, Track
from deploykit.job.spelling import did_you_mean, nearest
from deploykit.lib import paths

DEBUGGER = "DEPLOYKIT_DEBUGGER"
"""In `env`: the number of the rank that waits for an editor's debugger."""

SECRET_KINDS = ("env", "file", "ssm", "secretsmanager")

_RESERVED = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)

_SETTABLE = (
    *("DEPLOYKIT_COLLECT_SECONDS", "DEPLOYKIT_GRACE", "DEPLOYKIT_PORTS"),
    *("DEPLOYKIT_STALL_SECONDS", DEBUGGER),
)
_PACKAGES = ("trackio", "wandb")
"""Trackers that need the package of their name."""
_PATH = "entrypoint.module"
_EVERYWHERE = frozenset({*sys.stdlib_module_names, "torch"})
"""Packages that every Python that can run a job has."""
_LARGEST = 2**20
"""Bytes of a script that is read."""
_LAUNCHERS = {
    *("accelerate.commands.launch", "deepspeed.launcher.runner", "fastai.launch"),
    *("torch.distributed.launch", "torch.distributed.run"),
}
_WORDS = re.compile(
    rb"spawn|start_processes|notebook_launcher|launch\b|\.run\b|tcp://|torchrun|deepspeed"
)
"""One of them is in every script that is worth parsing."""
_PLAIN = "launcher: python, which starts one plain process on each node"
_COMMAND = re.compile(
    r"(?<![\w./-])(torchrun|accelerate launch|deepspeed|torch\.distributed\.(?:launch|run)"
    r"|fastai\.launch)(?![\w./-])"
)
_STARTS = re.compile(
    r"subprocess\.(?:run|call|check_call|check_output|Popen)|os\.(?:system|(?:exec|spawn)\w+)"
)
_SPAWNS = re.compile(
    r"(?:\w+\.)*(?:mp|multiprocessing)\.(?:spawn|start_processes)|(?:\w+\.)*notebook_launcher"
)
_MODULES = {"torch.multiprocessing", "subprocess", "os"}


def is_secret(value: str) -> bool:
    """Whether an environment value is a reference, ``secret:KIND:NAME``."""
    return value.startswith("secret:")


def spread_nodes(tree: dict[str, Any]) -> None:
    """Replace ``nodes: 2:4`` in a job by ``nodes: 4`` and ``min_nodes: 2``, in place."""
    resources = tree.get("resources")
    if not isinstance(resources, dict) or not isinstance(resources.get("nodes"), str):
        return
    least, _, most = resources["nodes"].partition(":")
    if least.isdecimal() and most.isdecimal():
        tree["resources"] = {**resources, "nodes": Plain(most), "min_nodes": Plain(least)}


def check_nodes(job: JobSpec) -> Iterator[Problem]:
    """Whether the fewest nodes are at most the most."""
    least, most = job.resources.min_nodes, job.resources.nodes
    if least is not None and least > most:
        message = f"the minimum, {least} nodes, exceeds the maximum, {most}"
        yield Problem("resources.min_nodes", message, f"nodes: {most}:{least}")


def check_launcher(job: JobSpec) -> Iterator[Problem]:
    """What needs torchrun, for a script that starts its own processes."""
    if job.entrypoint.launcher != "python":
        return
    why = "`launcher: python` starts one process on each node, without torchrun"
    if job.resources.min_nodes is not None:
        yield Problem("resources.min_nodes", why, f"nodes: {job.resources.nodes}")
    if (job.resources.processes_per_node or 1) > 1:
        hint = "remove it, and pass the number to the script, for example in entrypoint.args"
        yield Problem("resources.processes_per_node", why, hint)


def check_variables(job: JobSpec) -> Iterator[Problem]:
    """Problems of what becomes variables on the nodes, the same on every backend."""
    yield from _same_variable(job.data)
    kind, *steps = (job.profile or "").split(":")  # those of `torch:FIRST:LAST`
    if steps and int(steps[1]) < int(steps[0]):
        hint = f"for example {kind}:{steps[1]}:{steps[0]}"
        yield Problem("profile", "ends before it begins", hint)
    yield from _check_debugger(job)
    for name, value in job.env.items():
        if name in _RESERVED or (name.startswith("DEPLOYKIT_") and name not in _SETTABLE):
            yield Problem(
                f"env.{name}",
                "is set by the launcher on each rank and cannot be overridden",
                "remove it; the trainer reads what the launcher has set",
            )
        if is_secret(value) and _kind(value) is None:
            yield Problem(
                f"env.{name}",
                f"expected secret:KIND:NAME, with KIND one of {', '.join(SECRET_KINDS)}",
                "for example secret:env:HF_TOKEN",
            )


def _check_debugger(job: JobSpec) -> Iterator[Problem]:
    """Whether the rank that waits for a debugger is one of the job."""
    rank, count = job.env.get(DEBUGGER), job.resources.nodes * job.resources.processes
    if rank is not None and rank not in map(str, range(count)):
        message = f"{rank!r} is no rank of this job"
        yield Problem(f"env.{DEBUGGER}", message, f"its ranks are 0 to {count - 1}")


def check_metrics(job: JobSpec) -> Iterator[Problem]:
    """Problems of the patterns for metrics in the log, which no backend reads."""
    for name, regex in job.metrics.items():
        if message := pattern_problem(regex):
            yield Problem(f"metrics.{name}", message, "for example loss: 'loss ([0-9.]+)'")


def check_track(job: JobSpec) -> Iterator[Problem]:
    """Problems of the trackers, to which this machine sends the metrics."""
    if job.track is not None:
        yield from _track_problems(job.track)


def _same_variable(names: Iterable[str]) -> Iterator[Problem]:
    """Problems of channels that would share a variable."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.upper(), name)
        if other != name:
            yield Problem(
                f"data.{name}",
                f"sets the same variable as {other!r}, DEPLOYKIT_DATA_{name.upper()}",
                "choose names that differ in more than case",
            )


def _kind(reference: str) -> str | None:
    _, kind, name = (*reference.split(":", 2), "", "")[:3]
    return kind if kind in SECRET_KINDS and name else None


def check(job: JobSpec) -> list[Problem]:
    """Problems of the neutral part, beyond the types."""
    problems = [*_check_entrypoint(job), *check_nodes(job), *check_variables(job)]
    return [
        *problems,
        *check_launcher(job),
        *check_metrics(job),
        *check_track(job),
    ]


def _check_entrypoint(job: JobSpec) -> Iterable[Problem]:
    entry, source = job.entrypoint, Path(job.source)
    if (entry.script is None) == (entry.module is None):
        yield Problem("entrypoint", "expected exactly one of `script` and `module`")
    if job.environment is not None:
        yield from environments.check(job.environment)
    for number, pattern in enumerate(job.outputs):
        if ".." in pattern.split("/"):
            message = f"{pattern!r} leaves the working folder"
            yield Problem(f"outputs[{number}]", message, "name files below it, without `..`")
    if not os.path.isdir(source):  # noqa: PTH112 - Path.is_dir() raises on a name too long
        yield Problem("source", f"folder {source} not found")
    elif entry.script is not None:
        yield from _check_script(entry.script, source)


def _check_script(script: str, source: Path) -> Iterable[Problem]:
    path = Path(script)
    if path.is_absolute() or ".." in path.parts or script.startswith("-"):
        yield Problem("entrypoint.script", "must be a path inside the source folder", "train.py")
    elif not os.path.isfile(source / path):  # noqa: PTH113 - as above
        yield _no_script(script, source)


def pattern_problem(regex: str) -> str:
    """Why a text is no pattern, as the end of a sentence; empty if it is one."""
    try:
        groups = re.compile(regex).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return "" if groups else "has no group around the number"


def _track_problems(track: Track) -> Iterator[Problem]:
    """Yield the problems. Asks no server: one that is down now may be up when there are metrics."""
    if not track.chosen:
        yield Problem("track", "names no tracker", f"one of {', '.join(TRACKERS)}, or remove it")
    for name in _PACKAGES:
        if name in track.chosen and not _is_installed(name):
            message = f"the package {name} is not installed for the Python that runs deploykit"
            yield Problem(f"track.{name}", message, f"pip install {name}")


def _is_installed(name: str) -> bool:
    """Whether there is a package of that name, and not just a folder, as wandb leaves one."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _no_script(script: str, source: Path) -> Problem:
    """The problem of a script that is not in the source folder, with the one that was meant."""
    scripts = sorted(item.relative_to(source).as_posix() for item in source.glob("*.py"))
    hint = did_you_mean(script, scripts) or f"Python files: {', '.join(scripts[:8]) or 'none'}"
    return Problem("entrypoint.script", f"file {script!r} not found in {source}", hint)


def check_module(job: JobSpec, python: Path | None) -> Iterator[Problem]:
    """An error if the module cannot be run, a warning if that cannot be known here.

    `python` runs the job; None if it runs elsewhere.
    """
    module = job.entrypoint.module or ""
    top, *below = module.split(".")
    if not all(part.isidentifier() for part in module.split(".")):
        yield Problem(_PATH, f"{module!r} is not the name of a module", _as_module(module))
        return
    source = Path(job.source)
    folders = [source, *_python_path(job, source)]
    if _runs(folders, module):
        return
    if any(_is_whole(folder, top) for folder in folders):
        yield _missing_part(folders, top, below)
    elif top not in _EVERYWHERE:
        yield from _installed(module, source, python)


def _as_module(text: str) -> str | None:
    """How a path is written as a module: ``pkg/train.py`` is ``pkg.train``."""
    name = text.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
    return f"module: {name}, or script: {text}" if text != name else None


def _python_path(job: JobSpec, source: Path) -> list[Path]:
    """The folders of the job's own PYTHONPATH; the launcher starts in the source."""
    text = job.env.get("PYTHONPATH", "")
    return [source / folder for folder in text.split(os.pathsep) if folder]


def _runs(folders: Iterable[Path], module: str) -> bool:
    """Whether one of the folders has the module, or a package of that name with a __main__."""
    path = Path(*module.split("."))
    files = (path.with_suffix(".py"), path / "__main__.py")
    return any((folder / file).is_file() for folder in folders for file in files)


def _is_whole(folder: Path, top: str) -> bool:
    """Whether a folder has the module or package `top`, so that Python looks nowhere else for it.

    A folder without __init__.py only adds to an installed package of that name:
    https://docs.python.org/3/reference/import.html#namespace-packages
    """
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _missing_part(folders: Sequence[Path], top: str, below: Sequence[str]) -> Problem:
    """The problem of a package of the source that lacks the module, or cannot be run itself."""
    package = next(folder / top for folder in folders if _is_whole(folder, top))
    inside = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in package.rglob("*.py")
        if not path.name.startswith("__")
    }
    name = ".".join([top, *below])
    hint = did_you_mean(name, inside) or f"it has {', '.join(sorted(inside)[:8]) or 'no modules'}"
    if not below or package.joinpath(*below).is_dir():
        return Problem(_PATH, f"the package {name} has no __main__.py, so it cannot be run", hint)
    return Problem(_PATH, f"{name!r} was not found in {package.parent}", hint)


def _installed(module: str, source: Path, python: Path | None) -> Iterator[Problem]:
    """The problem of a module that the source does not have."""
    top = module.partition(".")[0]
    hint = _elsewhere(source, top) or _similar(source, module)
    if python is None:
        message = f"{module!r} is not in {source}; the Python of the job must have it installed"
        yield Problem(_PATH, message, hint, severity="warning")
    elif python == Path(sys.executable):
        if not _importable(module):
            yield Problem(_PATH, f"{module!r} is neither in {source} nor installed", hint)
    elif not any(_runs([folder], module) or _is_whole(folder, top) for folder in _sites(python)):
        message = f"{module!r} was found neither in {source} nor among the packages of {python}"
        yield Problem(_PATH, message, hint, severity="warning")


def _importable(module: str) -> bool:
    """Whether this Python can find the module; imports no parent package, as find_spec would."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    for part in [*below, "__main__"]:
        if spec is None or spec.submodule_search_locations is None:
            return spec is not None and part == "__main__"
        name, locations = f"{spec.name}.{part}", list(spec.submodule_search_locations)
        spec = importlib.machinery.PathFinder.find_spec(name, locations)
    return spec is not None


def _sites(python: Path) -> list[Path]:
    """The folders of packages that belong to a Python, beside its own folder."""
    lib = python.parent.parent / "lib"
    return [*lib.glob("python3*/site-packages"), *lib.glob("python3*/dist-packages")]


def _elsewhere(source: Path, top: str) -> str | None:
    """A hint where a subfolder of the source has the module."""
    folder = next((one for one in sorted(source.glob("*/")) if _is_whole(one, top)), None)
    return f"it is in {folder.name}/: env: {{PYTHONPATH: {folder.name}}}" if folder else None


def _similar(source: Path, module: str) -> str | None:
    names = {path.stem for path in source.glob("*.py")}
    names |= {path.parent.name for path in source.glob("*/__init__.py")}
    return did_you_mean(module.partition(".")[0], names)


def near_folder(location: str) -> str:
    """The folder beside it with the most similar name, else the first folder above that exists."""
    parent, name = os.path.split(location)
    if os.path.isdir(parent):  # noqa: PTH112
        near = nearest(name, os.listdir(parent))  # noqa: PTH208
        return f"did you mean {Path(parent, near)}?" if near else "create it"
    while parent and not os.path.isdir(parent):  # noqa: PTH112
        parent = os.path.dirname(parent)  # noqa: PTH120
    return f"the nearest folder that exists is {parent}"


def check_processes(job: JobSpec) -> Iterator[Problem]:
    """Warnings about what would wait for itself below torchrun."""
    entry = job.entrypoint
    if entry.launcher != "torchrun":
        return
    if entry.module in _LAUNCHERS:
        message = f"{entry.module} starts ranks itself, in each of those that torchrun starts"
        hint = "name the script, with resources.processes_per_node, and torchrun starts the ranks"
        yield Problem("entrypoint.module", message, hint, severity="warning")
    if entry.script is not None:
        call = process_start(paths.read_below(Path(job.source), entry.script, _LARGEST) or b"")
        if call is not None:
            path = "entrypoint.launcher" if call.plain else "entrypoint.script"
            yield Problem(path, *_words(entry.script, call), severity="warning")


def _words(script: str, call: ProcessStart) -> tuple[str, str]:
    message = f"{script} {call.what} (line {call.line})"
    if call.plain:
        return f"{message}, and below torchrun such processes wait for each other", _PLAIN
    return f"{message}, where no rank of torchrun listens", "init_process_group() without it"


def process_start(text: bytes) -> ProcessStart | None:
    """What the text of a script does first that needs a plain process, or else an address."""
    if not _WORDS.search(text):
        return None
    return _first_call(text)


class ProcessStart(NamedTuple):
    """What a script does, in words, with its line; whether it needs `launcher: python`."""

    what: str
    line: int
    plain: bool


def _first_call(text: bytes) -> ProcessStart | None:
    """The first call that needs a plain process, or else the first with an address."""
    try:
        calls = list(_found(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return min(calls, key=lambda one: (not one.plain, one.line), default=None)


def _found(tree: ast.AST) -> Iterator[ProcessStart]:
    names = _imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _name(node.func)
        called = names.get(called, called)
        if _SPAWNS.fullmatch(called):
            yield ProcessStart(f"calls {called}", node.lineno, plain=True)
        elif _STARTS.fullmatch(called) and (started := _COMMAND.search(" ".join(_texts(node)))):
            yield ProcessStart(f"runs {started[1]}", node.lineno, plain=True)
        elif any(one.arg == "init_method" and _is_tcp(one.value) for one in node.keywords):
            yield ProcessStart(
                "gives init_process_group a tcp:// address", node.lineno, plain=False
            )


def _imported(tree: ast.AST) -> dict[str, str]:
    """Names that `from ... import` gives to functions, and what they are."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES
        for alias in node.names
    }


def _name(node: ast.AST) -> str:
    """A dotted name as it is written; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _texts(call: ast.Call) -> Iterator[str]:
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_tcp(node: ast.AST) -> bool:
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return isinstance(first, ast.Constant) and str(first.value).startswith("tcp://")
