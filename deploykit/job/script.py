"""A job from the command line: a script or a module, and defaults for all that is not said.

Where a job file lies beside the script, or in the current folder above it, its settings apply and
the script takes the place of its entrypoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.job import file as jobfile
from deploykit.job import spelling
from deploykit.job.file import Draft, Overrides
from deploykit.lib import quoting
from deploykit.lib.errors import UsageError

_ALONE = Path("command line")
"""Shown in messages instead of a job file; relative locations start at the current folder."""
_PLAIN = re.compile(r"(?!(?:-|~|null)\Z)[\w./+~-][\w./+~@%=:-]*(?<!:)", re.ASCII | re.IGNORECASE)
"""Text that needs no quotes in YAML, in a list either: `jobfile` reads 0.10 as it is written."""


def read(path: Path, overrides: Overrides = ()) -> Draft:
    """The job of the script `path`, or of the entrypoint in `overrides`. Raises as jobfile.read."""
    given = any(map(_is_entrypoint, overrides))
    if path.suffix != ".py" and not given:
        return jobfile.read(path, overrides)  # which says what is missing
    if path.suffix == ".py" and given:
        raise UsageError(f"{path} and another entrypoint are given", hint="name one of them")
    if path.suffix != ".py":
        return _named(jobfile.override(Draft(_ALONE, {}, {}), overrides))
    script = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links, as `source` does
    file = _beside(script)
    draft = _alone(script) if file is None else _replaced(jobfile.read(file), script)
    return _named(jobfile.override(draft, overrides))


def _is_entrypoint(override: str | tuple[str, Any]) -> bool:
    """Whether an override replaces the entrypoint as a whole."""
    key = override.partition("=")[0] if isinstance(override, str) else override[0]
    return key == "entrypoint"


def _beside(script: Path) -> Path | None:
    """The job file whose entrypoint the script replaces."""
    here = Path.cwd()
    folders = [script.parent, *([here] if here in script.parents else [])]
    files = (folder / jobfile.DEFAULT for folder in folders)
    job_file = next((file for file in files if file.is_file()), None)
    return job_file.relative_to(here) if job_file and here in job_file.parents else job_file


def _alone(script: Path) -> Draft:
    """A job without a file. Its source is the current folder, or that of a script elsewhere."""
    source = Path.cwd() if Path.cwd() in script.parents else script.parent
    entry = {"script": script.relative_to(source).as_posix()}
    return Draft(_ALONE, {"source": str(source), "entrypoint": entry}, {})


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
    """The draft, named after its script or module unless it has a name."""
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
    """The values, with relative locations as they are seen from another folder."""
    old, new = Path(os.path.realpath(_folder(draft))), os.path.realpath(folder)

    def seen(location: Any) -> Any:
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
