"""Set a key in a job file and keep the rest of it as it was written, comments too."""

from __future__ import annotations

import re
from pathlib import Path

from deploykit.job import file as jobfile
from deploykit.job.decode import Malformed
from deploykit.lib import quoting
from deploykit.lib.errors import JobFileError, UsageError

_VALUE = re.compile(r"""(:\s+)("[^"\n]*"|'[^'\n]*'|[^\s#,{}\[\]][^\s#,}]*)""")


def set_key(path: Path, key: str, value: str) -> None:
    """Set ``section.key`` in a YAML file.

    The changed text is read again: it must say the same as before but for this key. Raises
    UsageError where it cannot be changed so, and for a file that cannot be written.
    """
    before, lines = jobfile.parse(path)
    section, _, name = key.partition(".")
    old = before.get(section)
    if old is not None and not isinstance(old, dict):
        raise _cannot(path, key, value)
    wanted = {**before, section: {**(old or {}), name: value}}
    text = jobfile.read_text(path)
    changed = _changed(text.splitlines(), lines, (section, name), value)
    if path.suffix == ".toml" or not _says(changed, wanted):
        raise _cannot(path, key, value)
    try:
        path.write_text(changed, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _cannot(path: Path, key: str, value: str) -> UsageError:
    return UsageError(
        f"{path} cannot be changed automatically", hint=f"set {key} to {value!r} in it"
    )


def _changed(text: list[str], lines: dict[str, int], key: tuple[str, str], value: str) -> str:
    """The text with the key; perhaps not a valid one."""
    section, name = key
    entry = f"{name}: {quoting.yaml(value)}"
    if (line := lines.get(f"{section}.{name}")) is not None:
        own = re.compile(rf"\b{re.escape(name)}{_VALUE.pattern}")
        new = f"{name}: {quoting.yaml(value)}"
        text[line - 1] = own.sub(lambda _: new, text[line - 1], count=1)
    elif (line := lines.get(section)) is None:
        text += [f"{section}:", f"  {entry}"]
    elif "{" in text[line - 1]:
        text[line - 1] = text[line - 1].replace("{", f"{{{entry}, ", 1).replace(", }", "}")
    else:
        inside = [number for path, number in lines.items() if path.startswith(f"{section}.")]
        first = text[min(inside) - 1] if inside else "  "
        text.insert(line, f"{first[: len(first) - len(first.lstrip())] or '  '}{entry}")
    return "\n".join([*text, ""])


def _says(text: str, wanted: object) -> bool:
    """Whether a YAML text has exactly these values."""
    try:
        data, _, problems = jobfile.yaml(text)
    except (Malformed, JobFileError):
        return False
    return not problems and data == wanted
