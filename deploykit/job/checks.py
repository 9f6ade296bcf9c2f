"""Problems of a job that are the same on every backend."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from deploykit.job import environments
from deploykit.job.model import TRACKERS, JobSpec, Problem, Track
from deploykit.job.spelling import did_you_mean, nearest

DEBUGGER = "DEPLOYKIT_DEBUGGER"
"""In `env`: the number of the rank that waits for an editor's debugger."""
SECRET_KINDS = ("env", "file", "ssm", "secretsmanager")
_RESERVED = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
_SETTABLE = {
    *("DEPLOYKIT_COLLECT_SECONDS", "DEPLOYKIT_GRACE", "DEPLOYKIT_PORTS"),
    *("DEPLOYKIT_STALL_SECONDS", DEBUGGER),
}
_TRACKER_PACKAGES = ("trackio", "wandb")
"""Trackers that need the package of their name."""
_ALWAYS_INSTALLED = frozenset({*sys.stdlib_module_names, "torch"})
"""Packages that every Python that can run a job has."""
_LAUNCHER_MODULES = {
    *("accelerate.commands.launch", "deepspeed.launcher.runner", "fastai.launch"),
    *("torch.distributed.launch", "torch.distributed.run"),
}
_WORTH_PARSING = re.compile(
    rb"spawn|start_processes|notebook_launcher|tcp://"
    rb"|\bsubprocess\b|\bos\.(?:system|exec)|\bfrom os import\b"
)
_LAUNCH_COMMAND = re.compile(
    r"(?<![\w./-])(torchrun|accelerate launch|deepspeed|torch\.distributed\.(?:launch|run)"
    r"|fastai\.launch)(?![\w./-])"
)
_RUNS_COMMAND = re.compile(
    r"subprocess\.(?:run|call|check_call|check_output|Popen)|os\.(?:system|(?:exec|spawn)\w+)"
)
_SPAWNS = re.compile(
    r"(?:\w+\.)*(?:mp|multiprocessing)\.(?:spawn|start_processes)|(?:\w+\.)*notebook_launcher"
)


def is_secret(value: str) -> bool:
    """Whether an environment value is a reference, ``secret:KIND:NAME``."""
    return value.startswith("secret:")


def check(job: JobSpec) -> Iterator[Problem]:
    """Problems of a job, beyond its types, that are the same on every backend."""
    yield from _check_entrypoint(job)
    least, most = job.resources.min_nodes, job.resources.nodes
    if least is not None and least > most:
        message = f"the minimum, {least} nodes, exceeds the maximum, {most}"
        yield Problem("resources.min_nodes", message, f"nodes: {most}:{least}")
    yield from check_variables(job)
    yield from _check_plain_launcher(job)
    for name, regex in job.metrics.items():
        if message := pattern_problem(regex):
            yield Problem(f"metrics.{name}", message, "for example loss: 'loss ([0-9.]+)'")
    if job.track is not None:
        yield from _check_track(job.track)


def _check_entrypoint(job: JobSpec) -> Iterator[Problem]:
    entry, source = job.entrypoint, Path(job.source)
    if (entry.script is None) == (entry.module is None):
        yield Problem("entrypoint", "expected exactly one of `script` and `module`")
    if job.environment is not None:
        yield from environments.check(job.environment)
    yield from environments.check_header(job)
    for number, pattern in enumerate(job.outputs):
        if ".." in pattern.split("/"):
            message = f"{pattern!r} leaves the working folder"
            yield Problem(f"outputs[{number}]", message, "name files below it, without `..`")
    if not os.path.isdir(source):  # noqa: PTH112 - Path.is_dir() raises on a name too long
        yield Problem("source", f"folder {source} not found")
    elif entry.script is not None:
        yield from _check_script(entry.script, source)


def _check_script(script: str, source: Path) -> Iterator[Problem]:
    path = Path(script)
    if path.is_absolute() or ".." in path.parts or script.startswith("-"):
        yield Problem("entrypoint.script", "must be a path inside the source folder", "train.py")
    elif not os.path.isfile(source / path):  # noqa: PTH113 - as above
        scripts = sorted(item.relative_to(source).as_posix() for item in source.glob("*.py"))
        hint = did_you_mean(script, scripts) or f"Python files: {', '.join(scripts[:8]) or 'none'}"
        yield Problem("entrypoint.script", f"file {script!r} not found in {source}", hint)


