"""What may be wrong in a job file, apart from `errors`, which raise lists of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import re


class Problem(NamedTuple):
    """An error or a warning about a job. `hint` suggests a fix.

    `path` is the path in the job file (``resources.nodes``), or empty for the whole file. `line`
    starts at 1; it is None if unknown (TOML, --set, a missing key). `source` is a URL that
    documents the rule. `argument` is the option that set the value, such as ``--nodes``. `rule` is
    the id that `deploykit explain` takes.
    """

    path: str
    message: str
    hint: str | None = None
    line: int | None = None
    severity: Literal["error", "warning"] = "error"
    source: str | None = None
    argument: str | None = None
    rule: str | None = None

    def __str__(self) -> str:
        """The problem in one line, for exceptions; `cli/output.py` prints two."""
        mark = "warning: " if self.severity == "warning" else ""
        line = f"line {self.line}: " if self.line else ""
        path = f"{self.path}: " if self.path else ""
        place = f"argument {self.argument}: " if self.argument else f"{line}{path}"
        hint = f" ({_in_python(self.hint)})" if self.hint else ""
        source = f"; see {self.source}" if self.source else ""
        return f"{mark}{place}{self.message}{hint}{source}"


def _in_python(hint: str) -> str:
    """A hint in which options of the command line are arguments of `deploykit.submit`."""
    if "--" not in hint:
        return hint
    import re  # few hints need it

    hint = re.sub(r"--set ([\w.]+)=(\S+)", _argument, hint)
    return re.sub(r"--(time-limit|nodes) (\S+)", _argument, hint)


def _argument(match: re.Match[str]) -> str:
    key, value = match.groups()
    path = key if "." in key else f"resources.{key.replace('-', '_')}"
    text = value if value.isupper() or value.isdecimal() else f'"{value}"'
    return f'set={{"{path}": {text}}}'
