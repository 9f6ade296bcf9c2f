"""Problems of a job that are the same on every backend."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from deploykit.job import environments
from deploykit.job.model import TRACKERS, JobSpec, Notify, Problem, Track
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
_CHAT_HOSTS = (
    *("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com"),
    *("logic.azure.com", "api.powerplatform.com", "api.telegram.org", "chat.googleapis.com"),
)
"""Services whose addresses for messages contain a token."""
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
_OPEN_ENDED = {"parse_known_args", "add_subparsers", "HfArgumentParser"}
"""Calls after which a script may accept options that its source does not show."""
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
_FIXED_ADDRESS = re.compile(
    rb"""(?m)^[^#\n]*\[["']MASTER_ADDR["']\] *= *["'](localhost|127\.0\.0\.1)["']"""
)
_TOGETHER = re.compile(
    r"(\w+\.)*(distributed(\.\w+)*|Distributed(DataParallel|Sampler)|import_module|__import__|exec)"
    r"|[A-Z_]*(RANK|WORLD_SIZE|PROCID)|(\w+\.|--?)?local[-_]rank|transformers\.\w*Trainer|runpy"
)
"""Names and texts in a program whose ranks may work together, or which imports by a variable."""
_WORKS_ALONE = frozenset(
    {
        *("PIL", "albumentations", "attr", "av", "bs4", "click", "cv2", "datasets", "dotenv"),
        *("einops", "gym", "gymnasium", "h5py", "imageio", "jsonlines", "librosa", "loguru"),
        *("matplotlib", "mlflow", "networkx", "nltk", "numba", "numpy", "omegaconf", "orjson"),
        *("pandas", "peft", "plotly", "polars", "psutil", "pyarrow", "pydantic", "requests"),
        *("rich", "safetensors", "scipy", "seaborn", "sentencepiece", "setuptools", "skimage"),
        *("sklearn", "soundfile", "spacy", "sympy", "tensorboard", "tensorboardX", "tiktoken"),
        *("timm", "tokenizers", "toml", "torch", "torch_geometric", "torchaudio", "torchinfo"),
        *("torchmetrics", "torchsummary", "torchtext", "torchvision", "tqdm", "trackio"),
        *("transformers", "typer", "typing_extensions", "wandb", "xgboost", "yaml"),
    }
)
"""Packages that make no ranks work together, unless the program itself does.

Any other may do so, as Lightning and Accelerate do.
"""
_MAX_FILES = 200
"""Files of the source that are read to see whether a program is distributed."""
_MORE_RANKS = "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html"


def is_secret(value: str) -> bool:
    """Whether an environment value is a reference, ``secret:KIND:NAME``."""
    return value.startswith("secret:")


def check(job: JobSpec) -> Iterator[Problem]:
    """Problems of a job, beyond its types, that are the same on every backend."""
    yield from _check_entrypoint(job)
    least, most = job.resources.min_nodes, job.resources.nodes
    if least is not None and least > most:
        message = f"the minimum of {least} nodes exceeds the maximum of {most}"
        yield Problem("resources.min_nodes", message, f"did you mean nodes: {most}:{least}?")
    yield from check_variables(job)
    yield from _check_plain_launcher(job)
    for name, regex in job.metrics.items():
        if message := pattern_problem(regex):
            yield Problem(f"metrics.{name}", message, "for example loss: 'loss ([0-9.]+)'")
    if job.track is not None:
        yield from _check_track(job.track)
    if job.notify is not None:
        yield from check_notify(job.notify)


