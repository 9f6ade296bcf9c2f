"""The `environment` of a job file: the shell lines that activate it, and checks of it.

The lines are for `sh`; they set `python`, or end the script with 78 after a line that says why.
Checks only read files; they run nothing.

Where the nodes make the environment, from a uv.lock or the header of a script, there are no lines:
the launcher does it (`entrypoints/deploykit_node/packages.py`), as `on_nodes` tells it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.job.decode import Malformed
from deploykit.job.model import Environment, JobSpec, Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths

PYTHON = '"$python"'
"""The Python of the environment, as shell text."""
_OLDEST = (3, 10)
"""The Python that the launcher on the nodes needs."""
_UV = "uv>=0.9"
"""What pip installs on a node without uv: the first that writes a pylock.toml as we need it."""
_OF_IMAGES = ("torch", "torchvision", "torchaudio")
"""Packages that an image for training has built for its machines."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""https://packaging.python.org/en/latest/specifications/name-normalization/."""
_NO_UV = "uv is not on PATH, so pip will install it for the run"


def lines(environment: Environment) -> Iterator[str]:
    """Shell lines that activate the environment of the Python; none if it only has modules."""
    if environment.python is not None:
        kind, value = environment.python
        yield f"environment={home_path(value)}"
        if kind == "uv":
            yield f"options={shlex.quote(' '.join(_options(environment)))}"
        yield (paths.shipped("templates") / f"environment/{kind}.sh").read_text(encoding="utf-8")
        yield "export python\n"


def _options(environment: Environment) -> list[str]:
    """The options of uv that choose parts of the project."""
    extras = [word for name in environment.extras for word in ("--extra", name)]
    return extras + [word for name in environment.groups for word in ("--group", name)]


def check(environment: Environment) -> Iterator[Problem]:
    """Problems of the keys themselves."""
    kinds = [kind for kind in ("conda", "venv", "uv") if getattr(environment, kind)]
    if len(kinds) > 1:
        message = f"expected only one of `conda`, `venv` and `uv`; got {' and '.join(kinds)}"
        yield Problem("environment", message)
    elif not kinds and not environment.modules:
        yield Problem("environment", "expected `conda`, `venv`, `uv` or `modules`")
    if environment.node_local and not environment.uv:
        message = "requires `environment.uv`: each node installs the project's uv.lock"
        yield Problem("environment.node_local", message, "remove it, or set environment.uv")
    for key in ("extras", "groups"):
        path, names = f"environment.{key}", getattr(environment, key)
        if names and not environment.uv:
            message = f"requires `environment.uv`: a uv project defines its {key}"
            yield Problem(path, message, "remove it, or set environment.uv")
        for name in names:
            if not _NAME.fullmatch(name):
                hint = "use letters, digits, -, _ and ."
                yield Problem(path, f"{name!r} is not a valid name", hint)


def on_nodes(
    job: JobSpec, *, elsewhere: bool = False, image: bool = False
) -> dict[str, Any] | None:
    """What each node installs with uv before the ranks start; None if nothing.

    A uv project, if the job file asks for it or the nodes are `elsewhere` and cannot see the folder
    of the project; else the dependencies of a script that declares some, unless the job names an
    environment. `image`: PyTorch of the nodes' container image stays.
    """
    wanted = _project(job, elsewhere=elsewhere) or _script(job)
    if wanted is None:
        return None
    return {**wanted, **({"keep": list(_OF_IMAGES)} if image else {}), "uv": _UV}


def _project(job: JobSpec, *, elsewhere: bool) -> dict[str, Any] | None:
    environment = job.environment
    if environment is None or environment.uv is None:
        return None
    at_home = environment.uv.startswith("~/")  # the home of the nodes
    travels = not at_home and Path(environment.uv).is_relative_to(job.source)
    if not travels or not (environment.node_local or elsewhere):
        return None
    project = {"project": Path(environment.uv).relative_to(job.source).as_posix()}
    options = _options(environment)
    return {**project, **({"options": options} if options else {})}


