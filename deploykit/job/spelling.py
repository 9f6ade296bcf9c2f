"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence

from deploykit.lib.problem import Problem

UNKNOWN_KEY = "unknown key"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean 'nodes'?``, or None where no known word is similar."""
    near = nearest(word, known)
    return near and f"did you mean {near!r}?"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar; None where none is similar."""
    return next(iter(difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)), None)


def meant(keys: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """The known key that each unknown one stands for: similar, and not given itself."""
    given = list(keys)
    near = {key: nearest(key, known) for key in given if key not in known}
    return {key: name for key, name in near.items() if name and name not in given}


def unknown_keys(path: str, keys: Sequence[object], known: Iterable[str]) -> Iterator[Problem]:
    """A problem for each unknown key, with the nearest known one."""
    names = list(known)
    for key in keys:
        hint = did_you_mean(str(key), names) or f"known keys: {', '.join(names)}"
        yield Problem(f"{path}.{key}" if path else str(key), UNKNOWN_KEY, hint)


def near_name(text: str) -> str:
    """The allowed name of a job that is nearest to `text`; empty where it has no Latin letters."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-zA-Z0-9]+", plain))[:40].strip("-")
