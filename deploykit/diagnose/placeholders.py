"""The text of fixes: lines for some runs only, and placeholders.

`{port|PORT}` becomes the port of this run, or PORT. A line that begins with `@slurm,several` is for
runs on Slurm, and for those of several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_PLACEHOLDER = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
_TRAIT = re.compile(r"@([a-z,_-]+) ")
_SAFE = re.compile(r"(?:\./)?[\w/][\w.:/@+=,%-]*")
"""Values come from logs and end up in pasted commands: no quotes, spaces or `$`."""

SEVERAL = "several"
"""The trait of a run of more than one rank; the others are the names of backends."""
AGAIN = "again"
"""How to submit the job again: ``rerun RUN``, which keeps the arguments of the run."""
OF_RUN = ("backend", "job", "name", "target", "run", "python", AGAIN)
"""Names of values that a run provides."""
OF_LINE = ("file", "host", "rank", "package", "similar", "folder", "unlisted")
"""Names of values that a line of a log may provide."""


def names(text: str) -> set[str]:
    """The names of the placeholders of a text."""
    return {match[1] for match in _PLACEHOLDER.finditer(text)}


def fitting(text: str, traits: Collection[str]) -> str:
    """The lines for a run with these traits; all of them where nothing is known of the run."""
    kept = []
    for line in text.strip().splitlines():
        match = _TRAIT.match(line)
        if match is None or not traits or not set(match[1].split(",")).isdisjoint(traits):
            kept.append(line[match.end() :] if match else line)
    return "\n".join(kept)


def render(text: str, values: Mapping[str, str]) -> str:
    """Fill in the placeholders; a missing or unsafe value leaves the default.

    A line with a placeholder that has neither value nor default is left out.
    """
    words = {name: value for name, value in values.items() if name != AGAIN}
    words |= {AGAIN: values[AGAIN].removeprefix("rerun ")} if AGAIN in values else {}
    safe = {name: values[name] for name, word in words.items() if _SAFE.fullmatch(word)}
    kept = (
        line
        for line in text.splitlines()
        if all(match[1] in safe or match[2] is not None for match in _PLACEHOLDER.finditer(line))
    )
    whole = "\n".join(kept).strip()
    return _PLACEHOLDER.sub(lambda match: safe.get(match[1], match[2]), whole)