def _check_plain_launcher(job: JobSpec) -> Iterator[Problem]:
    """Settings that need torchrun, of a script that starts its own processes."""
    if job.entrypoint.launcher != "python":
        return
    why = "`launcher: python` starts one process on each node, without torchrun"
    if job.resources.min_nodes is not None:
        yield Problem("resources.min_nodes", why, f"nodes: {job.resources.nodes}")
    if (job.resources.processes_per_node or 1) > 1:
        hint = "remove it, and pass the number to the script, for example in entrypoint.args"
        yield Problem("resources.processes_per_node", why, hint)


def check_variables(job: JobSpec) -> Iterator[Problem]:
    """Problems of what becomes variables on the nodes: `data`, `profile` and `env`."""
    channels: dict[str, str] = {}
    for name in job.data:
        other = channels.setdefault(name.upper(), name)
        if other != name:
            message = f"sets the same variable as {other!r}, DEPLOYKIT_DATA_{name.upper()}"
            yield Problem(f"data.{name}", message, "choose names that differ in more than case")
    kind, *steps = (job.profile or "").split(":")  # those of `torch:FIRST:LAST`
    if steps and int(steps[1]) < int(steps[0]):
        hint = f"for example {kind}:{steps[1]}:{steps[0]}"
        yield Problem("profile", "ends before it begins", hint)
    rank, ranks = job.env.get(DEBUGGER), job.resources.world_size
    if rank is not None and rank not in map(str, range(ranks)):
        message = f"rank {rank!r} does not exist; this job has ranks 0 to {ranks - 1}"
        yield Problem(f"env.{DEBUGGER}", message)
    for name, value in job.env.items():
        if name in _RESERVED or (name.startswith("DEPLOYKIT_") and name not in _SETTABLE):
            message = "is set by the launcher on each rank and cannot be overridden"
            hint = "remove it; the trainer reads what the launcher has set"
            yield Problem(f"env.{name}", message, hint)
        if is_secret(value):
            _, kind, reference = (*value.split(":", 2), "")[:3]
            if kind not in SECRET_KINDS or not reference:
                message = f"expected secret:KIND:NAME, with KIND one of {', '.join(SECRET_KINDS)}"
                yield Problem(f"env.{name}", message, "for example secret:env:HF_TOKEN")


def pattern_problem(regex: str) -> str:
    """Why a pattern for metrics is invalid, as the end of a sentence; empty if it is valid."""
    try:
        groups = re.compile(regex).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return "" if groups else "has no group around the number"


def _check_track(track: Track) -> Iterator[Problem]:
    """Contacts no server: one that is down now may be up when there are metrics."""
    if not track.chosen:
        yield Problem("track", "names no tracker", f"one of {', '.join(TRACKERS)}, or remove it")
    for name in _TRACKER_PACKAGES:
        spec = importlib.util.find_spec(name) if name in track.chosen else None
        if name in track.chosen and (spec is None or spec.origin is None):  # wandb leaves a folder
            message = f"the package {name} is not installed for the Python that runs deploykit"
            yield Problem(f"track.{name}", message, f"pip install {name}")


def check_module(job: JobSpec, python: Path | None) -> Iterator[Problem]:
    """An error if the module cannot be run, a warning if that cannot be known here.

    `python` runs the job; None if it runs elsewhere. Nothing is imported or run: the folders that
    ``python -m`` would search are read. Python looks in the working folder first, which is the
    source, then in PYTHONPATH, then among installed packages:
    https://docs.python.org/3/using/cmdline.html#cmdoption-m
    """
    path, module, source = "entrypoint.module", job.entrypoint.module or "", Path(job.source)
    if not all(part.isidentifier() for part in module.split(".")):
        name = module.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
        hint = f"module: {name}, or script: {module}" if module != name else None
        yield Problem(path, f"{module!r} is not the name of a module", hint)
        return
    python_path = job.env.get("PYTHONPATH", "").split(os.pathsep)
    folders = [source, *(source / folder for folder in python_path if folder)]
    top = module.partition(".")[0]
    if _has_runnable(folders, module) or top in _ALWAYS_INSTALLED:
        return
    if packages := [folder / top for folder in folders if _has_whole(folder, top)]:
        yield _missing_part(packages[0], module)
        return
    hint = _module_hint(source, top)
    if python is None:
        message = f"{module!r} is not in {source}; the Python of the job must have it installed"
        yield Problem(path, message, hint, severity="warning")
    elif python == Path(sys.executable):
        if not _importable(module):
            yield Problem(path, f"{module!r} is neither in {source} nor installed", hint)
    else:
        sites = _packages(python)
        if not _has_runnable(sites, module) and not any(_has_whole(site, top) for site in sites):
            message = f"{module!r} was found neither in {source} nor among the packages of {python}"
            yield Problem(path, message, hint, severity="warning")


