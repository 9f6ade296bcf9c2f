"""List every text that a user can see, as `file:line: text`, to be read from first to last.

    python docs/strings.py                  # all
    python docs/strings.py deploykit/doctor templates

Listed are string literals with at least two words, with `{...}` in place of values: messages,
hints, help, problems, findings, lines that nodes print. Of classes of settings and of command
modules the docstring is listed, since the reference and `--help` show it; other docstrings,
comments and patterns are not. Templates and TOML files are listed line by line, templates without
lines that are plain code. A few strings that no user sees (queries, commands) are listed too: the
filter errs on that side.
"""

# ruff: noqa: INP001

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("deploykit", "entrypoints", "infra", "templates")
LINEWISE = {".j2", ".sh", ".toml"}
_PROSE = re.compile(r"[a-z]{2,}[,;:]? \(?[`'{a-z]", re.IGNORECASE)
_NO_PROSE = re.compile(r"\\[wsdSb]|\(\?|^SELECT |^INSERT |^UPDATE |^CREATE |^PRAGMA ")
_CODE = re.compile(r"(?!.*#)(- |\w+=\$\()?(aws |--|[A-Za-z]+: *(\S+$|\[|{|!|AWS::))")
"""Lines of templates that hold a command or a key with a value, and no comment."""
_RULE_KEYS = (
    "match",
    "literals",
    "needs",
    "after",
    "unless",
    "yields",
    "spans",
    "source",
    "label",
    "kind",
    "#",
)
Line = tuple[int, str]


def main() -> None:
    """Print the listing of the paths given, or of everything."""
    for path in files([ROOT / name for name in sys.argv[1:] or FOLDERS]):
        for number, text in strings(path):
            sys.stdout.write(f"{path.relative_to(ROOT)}:{number}: {text}\n")


def files(roots: list[Path]) -> Iterator[Path]:
    """The files below the roots that hold texts, in order."""
    for root in roots:
        paths = sorted(root.rglob("*")) if root.is_dir() else [root]
        yield from (path for path in paths if path.suffix in {".py", *LINEWISE})


def strings(path: Path) -> list[Line]:
    """The texts of one file with their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in LINEWISE:
        return list(_of_lines(text, rules=path.suffix == ".toml"))
    tree = ast.parse(text)
    return sorted({*_of_code(tree), *_shown_docstrings(tree, whole="cli" in path.parts)})


def _of_lines(text: str, *, rules: bool) -> Iterator[Line]:
    """Lines of a template or of rules; of rules without the lists of patterns."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if rules and (inside or line.startswith(_RULE_KEYS)):
            inside = not line.startswith("]") if inside else line.rstrip().endswith("[")
            continue
        shown = re.sub(r"{#.*?#}|{%.*?%}", "", line).strip()
        if _is_prose(shown) and (rules or not _CODE.match(shown)):
            yield number, shown


def _of_code(tree: ast.AST) -> Iterator[Line]:
    """Every literal that reads like prose and is no docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in (*node.values, *_formats(node))
    }
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in parts:
            continue
        text = _text(node)
        if text is not None and _is_prose(text):
            yield node.lineno, " ".join(text.split())  # type: ignore[attr-defined]


def _formats(node: ast.JoinedStr) -> Iterator[ast.expr]:
    """The format specifications, which are strings too; texts inside of ``{...}`` are not."""
    for part in node.values:
        if isinstance(part, ast.FormattedValue) and part.format_spec is not None:
            yield part.format_spec


def _text(node: ast.AST) -> str | None:
    """The text of a literal, with ``{name}`` where a value is put in; None for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{_name(part)}}}"
        for part in node.values
    )


def _name(part: ast.AST) -> str:
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return textwrap.shorten(ast.unparse(value), 40, placeholder="...")


def _shown_docstrings(tree: ast.Module, *, whole: bool) -> Iterator[Line]:
    """Docstrings of classes whose fields have a `Help`, and of the module where it is help."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    shown: list[ast.Module | ast.ClassDef] = [tree] if whole else []
    shown += [node for node in classes if "Help(" in ast.unparse(node)]
    for node in shown:
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, " ".join(text.split())


def _is_prose(text: str) -> bool:
    return _PROSE.search(text) is not None and _NO_PROSE.search(text) is None


if __name__ == "__main__":
    main()
