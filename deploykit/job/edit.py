"""Set a key in a job file and keep the rest of it as it was written, comments too."""

from __future__ import annotations

from pathlib import Path

import yaml as pyyaml

from deploykit.job import file as jobfile
from deploykit.job.decode import Malformed
from deploykit.lib import quoting
from deploykit.lib.errors import UsageError


def set_key(path: Path, key: str, value: str) -> None:
    """Set ``section.key`` in a YAML file.

    The changed text is read again: only this key may differ. Raises UsageError if the text cannot
    be changed so, and for a file that cannot be written.
    """
    before, _ = jobfile.parse(path)
    section, _, name = key.partition(".")
    old = before.get(section) or {}
    text = jobfile.read_text(path)
    changed = None
    if path.suffix != ".toml" and isinstance(old, dict):
        changed = _with_key(text, section, name, quoting.yaml(value))
    if changed is None or not _has(changed, {**before, section: {**old, name: value}}):
        raise UsageError(
            f"{path} cannot be changed automatically", hint=f"set {key} to {value!r} in it"
        )
    try:
        path.write_text(changed, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _with_key(text: str, section: str, name: str, value: str) -> str:
    """The text with the key in its section; the result may not be valid."""
    root = pyyaml.compose(text, Loader=jobfile.LOADER)
    keys = {key.value: (key, node) for key, node in root.value} if root else {}
    if section not in keys:
        return "\n".join([*text.splitlines(), f"{section}:", f"  {name}: {value}", ""])
    heading, node = keys[section]
    start, end = node.start_mark.index, node.end_mark.index
    if not isinstance(node, pyyaml.MappingNode):  # nothing, or null
        return f"{text[:start].rstrip()}\n  {name}: {value}{text[end:]}"
    for key, old in node.value:
        if key.value == name:
            return text[: old.start_mark.index] + value + text[old.end_mark.index :]
    if node.flow_style:
        more = ", " if node.value else ""
        return f"{text[: start + 1]}{name}: {value}{more}{text[start + 1 :]}"
    below = text.index("\n", heading.end_mark.index) + 1
    return f"{text[:below]}{' ' * node.start_mark.column}{name}: {value}\n{text[below:]}"


def _has(text: str, wanted: object) -> bool:
    """Whether a YAML text has exactly these values."""
    try:
        data, _, problems = jobfile.yaml(text)
    except Malformed:
        return False
    return not problems and data == wanted