def _script(job: JobSpec) -> dict[str, Any] | None:
    if job.environment is not None and job.environment.python is not None:
        return None
    try:
        declared = header(job)
    except Malformed:  # `check_header` reports it
        return None
    if not declared.get("dependencies"):
        return None
    script = {"script": job.entrypoint.script, "python": declared.get("requires-python")}
    indexes = declared.get("tool", {}).get("uv", {}).get("index", [])
    script["indexes"] = {
        one["name"]: one["url"] for one in indexes if {"name", "url"} <= one.keys()
    }
    return {name: value for name, value in script.items() if value}


def header(job: JobSpec) -> Mapping[str, Any]:
    """What the script of the job declares in a ``# /// script`` block; empty without one.

    https://packaging.python.org/en/latest/specifications/inline-script-metadata/. Raises Malformed.
    """
    text = _text(Path(job.source, job.entrypoint.script)) if job.entrypoint.script else ""
    block = re.search(r"^# /// script\n((?:#(?: .*)?\n)+?)# ///$", text, re.MULTILINE)
    if block is None:
        return {}
    try:
        return tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    except ValueError as error:
        raise Malformed(f"has a `# /// script` block that is not valid TOML: {error}") from None


def declares_torch(job: JobSpec) -> bool:
    """Whether the script of the job names PyTorch among its dependencies."""
    dependencies = map(str, header(job).get("dependencies", []))
    return any(re.match(r"torch(?![\w.-])", text.strip().lower()) for text in dependencies)


def check_header(job: JobSpec) -> Iterator[Problem]:
    """The problem of a script whose header cannot be read."""
    try:
        header(job)
    except Malformed as error:
        yield Problem("entrypoint.script", str(error), "`uv add --script` writes a valid block")