def _check_entrypoint(job: JobSpec) -> Iterator[Problem]:
    entry, source = job.entrypoint, Path(job.source)
    if (entry.script is None) == (entry.module is None):
        yield Problem("entrypoint", "exactly one of `script` and `module` is required")
    if job.environment is not None:
        yield from environments.check(job.environment)
    yield from environments.check_header(job)
    for number, pattern in enumerate(job.outputs):
        if ".." in pattern.split("/"):
            message = f"{pattern!r} is outside the working folder"
            yield Problem(f"outputs[{number}]", message, "use a path without `..`")
    if not os.path.isdir(source):  # noqa: PTH112 - Path.is_dir() raises on a name too long
        yield Problem("source", f"folder {source} not found")
    elif entry.script is not None:
        yield from _check_script(entry.script, source)


def _check_script(script: str, source: Path) -> Iterator[Problem]:
    path = Path(script)
    if path.is_absolute() or ".." in path.parts or script.startswith("-"):
        message = "must be a relative path inside the source folder"
        yield Problem("entrypoint.script", message, "for example train.py")
    elif not os.path.isfile(source / path):  # noqa: PTH113 - as above
        scripts = sorted(item.relative_to(source).as_posix() for item in source.glob("*.py"))
        listing = f"Python files there: {', '.join(scripts[:8]) or 'none'}"
        hint = did_you_mean(script, scripts) or listing
        yield Problem("entrypoint.script", f"file {script!r} not found in {source}", hint)


def _check_plain_launcher(job: JobSpec) -> Iterator[Problem]:
    """Settings that need torchrun, of a script that starts its own processes."""
    if job.entrypoint.launcher != "python":
        return
    why = "requires torchrun, but `launcher: python` starts one plain process per node"
    if job.resources.min_nodes is not None:
        yield Problem("resources.min_nodes", why, f"set nodes: {job.resources.nodes}")
    if (job.resources.processes_per_node or 1) > 1:
        hint = "remove it, and pass the number of processes to the script in entrypoint.args"
        yield Problem("resources.processes_per_node", why, hint)


def check_variables(job: JobSpec) -> Iterator[Problem]:
    """Problems of what becomes variables on the nodes: `data`, `profile` and `env`."""
    channels: dict[str, str] = {}
    for name in job.data:
        other = channels.setdefault(name.upper(), name)
        if other != name:
            message = f"sets DEPLOYKIT_DATA_{name.upper()}, which {other!r} already sets"
            yield Problem(f"data.{name}", message, "choose names that differ in more than case")
    kind, *steps = (job.profile or "").split(":")  # those of `torch:FIRST:LAST`
    if steps and int(steps[1]) < int(steps[0]):
        hint = f"for example {kind}:{steps[1]}:{steps[0]}"
        yield Problem("profile", "the last step comes before the first", hint)
    rank, ranks = job.env.get(DEBUGGER), job.resources.world_size
    if rank is not None and rank not in map(str, range(ranks)):
        message = f"rank {rank!r} does not exist; this job has ranks 0 to {ranks - 1}"
        yield Problem(f"env.{DEBUGGER}", message)
    for name, value in job.env.items():
        if name in _RESERVED or (name.startswith("DEPLOYKIT_") and name not in _SETTABLE):
            message = "is set by the launcher on each rank and cannot be overridden"
            hint = "remove it; the trainer reads the launcher's value"
            yield Problem(f"env.{name}", message, hint)
        if is_secret(value):
            _, kind, reference = (*value.split(":", 2), "")[:3]
            if kind not in SECRET_KINDS or not reference:
                kinds = ", ".join(SECRET_KINDS)
                message = f"expected secret:KIND:NAME, where KIND is one of {kinds}"
                yield Problem(f"env.{name}", message, "for example secret:env:HF_TOKEN")


def pattern_problem(regex: str) -> str:
    """Why a pattern for metrics is invalid, as the end of a sentence; empty if it is valid."""
    try:
        groups = re.compile(regex).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a valid regular expression: {error}"
    return "" if groups else "has no group that captures the number"


