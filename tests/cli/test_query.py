"""`--query` and `--format` of list, status and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.run import registry


@pytest.fixture(autouse=True)
def runs(project, tmp_path):
    """A run that succeeded and one that failed, with two losses."""
    for number, (name, state) in enumerate(
        [("exp-a", State.SUCCEEDED), ("exp-b", State.FAILED)], start=1
    ):
        folder = tmp_path / "runs" / name
        (folder / "output").mkdir(parents=True)
        points = [{"step": step, "loss": 1 / step} for step in (1, 2)]
        lines = "".join(f"{json.dumps(point)}\n" for point in points)
        Path(folder, "output/metrics.jsonl").write_text(lines)
        where = ("local", "localhost", str(folder))
        row = registry.Run(name, "exp", *where, "a", "b", None, float(number), f"{folder}/output")
        registry.add(row._replace(id=name))
        registry.update(name, Status(state, "", "it ended", number - 1))


def shown(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(list(words)) == code
    found = capsys.readouterr()
    return found.err if code else found.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["list", "-q", "[].run"], "exp-b\nexp-a\n"),
        (["list", "-q", "[?state=='failed'].exit_code"], "1\n"),
        (["list", "-q", "length(@)"], "2\n"),
        (["list", "-q", "[?state=='running'].run"], ""),
        (["status", "exp-a", "--query", "[0].state"], "succeeded\n"),
        (["status", "exp-a", "-q", "[0].commit"], "null\n"),
        (["status", "exp-a", "-q", "[0].schema_version"], "1\n"),
        (["metrics", "exp-a", "-q", "progress.step"], "2\n"),
        (["metrics", "exp-a", "-q", "points[?name=='loss'] | [-1].value"], "0.5\n"),
        (["list", "--format", "{run} {state:>9}"], "exp-b    failed\nexp-a succeeded\n"),
        (["list", "--format", r"{run}\t{exit_code}{{}}"], "exp-b\t1{}\nexp-a\t0{}\n"),
        (["status", "exp-a", "--format", "{commit:>3} {commit:.2f}"], "  - -\n"),
        (
            [
                "status",
                "exp-a",
                "--format",
                "{commit:,.0f} {commit:+.1f}|{commit:*^5_d}|{commit:04.1f}",
            ],
            "- -|**-**|-   \n",
        ),
        (["metrics", "exp-a", "--format", "{step} {value:.3f}"], "1 1.000\n2 0.500\n"),
    ],
)
def test_what_is_chosen(capsys, words, text):
    assert shown(capsys, *words) == text


def test_records_stay_json(capsys):
    chosen = shown(capsys, "list", "-q", "[].{run: run, code: exit_code}", "--json")
    assert json.loads(chosen) == [{"run": "exp-b", "code": 1}, {"run": "exp-a", "code": 0}]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["-q", "[.run"], ["--query '[.run':", "https://jmespath.org"]),
        (["-q", "length(`1`)"], ["--query", "invalid type"]),
        (["-q", "no_such(@)"], ["Unknown function"]),
        (["--format", "{stat}"], ["unknown key 'stat'", "did you mean 'state'?"]),
        (["--format", "{xyzzy}"], ["unknown key 'xyzzy'", "keys: run, name", "exit_code"]),
        (["--format", "{state.value}"], ["'state.value': the value before 'value' has no keys"]),
        (["--format", "{run.__class__}"], ["has no keys"]),
        (
            ["--format", "{run"],
            ["expected '}' before end of string", "for literal braces, write {{ and }}"],
        ),
        (["--format", "{}"], ["unknown key '0'"]),
        (["--format", "{exit_code:s}"], ["Unknown format code 's'"]),
        (["--format", "{run}", "-q", "[0]"], ["cannot be used together"]),
    ],
)
def test_what_cannot_be_done_is_said(capsys, words, texts):
    error = shown(capsys, "list", *words, code=64)
    for text in texts:
        assert text in error


def test_metrics_as_csv_has_no_query(capsys):
    assert "--csv cannot be used" in shown(capsys, "metrics", "--csv", "-q", "@", code=64)