def on_nodes_problems(job: JobSpec, wanted: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of what each node will install, of a source folder on this machine."""
    if "project" in wanted:
        folder = Path(job.source, wanted["project"])
        for name in ("pyproject.toml", "uv.lock"):
            if not (folder / name).is_file():
                hint = f"run `uv {'lock' if name == 'uv.lock' else 'init'}` in that folder"
                yield Problem("environment.uv", f"{folder} has no {name}", hint)
        if job.environment is not None:
            yield from _undefined(job.environment, folder)


def locked_torch(job: JobSpec, wanted: Mapping[str, Any]) -> str:
    """The version of PyTorch in the lock of what the nodes install; empty without one."""
    name = f"{wanted.get('script')}.lock" if "script" in wanted else f"{wanted['project']}/uv.lock"
    match = re.search(r'(?m)^name = "torch"\nversion = "([0-9.]+)', _text(Path(job.source, name)))
    return match[1] if match else ""


def sentence(wanted: Mapping[str, Any]) -> str:
    """What each node installs, for the line that a submit prints first."""
    what = wanted.get("script") or f"{wanted['project']}/uv.lock".removeprefix("./")
    kept = "; the image's PyTorch is kept" if "keep" in wanted else ""
    return f"each node installs the packages in {what} with uv{kept}"


def comment(wanted: Mapping[str, Any]) -> list[str]:
    """Comment lines of a script: what each node will install."""
    without = f"a node without uv first runs pip install '{wanted['uv']}'"
    return [f"# {ascii(sentence(wanted))[1:-1]} before the ranks start;", f"# {without}", ""]


def no_uv(wanted: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning if this machine, on which the job runs, has no uv."""
    if _program("uv", "~/.local/bin") is None:
        path = "environment.uv" if "project" in wanted else "entrypoint.script"
        hint = "install it: https://docs.astral.sh/uv/"
        yield Problem(path, _NO_UV, hint, severity="warning")


_NOT_LOADED = "deploykit: the job cannot start: module load {modules} failed ({key})"


def module_lines(modules: Sequence[str], key: str) -> Iterator[str]:
    """Shell lines that load the modules of the key `key`."""
    if modules:
        yield from (
            "# shellcheck source=/dev/null",
            "type module >/dev/null 2>&1 || . /etc/profile",
            f"if ! module load {shlex.join(modules)}; then",
            f"    echo {shlex.quote(_NOT_LOADED.format(key=key, modules=' '.join(modules)))}",
            *("    exit 78", "fi", ""),
        )


def home_path(path: str) -> str:
    """A path as shell text; ``~/`` is the home folder where the shell runs."""
    home, below = path[:2] == "~/", path[2:]
    return f'"$HOME"/{shlex.quote(below)}' if home else shlex.quote(path)


def conflict(job: JobSpec, key: str, python: str | None) -> Iterator[Problem]:
    """The problem of a job that chooses the Python twice, once with the key `key`."""
    if python is not None and job.environment is not None and job.environment.python is not None:
        kind, _ = job.environment.python
        message = f"conflicts with environment.{kind}, which also selects the Python"
        yield Problem(key, message, f"remove {key} or environment.{kind}")


def problems(environment: Environment, *, prepared: bool) -> Iterator[Problem]:
    """Problems of an environment on this machine.

    `prepared`: modules or setup lines of the job may provide conda or uv.
    """
    match environment.python:
        case ("venv", folder):
            yield from _check_venv(_home(folder))
        case ("uv", folder):
            yield from _check_uv(environment, _home(folder), prepared=prepared)
        case ("conda", name):
            yield from _check_conda(name, prepared=prepared)


def module_problems(environment: Environment) -> Iterator[Problem]:
    """A warning if this machine seems to have no program for environment modules."""
    known = any(name in os.environ for name in ("MODULESHOME", "LMOD_CMD", "MODULES_CMD"))
    scripts = [script.name for script in Path("/etc/profile.d").glob("*.sh")]
    known = known or any("module" in name or "lmod" in name for name in scripts)
    if environment.modules and not known:
        message = "this machine does not seem to have a `module` command"
        hint = "remove the key to run on this machine"
        yield Problem("environment.modules", message, hint, severity="warning")


def python(environment: Environment) -> str | None:
    """The Python of an environment on this machine; None if there is none yet."""
    match environment.python:
        case ("venv", folder):
            root = _home(folder)
        case ("uv", folder):
            root = _uv_environment(_home(folder))
        case ("conda", name):
            root = _conda_environments().get(name, _home(name))
        case _:
            return None
    path = root / "bin/python"
    return str(path) if os.access(path, os.X_OK) else None


def _check_venv(folder: Path) -> Iterator[Problem]:
    create = f"`python3 -m venv {shlex.quote(str(folder))}` creates one"
    if not folder.is_dir():
        yield Problem("environment.venv", f"folder {folder} not found", create)
    elif not os.access(folder / "bin/python", os.X_OK):
        gone = "the Python that created it no longer exists"
        is_link = (folder / "bin/python").is_symlink()
        why = gone if is_link else "the folder is not a virtual environment"
        yield Problem("environment.venv", f"{folder}/bin/python cannot be run: {why}", create)
    else:
        yield from _too_old("environment.venv", _configured_version(folder))


def _check_uv(environment: Environment, folder: Path, *, prepared: bool) -> Iterator[Problem]:
    if not (folder / "pyproject.toml").is_file():
        hint = "use the folder of a uv project; `uv init` creates a project"
        yield Problem("environment.uv", f"{folder} has no pyproject.toml", hint)
    yield from _undefined(environment, folder)
    if not prepared and _program("uv", "~/.local/bin") is None:
        yield Problem(
            "environment.uv", "uv is not on PATH", "install it: https://docs.astral.sh/uv/"
        )
    yield from _too_old("environment.uv", _configured_version(_uv_environment(folder)))


def _undefined(environment: Environment, project: Path) -> Iterator[Problem]:
    """Problems of extras and groups that a uv project does not define."""
    try:
        data = tomllib.loads(_text(project / "pyproject.toml"))
    except ValueError:  # uv says where
        return
    extras = data.get("project", {}).get("optional-dependencies", {})
    for key, table in (("extras", extras), ("groups", data.get("dependency-groups", {}))):
        known = {_normal(name): name for name in table}
        for name in getattr(environment, key):
            if _normal(name) not in known:
                message = f"{project / 'pyproject.toml'} does not define {name!r}"
                hint = did_you_mean(name, known.values()) or f"it defines: {', '.join(table)}"
                yield Problem(f"environment.{key}", message, hint if known else None)


def _normal(name: str) -> str:
    """https://packaging.python.org/en/latest/specifications/name-normalization/."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_conda(name: str, *, prepared: bool) -> Iterator[Problem]:
    path = "environment.conda"
    known = _conda_environments()
    folder = _home(name) if "/" in name else known.get(name)
    if not prepared and _conda() is None:
        yield Problem(path, "conda is not on PATH", "run `conda init`, or load its module")
    elif not prepared and folder is None:
        hint = did_you_mean(name, known) or f"known names: {', '.join(sorted(known)) or 'none'}"
        message = f"conda has no environment named {name!r}"
        yield Problem(path, message, f"use a folder or a known name; {hint}")
    if folder is None:
        return
    if not (folder / "conda-meta").is_dir():
        yield Problem(path, f"{folder} is not a conda environment")
    elif not os.access(folder / "bin/python", os.X_OK):
        hint = f"`conda install --prefix {shlex.quote(str(folder))} python` installs Python"
        yield Problem(path, f"{folder} has no Python", hint)
    else:
        yield from _too_old(path, _conda_version(folder))


def _home(path: str) -> Path:
    """A path with the user's home folder for ``~``."""
    return Path(paths.expanded(path))


def _program(name: str, *more: str) -> str | None:
    """A program on PATH, or in one of the folders `more`."""
    folders = [str(_home(folder)) for folder in more]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def _conda() -> str | None:
    """The program that activates conda environments; templates/environment/conda.sh finds it so."""
    for variable in ("CONDA_EXE", "MAMBA_EXE"):
        if os.access(os.environ.get(variable, ""), os.X_OK):
            return os.environ[variable]
    folders = [f"~/{name}/bin" for name in ("miniforge3", "miniconda3", "anaconda3")]
    return _program("conda", *folders, "/opt/conda/bin") or _program("micromamba")


def _conda_environments() -> dict[str, Path]:
    """The folders of conda environments by name.

    https://docs.conda.io/projects/conda/en/stable/user-guide/concepts/environments.html
    """
    program = _conda()
    roots = [_home(os.environ.get("MAMBA_ROOT_PREFIX") or "~/micromamba")]
    if program and Path(program).name == "conda":
        roots.insert(0, Path(program).resolve().parents[1])
    folders = [root / "envs" for root in roots] + [_home("~/.conda/envs")]
    folders += map(Path, filter(None, os.environ.get("CONDA_ENVS_PATH", "").split(os.pathsep)))
    candidates = [Path(line) for line in _text(_home("~/.conda/environments.txt")).split("\n")]
    for folder in folders:
        candidates += sorted(folder.iterdir()) if folder.is_dir() else []
    named = {path.name: path for path in reversed(candidates) if (path / "conda-meta").is_dir()}
    return {"base": roots[0], **named} if (roots[0] / "conda-meta").is_dir() else named


def _uv_environment(project: Path) -> Path:
    """https://docs.astral.sh/uv/concepts/projects/config/#project-environment-path."""
    return project / (os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv")


def _configured_version(environment: Path) -> str:
    """The version in pyvenv.cfg, which venv calls `version` and uv `version_info`."""
    match = re.search(r"(?m)^version(?:_info)?\s*=\s*(\S+)", _text(environment / "pyvenv.cfg"))
    return match[1] if match else ""


def _conda_version(environment: Path) -> str:
    """The version in the name of conda's record of Python."""
    for record in environment.glob("conda-meta/python-[0-9]*.json"):
        return record.name.split("-")[1]
    return ""


def is_isolated(environment: Path) -> bool:
    """Whether a folder is an environment that sees no packages outside it."""
    settings = _text(environment / "pyvenv.cfg")
    shared = re.search(r"(?mi)^include-system-site-packages\s*=\s*true", settings)
    return (environment / "conda-meta").is_dir() or (bool(settings) and shared is None)


def _too_old(path: str, version: str) -> Iterator[Problem]:
    match = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", version)
    if match and (int(match[1]), int(match[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        message = f"its Python is {version}, but the launcher requires {oldest} or later"
        yield Problem(path, message)


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