def _check_track(track: Track) -> Iterator[Problem]:
    """Contacts no server: one that is down now may be up when there are metrics."""
    if not track.chosen:
        hint = f"set one of {', '.join(TRACKERS)}, or remove `track`"
        yield Problem("track", "at least one tracker is required", hint)
    for name in _TRACKER_PACKAGES:
        spec = importlib.util.find_spec(name) if name in track.chosen else None
        if name in track.chosen and (spec is None or spec.origin is None):  # wandb leaves a folder
            message = f"the package {name} is not installed for the Python that runs deploykit"
            yield Problem(f"track.{name}", message, f"pip install {name}")


def check_notify(notify: Notify) -> Iterator[Problem]:
    """Problems of receivers, offline; no message quotes an address, which may contain a token."""
    if not notify.to and not notify.command:
        hint = "for example to: [secret:env:SLACK_WEBHOOK]"
        yield Problem("notify", "at least one receiver is required", hint)
    if not notify.events:
        hint = "for example events: [failed, succeeded]"
        yield Problem("notify.events", "at least one event is required", hint)
    for number, receiver in enumerate(notify.to):
        path = f"notify.to[{number}]"
        if is_secret(receiver):
            continue
        try:
            parts = urlsplit(receiver)
        except ValueError as error:
            hint = "use an address such as https://hooks.example.com/runs"
            yield Problem(path, f"is not a valid address: {error}", hint)
            continue
        if _has_token(parts):
            message = "contains a token, which would appear in the plan as plain text"
            hint = "use secret:env:NAME, and export NAME with the address before you submit"
            yield Problem(path, message, hint)
        elif parts.scheme in {"http", "https"} and parts.query:
            message = "has a query string, which would appear in the plan as plain text"
            hint = "if it contains a token, use secret:env:NAME, and export NAME with the address"
            yield Problem(path, message, hint, severity="warning")
        scheme = parts.scheme
        if scheme not in {"http", "https"} and importlib.util.find_spec("apprise") is None:
            message = f"{scheme}:// requires the package apprise, which is not installed"
            yield Problem(path, message, "pip install 'deploykit[notify]'")


def _has_token(parts: SplitResult) -> bool:
    """Whether an address alone gives access to its receiver.

    True for everything that Apprise sends to, except a mail server without a password.
    """
    if parts.scheme in {"http", "https"}:
        return "@" in parts.netloc or (parts.hostname or "").endswith(_CHAT_HOSTS)
    has_password = ":" in parts.netloc.rpartition("@")[0] or "pass=" in parts.query
    return has_password or parts.scheme not in {"mailto", "mailtos"}


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
        hint = f"use module: {name}, or script: {module}" if module != name else None
        yield Problem(path, f"{module!r} is not a valid module name", hint)
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
        message = f"{module!r} is not in {source}; it must be installed on the nodes"
        yield Problem(path, message, hint, severity="warning")
    elif python == Path(sys.executable):
        if not _importable(module):
            yield Problem(path, f"{module!r} is neither in {source} nor installed", hint)
    else:
        sites = _packages(python)
        if not _has_runnable(sites, module) and not any(_has_whole(site, top) for site in sites):
            message = f"{module!r} is neither in {source} nor installed for {python}"
            yield Problem(path, message, hint, severity="warning")


def check_torch(job: JobSpec, python: Path) -> Iterator[Problem]:
    """A problem if PyTorch is not among the packages of `python`, which runs the job.

    Nothing is imported or run: a warning for an environment that deploykit does not run in.
    """
    if job.entrypoint.launcher == "torchrun" and _lacks(job, python, "torch"):
        message = f"PyTorch is not installed for {python}, which runs the job"
        hint = f"run `{python} -m pip install torch`, or set `environment`"
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
    hint = f"run `{python} -m pip install boto3`, or set `environment`"
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
        message = f"its dependencies do not include PyTorch, which is not installed for {python}"
        hint = 'add "torch" to its dependencies, unless another dependency installs it'
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
    listing = f"it contains {', '.join(sorted(inside)[:8]) or 'no modules'}"
    hint = did_you_mean(module, inside) or listing
    message = f"{module!r} was not found in {package.parent}"
    if (package.parent / Path(*module.split("."))).is_dir() or "." not in module:
        message = f"the package {module} has no __main__.py, so it cannot be run"
    return Problem("entrypoint.module", message, hint)


