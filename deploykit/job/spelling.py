"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping

from deploykit.lib.problem import Problem

UNKNOWN_KEY = "unknown key"
_OTHER_NAMES = {
    **dict.fromkeys(("ranks", "procs", "nproc_per_node", "ntasks_per_node"), "processes_per_node"),
    **dict.fromkeys(("num_nodes", "nnodes", "instance_count"), "nodes"),
    **dict.fromkeys(("walltime", "timeout", "max_run"), "time_limit"),
}
"""Keys of similar programs, and the key here."""
_SHORTEST = 3
"""Characters of a word that may be the beginning of a known one."""


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean 'nodes'?``, or None where no known word is similar."""
    near = nearest(word, known)
    return near and f"did you mean {near!r}?"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar, or is called so elsewhere, or begins so; else None."""
    names, word = list(known), word.lower()
    longer = [name for name in names if name.startswith(word) and len(word) >= _SHORTEST]
    if (other := _OTHER_NAMES.get(word)) in names:
        return other
    return _similar(word, names) or (longer[0] if len(longer) == 1 else None)


def _similar(word: str, names: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)), None)


def meant(keys: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """The known key that each unknown one stands for: similar, and not given itself."""
    given = list(keys)
    near = {key: nearest(key, known) for key in given if key not in known}
    return {key: name for key, name in near.items() if name and name not in given}


def unknown_keys(path: str, given: Mapping[str, object], known: Iterable[str]) -> Iterator[Problem]:
    """A problem for each unknown key in `given`, with the nearest known one and its value."""
    names = list(known)
    for key, value in given.items():
        if key in names:
            continue
        near = nearest(str(key), names)
        hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(names)}"
        if near and near != _similar(str(key), names) and re.fullmatch(r"\w{1,12}", str(value)):
            hint = f"did you mean `{near}: {value}`?"
        yield Problem(f"{path}.{key}" if path else str(key), UNKNOWN_KEY, hint)


def near_name(text: str) -> str:
    """The allowed name of a job that is nearest to `text`; empty where it has no Latin letters."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-zA-Z0-9]+", plain))[:40].strip("-")
