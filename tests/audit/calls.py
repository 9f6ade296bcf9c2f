"""Every call of the product that could run code, start a program or open a port.

`calls.toml` says why each is safe, one entry for each such call of a function. `test_audit.py`
holds the two together: a call without an entry fails, and so does an entry without a call. To
bring the list up to date after a change:

    .venv/bin/python tests/audit/calls.py

prints an entry for each call that is not listed, to be pasted into `calls.toml` and given its
reason, and names what is listed and gone.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("calls.toml")
FOLDERS = ("deploykit", "entrypoints", "infra", "examples", "benchmarks", "docs")
"""The product only: tests run on the developer's own machine, with trusted input."""

BUILTINS = {"eval", "exec", "compile", "__import__"}
NAMES = {
    # bytes that become objects, and so may become code
    *("pickle.*", "marshal.*", "shelve.*", "dill.*", "cloudpickle.*", "joblib.load"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.*"),
    *("torch.distributed.checkpoint.load*", "torch.distributed.checkpoint.*.load*"),
    *("torch.distributed.*object*", "torch.distributed.rpc.*"),
    *("pandas.read_pickle", "multiprocessing.connection.*"),
    # names that become code
    *("importlib.import_module", "importlib.reload", "importlib.util.spec_from_file_location"),
    *("importlib.metadata.entry_points", "importlib.machinery.*", "runpy.*", "code.*", "ctypes.*"),
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"),
    # programs
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_*"),
    *("subprocess.get*output", "os.system", "os.popen", "os.exec*", "os.spawn*", "os.posix_spawn*"),
    *("os.startfile", "pty.*", "asyncio.create_subprocess_*", "multiprocessing.*Process"),
    *("torch.multiprocessing.*spawn*", "webbrowser.open*", "webbrowser.get"),
    # formats with a history
    *("tarfile.*open", "tarfile.TarFile", "zipfile.ZipFile", "zipfile.PyZipFile"),
    *("shutil.unpack_archive", "yaml.*oad*", "yaml.compose*", "yaml.parse", "yaml.scan"),
    *("xml.*", "lxml.*", "jinja2.*Environment", "jinja2.Template", "jinja2.*.Environment"),
    *("tempfile.mktemp", "sqlite3.*.enable_load_extension"),
    # ports
    *("http.server.*Server", "socketserver.*Server", "socket.create_server", "asyncio.start_*"),
    *("xmlrpc.*", "wsgiref.simple_server.*", "multiprocessing.managers.*"),
}
"""Dotted names, as they are imported; a star stands for any text."""
_ANY_NAME = re.compile("|".join(map(fnmatch.translate, sorted(NAMES))))
METHODS = {"bind", "listen", "extract", "extractall", "exec_module", "unpack_archive"}
"""Names of methods that are of interest whatever they are called on."""
KEYWORDS = {"shell": True, "allow_pickle": True, "weights_only": False, "trust_remote_code": True}
"""Arguments that make any call one of interest."""
HARMLESS = {
    *("pickle.UnpicklingError", "pickle.PicklingError", "pickle.PickleError"),
    *("pickle.HIGHEST_PROTOCOL", "pickle.DEFAULT_PROTOCOL", "yaml.YAMLLoadWarning"),
}
"""Names that the patterns above match, and that are harmless."""


class Call(NamedTuple):
    file: str
    function: str
    call: str


def found(root: Path = ROOT) -> Counter[Call]:
    """Every call of interest in the product, and how often each occurs in its function."""
    calls: Counter[Call] = Counter()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            name = path.relative_to(root).as_posix()
            calls.update(Call(name, *rest) for rest in _Walk(tree).calls)
    return calls


def listed(path: Path = LIST) -> dict[Call, dict[str, object]]:
    """The entries of the list. Raises ValueError for a duplicate, or one without a reason."""
    entries: dict[Call, dict[str, object]] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["call"]:
        call = Call(entry["file"], entry["function"], entry["call"])
        if call in entries or not str(entry.get("why", "")).strip():
            raise ValueError(f"{call} is there twice, or has no `why`")
        entries[call] = entry
    return entries


def missing(calls: Counter[Call], path: Path = LIST) -> list[str]:
    """An entry for each of `calls` that the list lacks, as TOML; `why` is left to a person."""
    known = listed(path)
    return [
        _stub(call, times)
        for call, times in sorted(calls.items())
        if known.get(call, {}).get("times", 1 if call in known else 0) != times
    ]


def stale(calls: Counter[Call]) -> list[Call]:
    """Entries of calls that no longer exist."""
    return sorted(listed().keys() - calls.keys())


def _stub(call: Call, times: int) -> str:
    fields = [f'{name} = "{value}"' for name, value in call._asdict().items()]
    fields += [f"times = {times}"] if times > 1 else []
    return "\n".join(["[[call]]", *fields, 'why = ""', ""])


class _Walk(ast.NodeVisitor):
    """Names of interest in one file, each with the function that it stands in.

    A mere mention counts, so that `run = subprocess.run` hides nothing. Annotations do not.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.calls: list[tuple[str, str]] = []
        self._inside: list[str] = []
        self._names = dict(_imported(tree))
        self.visit(tree)

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for part in (*node.decorator_list, *getattr(node, "bases", ())):
            self.visit(part)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.visit(default)
        self._inside.append(node.name)
        for part in node.body:
            self.visit(part)
        self._inside.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _enter  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            if keyword.arg in KEYWORDS and value is KEYWORDS[keyword.arg]:
                self._note(f"{keyword.arg}={value}")
        if hidden := self._by_getattr(node):
            self._note(hidden)
        self.generic_visit(node)

    def _by_getattr(self, node: ast.Call) -> str | None:
        """The name of interest in ``getattr(os, "system")``."""
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=name), *_]):
                dotted = f"{self._dotted(of)}.{name}"
                return dotted if _of_interest(dotted) else None
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None and _of_interest(dotted):
            self._note(dotted)
        elif node.attr in METHODS:
            self._note(f".{node.attr}")
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        dotted = self._names.get(node.id, node.id)
        if _of_interest(dotted):
            self._note(dotted)

    def _dotted(self, node: ast.expr) -> str | None:
        """``a.b.c`` with what `a` was imported as; None where it does not begin with a name."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self._dotted(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return None

    def _note(self, call: str) -> None:
        self.calls.append((".".join(self._inside) or "the module", call))


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What each imported name of a file stands for, wherever in it the import is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _of_interest(dotted: str) -> bool:
    if dotted in BUILTINS:
        return True
    return dotted not in HARMLESS and bool(_ANY_NAME.match(dotted))


def main() -> int:
    """Print what the list lacks, and what is obsolete; returns 1 if there is anything."""
    calls = found()
    absent, gone = missing(calls), stale(calls)
    print("\n".join(absent), end="")
    for call in gone:
        print(f"# no longer there: {' '.join(call)}")
    if not (absent or gone):
        print(f"calls.toml: all {sum(calls.values())} calls are listed, each with its reason")
    return 1 if absent or gone else 0


if __name__ == "__main__":
    sys.exit(main())