def _module_hint(source: Path, top: str) -> str | None:
    """Where a subfolder of the source has the module, else a similar name in the source."""
    for folder in sorted(source.glob("*/")):
        if _has_whole(folder, top):
            return f"it is in {folder.name}/; set env: {{PYTHONPATH: {folder.name}}}"
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
        return f"did you mean {Path(parent, near)}?" if near else "create the folder"
    while parent and not os.path.isdir(parent):  # noqa: PTH112
        parent = os.path.dirname(parent)  # noqa: PTH120
    return f"the nearest existing folder is {parent}"


class ProcessStart(NamedTuple):
    """What a script does and in which line; whether it needs `launcher: python`."""

    action: str
    line: int
    plain: bool


def check_launch(job: JobSpec) -> Iterator[Problem]:
    """Warnings about a script that starts processes itself, or is made for one process."""
    yield from check_processes(job)
    yield from _check_address(job)
    yield from check_together(job)


def _check_address(job: JobSpec) -> Iterator[Problem]:
    """A warning about a script for several nodes that replaces the address of node 0."""
    script = Path(job.source, job.entrypoint.script or "")
    if job.resources.nodes == 1 or not script.is_file():
        return
    text = script.read_bytes()
    fixed = _FIXED_ADDRESS.search(text)
    if fixed and b"MASTER_ADDR" not in text[: fixed.start()]:  # else it may be for one node only
        line = text.count(b"\n", 0, fixed.end()) + 1
        message = f"{script.name} sets MASTER_ADDR to {fixed[1].decode()} (line {line}), so each "
        message += f"of the {job.resources.nodes} nodes would wait for the others at itself"
        hint = "remove that line: deploykit sets MASTER_ADDR and MASTER_PORT on every node"
        yield Problem("entrypoint.script", message, hint, severity="warning")


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
        message = f"each rank that torchrun starts would run {entry.module} and start more ranks"
        hint = "set entrypoint.script and resources.processes_per_node; torchrun starts the ranks"
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
        hint = "use launcher: python, which starts one plain process per node"
        yield Problem("entrypoint.launcher", message, hint, severity="warning")
    else:
        message += ", but under torchrun no rank listens at that address"
        hint = "call init_process_group() without the address"
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


def argparse_options(text: bytes) -> list[str] | None:
    """The options of a script that reads its arguments with argparse, from its source.

    None unless the source shows all of them: the parser is made and used in this file alone.
    """
    if b"ArgumentParser" not in text or b"parse_args" not in text:
        return None
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    options, parsers = ["--help"], set(_parsers(nodes))
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        method = called.rpartition(".")[2]
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        given = (*call.args, *(keyword.value for keyword in call.keywords))
        if method in _OPEN_ENDED or any(_may_be_parser(value, parsers) for value in given):
            return None
        if method == "ArgumentParser" and {"parents", "prefix_chars", None} & keywords.keys():
            return None
        if method != "add_argument":
            continue
        names = [node.value for node in call.args if isinstance(node, ast.Constant)]
        if len(names) < len(call.args) or not names or not all(isinstance(n, str) for n in names):
            return None
        options += (flags := [str(name) for name in names if str(name).startswith("-")])
        if "BooleanOptionalAction" in keywords.get("action", ""):
            options += [flag.replace("--", "--no-", 1) for flag in flags]
    return options


def _parsers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names of variables that hold a parser, or a group of its options."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.endswith(("ArgumentParser", "_group")):
                yield from (ast.unparse(target) for target in node.targets)


