"""`examples/backend_print.py`: a backend from another package, and each verb with it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from deploykit.backends import base as backend
from deploykit.cli import main as cli
from deploykit.lib import paths

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """What pip leaves behind of a package that offers the backend."""
    site = tmp_path / "site"
    info = site / "paper-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deploykit.backends]\nprint = backend_print\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(EXAMPLES)


def run(capsys, *argv):
    code = cli.main(list(argv))
    return code, capsys.readouterr()


def test_it_has_every_member_of_the_contract():
    engine = backend.find("print")
    members = {name for name in vars(backend.Backend) if not name.startswith("_")}
    assert len(members) == 11
    assert all(hasattr(engine, name) for name in members)
    assert list(backend.names())[-1] == "print"


def test_its_whole_life(project, capsys):
    argv = ["--backend", "print", "--run", "one", "--set", "print.prefix='> '"]
    _, shown = run(capsys, "submit", *argv, "--dry-run")
    assert shown.out == "> train.py --epochs 5\n"
    code, shown = run(capsys, "submit", *argv, "--wait")
    assert code == 0
    assert "[node 0] > train.py --epochs 5\n" in shown.out
    assert "one: succeeded, exit code 0" in shown.out
    assert json.loads(run(capsys, "status", "--json")[1].out)[0]["handle"] == "print://paper/one"
    assert run(capsys, "logs", "one")[1].out == "[node 0] > train.py --epochs 5\n"
    assert run(capsys, "list")[1].out.startswith("one\tprint\tsucceeded\t")
    assert run(capsys, "wait", "one")[0] == 0
    assert run(capsys, "diagnose", "one")[0] == 0
    assert "no metrics" in run(capsys, "metrics", "one")[1].err
    assert "no profile" in run(capsys, "profile", "one")[1].err
    assert "has no `track`" in run(capsys, "sync", "one")[1].err
    assert "output: already on this machine, in " in run(capsys, "fetch", "one")[1].out
    assert "one: succeeded" in run(capsys, "watch", "one", "--once")[1].out
    assert "Run one on print: succeeded" in run(capsys, "guide", "nccl", "one")[1].out
    assert (
        run(capsys, "rerun", "one", "--run", "one", "--dry-run")[1].out == "> train.py --epochs 5\n"
    )
    assert run(capsys, "dump", "one")[1].err.startswith(
        "error: one has ended (succeeded), and no stacks"
    )
    said = "error: no rank of one is running (state: succeeded)"
    assert run(capsys, "exec", "one", "--", "true")[1].err.startswith(said)
    assert run(capsys, "cancel", "one")[0] == 0
    grid = ["--grid", "lr=1", "--metric", "loss", "--backend", "print", "--sweep", "s"]
    code, shown = run(capsys, "sweep", "start", *grid)
    assert (code, "metric 'loss' not found" in shown.err) == (1, True)
    assert run(capsys, "logs", "s-0")[1].out == "[node 0] train.py --epochs 5 --lr 1\n"
    assert run(capsys, "rm", "s-0")[0] == 0
    assert "print\tyes\tdoctor\t" in run(capsys, "backends")[1].out
    assert (
        "\trun\tsucceeded\tone\n"
        in run(capsys, "prune", "--state", "succeeded", "--dry-run")[1].out
    )
    assert "\none\tsucceeded\t" in run(capsys, "disk")[1].out
    again = ["rerun", "one", "--run", "two", "--json"]
    assert run(capsys, *again)[0] == 0
    assert "state\tsucceeded\tsucceeded\n" in run(capsys, "compare", "one", "two")[1].out
    same = ["reproduce", "one", "--run", "three", "--json"]
    assert json.loads(run(capsys, *same)[1].out)["run"] == "three"
    assert run(capsys, "report", "one")[1].out.startswith("report-one.html: ")
    assert run(capsys, "rm", "one")[0] == 0


def test_doctor_prints_its_findings(project, capsys):
    """Also about a script and its arguments."""
    code, shown = run(capsys, "doctor", "--backend", "print")
    assert (code, shown.out) == (0, "print: no problems found\n")
    wide = ["--set", f"print.prefix={'x' * 81}"]
    code, shown = run(capsys, "doctor", "--backend", "print", *wide)
    assert code == 0
    assert "print: 1 warning\n" in shown.out
    assert "warning: the line is too wide\n  proof  100 columns\n" in shown.out
    (project / "other.py").touch()
    code, shown = run(capsys, "doctor", "other.py", "--backend", "print", "--", "x" * 80)
    assert (code, "proof  89 columns\n" in shown.out) == (0, True)


def test_one_more_function_is_one_more_capability(project, capsys, monkeypatch):
    def when(plan):
        yield backend.Start("at the printer", plan.options, None, "out of paper")

    monkeypatch.setattr(backend.find("print"), "when", when, raising=False)
    assert "print\tyes\tdoctor, when\t" in run(capsys, "backends")[1].out
    assert "at the printer" in run(capsys, "when", "--backend", "print")[1].out


LACKING = {
    "attach": (["attach", "two", "--backend", "print"], "sagemaker"),
    "probe": (["backends", "print", "--probe"], "slurm"),
    "tasks": (["logs", "one", "--task", "0"], "slurm"),
    "cost": (["cost", "--backend", "print"], "local, slurm, sagemaker"),
    "when": (["when", "--backend", "print"], "local, slurm, sagemaker"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_it_does_not_offer_is_said_plainly(name, project, capsys):
    argv, offering = LACKING[name]
    assert run(capsys, "submit", "--backend", "print", "--run", "one")[0] == 0
    code, shown = run(capsys, *argv)
    assert code == 64
    assert (
        f"backend print does not offer `{name}`\n  backends that offer it: {offering}\n"
        in shown.err
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("check --set preflight=true", "preflight: backend print does not offer `preflight`"),
        ("submit --set preflight=true", "preflight: backend print does not offer `preflight`"),
        ("submit --dry-run --set max_cost=5USD", "max_cost: this backend has no prices, so the"),
        (
            "check --set resources.nodes=2",
            "resources.nodes: print supports only one node (set nodes: 1)",
        ),
        ("check --set print.prefx=x", "print.prefx: unknown key (did you mean 'prefix'?)"),
    ],
)
def test_what_a_job_may_not_ask_of_it(project, capsys, words, told):
    verb, *others = words.split()
    code, shown = run(capsys, verb, "--backend", "print", *others)
    assert code == 65
    assert told in shown.err


def test_every_verb_is_tried_here_or_needs_no_backend():
    tried = {
        *("submit", "status", "list", "logs", "wait", "diagnose", "cancel", "backends", "check"),
        *("compare", "config", "cost", "doctor", "guide", "init", "attach", "exec", "shell"),
        *("report", "reproduce", "rerun", "disk", "dump", "prune", "rm", "sweep", "sync"),
        *("deploy", "export", "fetch", "metrics", "profile", "watch", "when", "open"),
    }
    untried = {
        *("advise", "completion", "endpoint", "evaluate", "infra", "mcp", "nodes", "notify"),
        *("explain", "register", "schema"),
    }
    assert set(cli.VERBS) - tried == untried


def test_one_that_cannot_be_imported_is_named_and_hides_no_other(tmp_path, capsys):
    info = tmp_path / "site/torn-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deploykit.backends]\ntorn = no_such_module\n")
    code, shown = run(capsys, "submit", "--backend", "torn")
    assert code == 64
    assert "backend torn cannot be imported: ModuleNotFoundError" in shown.err
    code, shown = run(capsys, "backends", "--json")
    rows = {row["name"]: row for row in json.loads(shown.out)}
    assert code == 0
    assert rows["print"]["usable"]
    assert not rows["torn"]["usable"]


def test_commands_name_no_backend():
    """Strings that are a backend's name; a hint or a help text may mention one as an example."""
    for path in (EXAMPLES.parent / "deploykit/cli").glob("*.py"):
        if path.name == "main.py":  # names packages for --version
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        assert not strings & {"local", "slurm", "sagemaker"}, path
        assert not any(re.match(r"deploykit\.backends\.(local|sl|sa)", name) for name in modules), (
            path
        )


def test_init_writes_its_section_too(project, capsys):
    assert run(capsys, "init", "--full", "new.yaml")[0] == 0
    assert "#   # Text before the command.\n" in (project / "new.yaml").read_text()


def test_it_can_be_the_users_default(project, capsys, monkeypatch):
    file = paths.config()
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text('backend = "print"\n')
    assert run(capsys, "submit", "--dry-run")[1].out == "train.py --epochs 5\n"
    assert run(capsys, "config")[1].out.startswith(f"backend\tprint\tconfig file: {file}, line 1\n")


def test_contributing_names_every_function():
    text = (EXAMPLES.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    functions = ("check", "plan", "submit", "find", "status", "logs", "cancel")
    for number, name in enumerate(functions, 1):
        assert f"\n{number}. `{name}(" in text