def check_torch(job: JobSpec, python: Path) -> Iterator[Problem]:
    """A problem if PyTorch is not among the packages of `python`, which runs the job.

    Nothing is imported or run: a warning for an environment that deploykit does not run in.
    """
    if job.entrypoint.launcher == "torchrun" and _lacks(job, python, "torch"):
        message = f"PyTorch is not installed for {python}, which runs the job"
        hint = f"{python} -m pip install torch, or set `environment` to one that has it"
        severity: Literal["error", "warning"]
        severity = "error" if python == Path(sys.executable) else "warning"
        yield Problem("environment", message, hint, severity=severity)


def check_boto3(job: JobSpec, python: Path) -> Iterator[Problem]:
    """Problems if a node copies data or checkpoints by boto3, and `python`, which runs the job, has
    none: a warning for data, an error for checkpoints.
    """
    needed = {
        f"data.{name}": f"which copies {channel.path}"
        for name, channel in job.data.items()
        if channel.stage and channel.path.startswith("s3://")
    }
    if (job.checkpoints or "").startswith("s3://"):
        needed["checkpoints"] = f"which copies checkpoints to {job.checkpoints}"
    if not needed or not _lacks(job, python, "boto3"):
        return
    hint = f"{python} -m pip install boto3, or set `environment` to one that has it"
    for path, purpose in needed.items():
        problem = Problem(path, f"boto3 is not installed for {python}, {purpose}", hint)
        yield problem if path == "checkpoints" else problem._replace(severity="warning")


def _lacks(job: JobSpec, python: Path, package: str) -> bool:
    """Whether a package is certainly not among those of `python`, which runs the job.

    `uv run` may still install it, and PYTHONPATH may name a folder that has it.
    """
    if (job.environment is not None and job.environment.uv is not None) or "PYTHONPATH" in job.env:
        return False
    if python == Path(sys.executable):
        spec = importlib.util.find_spec(package)
        return spec is None or spec.origin is None
    isolated = environments.is_isolated(python.parent.parent)
    return isolated and not any(_has_whole(site, package) for site in _packages(python))


def check_declared_torch(job: JobSpec, python: Path) -> Iterator[Problem]:
    """A warning if neither the header of the script nor `python` seems to bring PyTorch."""
    if not environments.declares_torch(job) and any(check_torch(job, python)):
        message = f"its dependencies do not name PyTorch, and {python} has none"
        hint = 'add "torch" to them, unless another one needs it'
        yield Problem("entrypoint.script", message, hint, severity="warning")


def _packages(python: Path) -> list[Path]:
    """The folders of packages of a Python, and those that ``.pth`` files add.

    https://docs.python.org/3/library/site.html
    """
    lib = python.parent.parent / "lib"
    sites = [*lib.glob("python3*/site-packages"), *lib.glob("python3*/dist-packages")]
    added = [file.read_text(errors="replace") for site in sites for file in site.glob("*.pth")]
    return [*sites, *(Path(line) for text in added for line in text.split("\n") if line[:1] == "/")]


def _has_runnable(folders: Iterable[Path], module: str) -> bool:
    """Whether one of the folders has the module, or a package of that name with a __main__."""
    path = Path(*module.split("."))
    files = (path.with_suffix(".py"), path / "__main__.py")
    return any((folder / file).is_file() for folder in folders for file in files)