def _may_be_parser(value: ast.expr, parsers: Collection[str]) -> bool:
    """Whether a function gets what may be a parser, to which it may add options."""
    if not isinstance(value, ast.Name | ast.Attribute):
        return False
    name = ast.unparse(value)
    return name in parsers or "pars" in name.rpartition(".")[2].lower()


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
            action = "passes a tcp:// address to init_process_group"
            yield ProcessStart(action, node.lineno, plain=False)


def _launch_command(call: ast.Call) -> str | None:
    """The launcher in the texts of a call, such as ``torchrun``."""
    constants = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant))
    match = _LAUNCH_COMMAND.search(" ".join(text for text in constants if isinstance(text, str)))
    return match[1] if match else None


def check_together(job: JobSpec) -> Iterator[Problem]:
    """A warning about a program for one process: each of several ranks would do all its work."""
    entry, ranks = job.entrypoint, job.resources.world_size
    if entry.launcher != "torchrun" or ranks == 1:
        return
    source = Path(job.source)
    python_path = job.env.get("PYTHONPATH", "").split(os.pathsep)
    folders = [source, *(source / folder for folder in python_path if folder)]
    if entry.script is not None:
        path, first = "entrypoint.script", [source / entry.script]
    else:
        path, first = "entrypoint.module", _files_of(f"{entry.module}.__main__", folders)
    if not first or not _trains_alone(first, folders):
        return
    program = entry.script or entry.module
    message = f"{program} does not look distributed: each of the {ranks} ranks"
    message += " would process all the data with its own model"
    one = "processes_per_node" if job.resources.processes_per_node else "gpus_per_node"
    keys = [("nodes", job.resources.nodes), (one, job.resources.processes)]
    to_train_once = ", ".join(f"{key}: 1" for key, value in keys if value > 1)
    hint = f"set {to_train_once}; or use DistributedDataParallel and DistributedSampler"
    yield Problem(path, message, hint, severity="warning", source=_MORE_RANKS)


def _trains_alone(files: Sequence[Path], folders: Sequence[Path]) -> bool:
    """Whether a program uses PyTorch, and nothing in its own files suggests several processes.

    False if in doubt: for a file that cannot be read, and for a package that may be distributed.
    """
    uses_torch, seen, waiting = False, set[Path](), list(files)
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False
        if (
            len(seen) > _MAX_FILES
            or any(map(_TOGETHER.fullmatch, _words(tree)))
            or any(_process_starts(tree))  # reported by `check_processes`
        ):
            return False
        for module, places in _imports(tree, file, folders):
            top = module.partition(".")[0]
            if own := _files_of(module, places):
                waiting += own
            elif top not in _WORKS_ALONE and top not in sys.stdlib_module_names:
                return False
            uses_torch = uses_torch or top == "torch"
    return uses_torch


def _words(tree: ast.AST) -> Iterator[str]:
    """The names and texts in a program, without its docstrings."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                yield f"{name}.{attribute}"
            case ast.Attribute(attr=attribute):
                yield attribute
            case ast.Name(id=name):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text


def _imports(
    tree: ast.AST, file: Path, folders: Sequence[Path]
) -> Iterator[tuple[str, Sequence[Path]]]:
    """What a file may import: modules, or names in them, each with the folders to search."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [file.parent, *folders]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            places, start = [file.parent, *folders], []
            if node.level:
                package = file.parents[min(node.level, len(file.parents)) - 1]
                places, start = [package.parent], [package.name]
            known = [*start, *filter(None, [node.module])]
            yield from ((".".join([*known, alias.name]), places) for alias in node.names)


def _files_of(module: str, folders: Iterable[Path]) -> list[Path]:
    """The files that an import of the module runs, from the first folder that has some of them."""
    parts = module.split(".")
    for folder in folders:
        paths = [folder.joinpath(*parts[: n + 1]) for n in range(len(parts))]
        files = [file for path in paths for file in (Path(f"{path}.py"), path / "__init__.py")]
        if own := [file for file in files if file.is_file()]:
            return own
    return []
