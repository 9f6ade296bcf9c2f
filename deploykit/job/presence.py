"""Whether what a job names exists, as far as this machine can tell: its module, its folders.

Nothing is imported or run: the folders that ``python -m`` would search are read. Python looks in
the working folder first, which is the source, then in PYTHONPATH, then among what is installed:
https://docs.python.org/3/using/cmdline.html#cmdoption-m
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deploykit.job.model import JobSpec, Problem
from deploykit.job.spelling import did_you_mean, nearest

_PATH = "entrypoint.module"
_EVERYWHERE = frozenset({*sys.stdlib_module_names, "torch"})
"""Packages that every Python that can run a job has."""


def no_script(script: str, source: Path) -> Problem:
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
