"""Dumps of PyTorch's flight recorder, decoded to plain data.

They are pickles, and a pickle may call any function while it is loaded. The decoded data consists
of strings, numbers and lists.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.lib.errors import UsageError

_MAX_SIZE = 64 * 2**20
"""Bytes; 2000 records, the recorder's default, are a few MiB."""
_FIRST = b"\x80"
"""First byte of a pickle of protocol 2 or later; no UTF-8 text begins with it."""
_RANK = re.compile(r"rank_?(\d{1,9})(?![0-9])|dump_?(\d{1,9})(?![0-9])|(\d{1,9})(?:\.[a-z]{1,8})?$")
"""PyTorch appends the rank to a path of the user's choice, with a host name or without."""
_KNOWN = re.compile(r"fr_\d+|.*(?:nccl|comm_lib)_trace_rank_.*|.*_dump_\d+(?:\.[a-z]+)?")
_RANKS = re.compile(r"\[(\d{1,9}(, ?\d{1,9})*)?\]")
_MAX_QUOTED = 60
"""Characters of a malformed string that a message quotes."""
_VERSION = re.compile(r"\d+\.\d+")
_FIELDS: dict[str, type] = {
    "record_id": int,
    "collective_seq_id": int,
    "p2p_seq_id": int,
    "op_id": int,
    "is_p2p": bool,
    "profiling_name": str,
    "state": str,
    "time_created_ns": int,
}
_FRAME = {"name": str, "filename": str, "line": int}
"""Fields of a record, apart from the lists:
https://github.com/pytorch/pytorch/tree/main/torch/distributed/flight_recorder"""
_SIZES, _DTYPES = ("input_sizes", "output_sizes"), ("input_dtypes", "output_dtypes")


class NotADump(UsageError):
    """The file is not a plain dump of the flight recorder."""


@dataclass(frozen=True)
class Dump:
    """The records of one rank, oldest first, with the recorder's field names."""

    path: Path
    rank: int
    version: str
    entries: tuple[dict[str, Any], ...]
    groups: dict[str, dict[str, str]]
    enqueued: dict[str, int]
    """The number of the last collective that the rank called, by group, where the dump tells it."""


def is_dump(path: Path) -> bool:
    """Whether the file is a pickle, or has the name of a dump."""
    if not path.is_file():  # a pipe can be read once only
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) == _FIRST or _KNOWN.fullmatch(path.name) is not None
    except OSError:
        return False


def read_all(paths: Iterable[Path]) -> tuple[list[Dump], list[str]]:
    """Read dumps; those that cannot be read as warnings."""
    readable, warnings = [], []
    for path in paths:
        try:
            readable.append(read(path))
        except NotADump as error:
            warnings.append(f"{error.message}\n  {error.hint}")
    return readable, warnings


def read(path: Path) -> Dump:
    """Read a dump, whose name tells its rank. Raises NotADump."""
    try:
        return _dump(path)
    except Exception as error:  # noqa: BLE001 - malformed bytes raise any
        reason = error if isinstance(error, NotADump) else f"it is malformed ({error!r})"
        raise NotADump(
            f"{path} is not a valid dump of PyTorch's flight recorder: {reason}",
            hint="the name of a dump ends with its rank, as in fr_0 or nccl_trace_rank_0; do not "
            "unpickle files that you do not trust",
        ) from None


def _dump(path: Path) -> Dump:
    rank = _RANK.search(path.name)
    if rank is None:
        raise NotADump("its file name contains no rank")
    if path.stat().st_size > _MAX_SIZE:
        raise NotADump(f"it is larger than {_MAX_SIZE >> 20} MiB")
    tree = _checked(_PlainUnpickler(io.BytesIO(path.read_bytes())).load(), dict)
    version = _checked(tree["version"], str)
    if not _VERSION.fullmatch(version):
        raise NotADump(f"invalid version {version!r}")
    entries = tuple(_entry(entry) for entry in _list(tree["entries"]))
    groups, enqueued = _groups(tree["pg_config"], entries), _enqueued(tree, entries)
    return Dump(path, int(rank[rank.lastindex or 0]), version, entries, groups, enqueued)


def _enqueued(tree: dict[str, Any], entries: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The last number of each group; its status has another name, which only records tell."""
    status = _checked(tree.get("pg_status", {}), dict)
    names = {entry["pg_id"]: entry["process_group"][0] for entry in entries if "pg_id" in entry}
    states = ((name, status.get(str(number))) for number, name in names.items())
    key = "last_enqueued_collective"
    return {name: _checked(one[key], int) for name, one in states if one and key in one}


class _PlainUnpickler(pickle.Unpickler):
    """Loads strings, numbers, lists and dicts; refuses whatever would import or call something."""

    def find_class(self, module: str, name: str) -> Any:
        raise NotADump(f"it references {module}.{name}")


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise NotADump(f"expected {kinds[0].__name__}, got {type(value).__name__}")
    if type(value) is str and not value.isprintable():
        raise NotADump(f"it contains the unprintable string {value[:_MAX_QUOTED]!r}")
    return value


def _list(value: Any) -> list[Any]:
    return list(_checked(value, list, tuple))


def _entry(raw: Any) -> dict[str, Any]:
    """A record with its known fields, each checked for its type."""
    _checked(raw, dict)
    entry = {name: _checked(raw[name], kind) for name, kind in _FIELDS.items()}
    entry |= {name: [_sizes(item) for item in _list(raw[name])] for name in _SIZES}
    entry |= {name: [_dtype(item) for item in _list(raw[name])] for name in _DTYPES}
    entry |= {"pg_id": _checked(raw["pg_id"], int)} if "pg_id" in raw else {}
    name, description = (_checked(part, str) for part in _list(raw["process_group"]))
    frames = [
        {name: _checked(frame[name], kind) for name, kind in _FRAME.items()}
        for frame in _list(raw.get("frames", []))
    ]
    return {**entry, "process_group": (name, description), "frames": frames}


def _sizes(item: Any) -> list[int]:
    return [_checked(size, int) for size in _list(item)]


def _dtype(item: Any) -> Any:
    """The name of a dtype; some releases of PyTorch write sizes in its place."""
    return _checked(item, str) if type(item) is str else _sizes(item)


def _groups(raw: Any, entries: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Name, description and ranks of each process group.

    Gloo (torch 2.13) leaves the name of the default group empty here, but not in its records.
    """
    groups = {}
    for name, group in _checked(raw, dict).items():
        ranks = _checked(group["ranks"], str)
        if not _RANKS.fullmatch(ranks):
            raise NotADump(f"it contains invalid ranks: {ranks[:_MAX_QUOTED]!r}")
        described = {"name": _checked(name, str), "desc": _checked(group["desc"], str)}
        groups[name] = {**described, "ranks": ranks}
    nameless = groups.pop("", None)
    if nameless:
        for name, description in sorted({entry["process_group"] for entry in entries}):
            groups.setdefault(name, {**nameless, "name": name, "desc": description})
    return groups
