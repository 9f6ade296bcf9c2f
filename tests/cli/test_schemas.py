"""JSON Schemas of what verbs print with `--json`.

conftest.py checks each document that any test of the suite prints. Here: that each verb has a
schema, that a schema refuses what it should, and documents of the verbs that need one run only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from deploykit.cli import main as cli
from deploykit.cli import output, schemas
from deploykit.job.model import State, Status
from deploykit.run import registry
from tests import documents

ROOT = Path(__file__).parents[2]
WITHOUT = {"completion", "mcp"}
"""Verbs without `--json`."""
ELSEWHERE = {
    "attach": "tests/backends/sagemaker/test_sagemaker_commands.py",
    "rerun": "tests/run/test_rerun.py",
    "deploy": "tests/run/test_deployments.py",
    "doctor": "tests/doctor/test_doctor_local.py",
    "dump": "tests/run/test_dump.py",
    "endpoint": "tests/run/test_deployments.py",
    "evaluate": "tests/run/test_evaluate.py",
    "exec": "tests/cli/test_exec.py",
    "export": "tests/run/test_export.py",
    "infra": "tests/doctor/infra/test_infra.py",
    "nodes": "tests/run/test_left_out.py",
    "notify": "tests/run/test_notify.py",
    "profile": "tests/cli/test_profile.py",
    "register": "tests/backends/sagemaker/test_sagemaker_registry.py",
    "reproduce": "tests/run/test_reproduce.py",
    "shell": "tests/cli/test_exec.py",
    "sweep": "tests/sweep/test_sweep.py",
    "sync": "tests/observe/trackers/tracked.py",
    "when": "tests/cli/test_when.py",
}
"""Verbs that need more than one small run, and the tests that print their documents."""
JSON_VERBS = [verb for verb in cli.VERBS if verb not in WITHOUT]
ONE_RUN = {
    "advise": ["advise", "--list"],
    "backends": ["backends"],
    "cancel": ["cancel", "exp-one"],
    "check": ["check"],
    "compare": ["compare", "exp-one", "exp-two"],
    "config": ["config"],
    "cost": ["cost", "--backend", "local"],
    "diagnose": ["diagnose", "exp-one"],
    "disk": ["disk"],
    "explain": ["explain", "cuda_oom"],
    "fetch": ["fetch", "exp-one"],
    "guide": ["guide", "nccl"],
    "init": ["init", "--full", "other.yaml"],
    "list": ["list"],
    "logs": ["logs", "exp-one", "--tail", "1"],
    "metrics": ["metrics", "exp-one"],
    "nodes": ["nodes"],
    "open": ["open", "exp-one"],
    "prune": ["prune", "--state", "failed", "--dry-run"],
    "report": ["report", "exp-one"],
    "rm": ["rm", "exp-one"],
    "schema": ["schema", "list"],
    "status": ["status", "exp-one"],
    "submit": ["submit", "--backend", "local", "--dry-run"],
    "sync": ["sync", "exp-one"],
    "wait": ["wait", "exp-one"],
    "watch": ["watch", "exp-one", "--once"],
    "when": ["when", "--backend", "slurm"],
}
"""What prints a document, or an error, for a failed run."""
UNFIT = {"sync", "when"}
"""Of these, the run above shows an error only; other tests have their documents."""


@pytest.fixture
def runs(project, tmp_path):
    """Two failed runs with a log."""
    for name in ("exp-one", "exp-two"):
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        log = "[rank 0] step 1/2 loss 0.5\nRuntimeError: CUDA out of memory\n"
        (folder / "logs/node-0.log").write_text(log)
        row = registry.Run(
            name, "exp", "local", "localhost", str(folder), "a", "b", "c", 1.0, name, name
        )
        registry.add(row)
        registry.update(name, Status(State.FAILED, "failed", "rank 0 exited with code 1", 1))
    return project


def test_each_verb_with_json_has_a_schema_and_a_test_with_a_document():
    assert set(schemas.VERBS) == set(JSON_VERBS)
    assert set(ONE_RUN) - UNFIT | set(ELSEWHERE) == set(JSON_VERBS)
    for verb, file in ELSEWHERE.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf'"{verb}"', text), (verb, file)
        assert "json.loads" in text, (verb, file)


@pytest.mark.parametrize("verb", ONE_RUN)
def test_a_document_of_each_verb_conforms(runs, capsys, verb):
    cli.main([*ONE_RUN[verb], "--json"])  # conftest.py checks what it prints
    printed = json.loads(capsys.readouterr().out)
    assert documents.problems(verb, printed) == []
    assert verb in UNFIT or "error" not in printed
    assert verb == "schema" or all(
        one["schema_version"] == 1 for one in (printed if isinstance(printed, list) else [printed])
    )


def test_a_schema_refuses_a_missing_key_an_unknown_key_and_an_unknown_state(runs, capsys):
    assert cli.main(["status", "exp-one", "--json"]) == 0
    (good,) = json.loads(capsys.readouterr().out)
    for wrong, problem in (
        ({key: value for key, value in good.items() if key != "reason"}, "'reason' is a required"),
        ({**good, "nodes": 1}, "'nodes' was unexpected"),
        ({**good, "state": "lost"}, "'lost' is not one of"),
        ({**good, "created": "yesterday"}, "does not match"),
        ({**good, "schema_version": 2}, "1 was expected"),
    ):
        (shown,) = documents.problems("status", [wrong])
        assert problem in shown


def test_one_command_prints_all_schemas_which_are_valid(capsys):
    assert cli.main(["schema"]) == 0
    whole = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(whole)
    assert set(whole["$defs"]) >= set(JSON_VERBS)
    for verb in JSON_VERBS:  # the same part by part, with all that it refers to
        one = json.loads(json.dumps(schemas.schema(verb)))
        assert one["anyOf"] == whole["$defs"][verb]["anyOf"]
        assert one["$defs"].items() <= whole["$defs"].items()
    assert cli.main(["schema", "statsu"]) == 64
    error = capsys.readouterr().err
    assert "unknown command 'statsu'" in error
    assert "did you mean 'status'?" in error
    assert cli.main(["schema", "mcp"]) == 64
    assert "'mcp' prints no JSON" in capsys.readouterr().err


def test_the_check_of_the_suite_notices_a_document_that_does_not_conform(
    json_conforms, monkeypatch, capsys
):
    monkeypatch.setattr(output, "SCHEMA_VERSION", 2)
    assert cli.main(["backends", "--json"]) == 0
    assert "1 was expected" in json_conforms[0]
    json_conforms.clear()