def _has_whole(folder: Path, top: str) -> bool:
    """Whether a folder has the module or package `top`, so that Python searches no other for it.

    A folder without __init__.py only adds to an installed package of that name:
    https://docs.python.org/3/reference/import.html#namespace-packages
    """
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _missing_part(package: Path, module: str) -> Problem:
    """The problem of a package without this module, or one that cannot be run itself."""
    inside = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in package.rglob("*.py")
        if not path.name.startswith("__")
    }
    hint = did_you_mean(module, inside) or f"it has {', '.join(sorted(inside)[:8]) or 'no modules'}"
    message = f"{module!r} was not found in {package.parent}"
    if (package.parent / Path(*module.split("."))).is_dir() or "." not in module:
        message = f"the package {module} has no __main__.py, so it cannot be run"
    return Problem("entrypoint.module", message, hint)


def _module_hint(source: Path, top: str) -> str | None:
    """Where a subfolder of the source has the module, else a similar name in the source."""
    for folder in sorted(source.glob("*/")):
        if _has_whole(folder, top):
            return f"it is in {folder.name}/: env: {{PYTHONPATH: {folder.name}}}"
    names = {path.stem for path in source.glob("*.py")}
    names |= {path.parent.name for path in source.glob("*/__init__.py")}
    return did_you_mean(top, names)


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


def near_folder(location: str) -> str:
    """The folder beside it with the most similar name, else the first folder above that exists."""
    parent, name = os.path.split(location)
    if os.path.isdir(parent):  # noqa: PTH112
        near = nearest(name, os.listdir(parent))  # noqa: PTH208
        return f"did you mean {Path(parent, near)}?" if near else "create it"
    while parent and not os.path.isdir(parent):  # noqa: PTH112
        parent = os.path.dirname(parent)  # noqa: PTH120
    return f"the nearest folder that exists is {parent}"


class ProcessStart(NamedTuple):
    """What a script does and in which line; whether it needs `launcher: python`."""

    action: str
    line: int
    plain: bool


def check_processes(job: JobSpec) -> Iterator[Problem]:
    """Warnings about a script that starts its own processes below torchrun.

    Such a process waits until the time limit: TORCHELASTIC_USE_AGENT_STORE makes it a client of a
    store that torchrun does not serve at that address.
    https://github.com/pytorch/pytorch/blob/main/torch/distributed/rendezvous.py
    """
    entry = job.entrypoint
    if entry.launcher != "torchrun":
        return
    if entry.module in _LAUNCHER_MODULES:
        message = f"{entry.module} starts its own ranks, inside each rank that torchrun starts"
        hint = "name the script and set resources.processes_per_node; torchrun starts the ranks"
        yield Problem("entrypoint.module", message, hint, severity="warning")
    if entry.script is None:
        return
    try:
        start = process_start(Path(job.source, entry.script).read_bytes())
    except OSError:
        return  # reported by `check`, or when the source is packed
    if start is None:
        return
    message = f"{entry.script} {start.action} (line {start.line})"
    if start.plain:
        message += "; under torchrun these processes wait for each other forever"
        hint = "launcher: python, which starts one plain process on each node"
        yield Problem("entrypoint.launcher", message, hint, severity="warning")
    else:
        message += ", where none of torchrun's ranks listens"
        hint = "init_process_group() without it"
        yield Problem("entrypoint.script", message, hint, severity="warning")


def process_start(text: bytes) -> ProcessStart | None:
    """The first call of a script that needs a plain process, or else the first with an address."""
    if not _WORTH_PARSING.search(text):
        return None
    try:
        starts = list(_process_starts(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return min(starts, key=lambda start: (not start.plain, start.line), default=None)


def _process_starts(tree: ast.AST) -> Iterator[ProcessStart]:
    modules = {"torch.multiprocessing", "subprocess", "os"}
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        called = names.get(called, called)
        if _SPAWNS.fullmatch(called):
            yield ProcessStart(f"calls {called}", node.lineno, plain=True)
        elif _RUNS_COMMAND.fullmatch(called) and (command := _launch_command(node)):
            yield ProcessStart(f"runs {command}", node.lineno, plain=True)
        elif any(
            keyword.arg == "init_method" and "tcp://" in ast.unparse(keyword.value)
            for keyword in node.keywords
        ):
            action = "gives init_process_group a tcp:// address"
            yield ProcessStart(action, node.lineno, plain=False)


def _launch_command(call: ast.Call) -> str | None:
    """The launcher in the texts of a call, such as ``torchrun``."""
    constants = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant))
    match = _LAUNCH_COMMAND.search(" ".join(text for text in constants if isinstance(text, str)))
    return match[1] if match else None
