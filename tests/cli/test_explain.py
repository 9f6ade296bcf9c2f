"""`deploykit explain`: a page for each cause, rule, finding and exit code, without network."""

from __future__ import annotations

import ast
import itertools
import json
import re
import signal
from pathlib import Path

import pytest

from deploykit.backends.sagemaker import rules as oracle
from deploykit.cli import exit_codes
from deploykit.cli import main as cli
from deploykit.diagnose import cause_rules
from deploykit.doctor import account
from deploykit.doctor.codes import CODES
from deploykit_node import cluster
from tests.aws_server import SECTION

DEPLOYKIT = Path(__file__).parents[2] / "deploykit"
RULES = [rule for group in oracle.rules().values() for rule in group]


def explain(capsys, *words, code=0):
    assert cli.main(["explain", *words]) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def pages(capsys):
    return json.loads(explain(capsys, "--json"))


def test_every_cause_and_every_rule_has_a_page(capsys):
    found = {(page["kind"], page["id"]): page for page in pages(capsys)}
    labels = {rule.label for rule in cause_rules.load().causes}
    assert {name for kind, name in found if kind == "cause"} == labels
    assert {name for kind, name in found if kind == "rule"} == {rule.id for rule in RULES}
    assert len({name for _, name in found}) == len(found)
    for page in found.values():
        assert not re.search(r"[{}]|^@", page["meaning"]), page
        for detail in page["details"]:
            assert not re.search(r"\{\w+[|}]|^@\w", detail["text"], re.MULTILINE), page


def test_a_cause_has_its_fix_and_says_whether_a_retry_helps(capsys):
    shown = explain(capsys, "nccl_init_timeout")
    assert shown.startswith("cause nccl_init_timeout: ")
    assert "\n  guide     deploykit guide nccl\n" in shown
    assert "\n  retry     the same job would fail again\n" in explain(capsys, "cuda_oom")


def test_the_title_of_a_cause_is_true_for_all_its_rules(capsys):
    title = explain(capsys, "host_oom").partition("\n")[0]
    for rule in cause_rules.load().causes:
        assert rule.label != "host_oom" or rule.means in title


def codes_of(call, values):
    """The codes of a call of Finding: text, or one with parts of `values`."""
    if isinstance(call, ast.IfExp):
        return codes_of(call.body, values) | codes_of(call.orelse, values)
    if isinstance(call, ast.Constant):
        return {call.value}
    if not isinstance(call, ast.JoinedStr):
        return set()
    pieces = [
        [one.value] if isinstance(one, ast.Constant) else values[ast.unparse(one.value)]
        for one in call.values
    ]
    return {"".join(parts) for parts in itertools.product(*pieces)}


def test_every_finding_of_doctor_has_a_page(capsys):
    """Also those with the direction or the service at the end."""
    values = {"way": ["inbound", "outbound"], "suffix": ["", "_kms", "_ssmmessages"]}
    assert values["suffix"][1:] == [f"_{name}" for name in account._OPTIONAL_SERVICES]
    codes = set()
    for path in (*DEPLOYKIT.glob("doctor/*.py"), *DEPLOYKIT.glob("backends/*/doctor.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {
                "Finding",
                "finding",
            }:
                codes |= codes_of(node.args[0], values)
    assert codes == set(CODES)
    assert {page["id"] for page in pages(capsys) if page["kind"] == "finding"} == codes


def test_a_rule_has_the_key_the_verdict_and_the_source(capsys):
    rule = next(rule for rule in RULES if rule.id == "more-ranks-than-gpus")
    shown = explain(capsys, rule.id)
    assert "\n  key       resources.processes_per_node\n" in shown
    assert f"\n  verdict   {rule.verdict.value}\n" in shown
    assert shown.endswith(f"\n  source    {rule.source}\n")


def test_a_problem_carries_the_id_of_its_rule(project, capsys):
    settings = ("sagemaker.distribution=none", "resources.nodes=2")
    words = [word for one in settings for word in ("--set", one)]
    (project / "job.yaml").write_text((project / "job.yaml").read_text() + SECTION)
    assert cli.main(["check", "-b", "sagemaker", *words]) == 65
    assert "\n    or `deploykit explain no-launcher`\n" in capsys.readouterr().err
    assert cli.main(["check", "-b", "sagemaker", *words, "--json"]) == 65
    problems = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert "no-launcher" in [one["rule"] for one in problems]
    assert explain(capsys, "no-launcher").startswith("rule no-launcher: ")


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("0", ["run       every rank exited with code 0", "deploykit success;"]),
        ("77", ["permission denied", "Python    deploykit.errors: NotPermitted"]),
        (
            "78",
            ["the config file has problems", "run       the job cannot run in this"],
        ),
        ("81", ["can never start"]),
        ("137", ["a rank was killed (128 + 9)"]),
        ("79", ["`diagnose` found a cause"]),
        ("139", [f"terminated by {signal.SIGSEGV.name} (128 + 11)"]),
        ("3", ["the first rank to fail exited with this code\n"]),
    ],
)
def test_an_exit_code_is_explained_for_commands_and_for_runs(capsys, code, texts):
    shown = explain(capsys, code)
    assert shown.startswith(f"exit code {code}: ")
    for text in texts:
        assert text in shown


def test_the_codes_of_the_launcher_are_those_of_the_node():
    kinds = (cluster.BadCommand, cluster.LaunchError, cluster.BadEnvironment)
    assert {kind.exit_code for kind in kinds} == set(exit_codes.LAUNCHER)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cuda_omm", "did you mean 'cuda_oom'?"),
        ("no_launcer", "did you mean 'no-launcher'?"),
        ("peers_inbond", "did you mean 'peers_inbound'?"),
        ("xyzzy", "`deploykit explain` lists them all"),
        ("999", "exit codes range from 0 to 255"),
        ("-1", "exit codes range from 0 to 255"),
    ],
)
def test_an_unknown_id_gets_a_suggestion(capsys, name, hint):
    assert hint in explain(capsys, name, code=64)


def test_underscores_hyphens_and_capitals_do_not_matter(capsys):
    assert explain(capsys, "CUDA-OOM") == explain(capsys, "cuda_oom")
    assert explain(capsys, "no_launcher") == explain(capsys, "no-launcher")
