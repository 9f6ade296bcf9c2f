"""`compare`: what differs between runs, and which of their metrics are best."""

from __future__ import annotations

import json

import pytest

from deploykit.backends import base as backend
from deploykit.cli import main as cli
from deploykit.job.settings import argument_pairs
from deploykit.run.report import better
from tests.live_run import OnTerminal

HOSTILE = "x\x1b]52;c;eA==\x07\u202e[bold]"


def write(run, *, losses=(), args=(), **job):
    """A run that has ended: its job, its numbers."""
    content = {
        "entrypoint": {"script": "train.py", "module": None, "args": list(args)},
        "resources": {"nodes": 1, "memory": None},
        "retries": 0,
        **job,
    }
    (run.folder / backend.JOB).write_text(json.dumps(content))
    (run.folder / "output").mkdir()
    with (run.folder / "output/metrics.jsonl").open("w") as file:
        for step, (loss, accuracy) in enumerate(losses, 1):
            numbers = {"step": step, "loss": loss, "accuracy": accuracy, "lr": 0.1}
            file.write(json.dumps(numbers) + "\n")
    run.end()
    return run


def compare(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(["compare", *words]) == code
    return capsys.readouterr()


def cells(shown):
    return {line.split("\t")[0]: line.split("\t")[1:] for line in shown.out.splitlines()}


@pytest.fixture
def two(start):
    """One run that ends with less loss, one whose loss was the least before."""
    write(
        start("one-a"),
        losses=[(2.0, 0.5), (0.5, 0.7)],
        args=["--lr", "0.1", "--fast", "data", "--epochs=3"],
    )
    write(
        start("two-b"),
        losses=[(0.25, 0.9), (1.0, 0.7)],
        args=["--lr", "0.2", "data", "--epochs=3"],
        resources={"nodes": 2, "memory": None},
    )


def test_what_differs_and_nothing_else(two, capsys):
    shown = compare(capsys, "one-a", "two-b")
    found = cells(shown)
    assert found.pop("duration")
    assert found == {
        "": ["one-a", "two-b"],
        "state": ["succeeded", "succeeded"],
        "resources.nodes": ["1", "2"],
        "--lr": ["0.1", "0.2"],
        "--fast": ["data", "-"],
        "argument 1": ["-", "data"],
        "loss, last": ["0.5 *", "1"],
        "loss, best": ["0.5", "0.25 *"],
        "accuracy, last": ["0.7", "0.7"],
        "accuracy, best": ["0.7", "0.9 *"],
    }
    assert shown.err == "4 identical settings not shown\n"


def test_json_has_the_numbers_with_their_sources(two, capsys):
    found = json.loads(compare(capsys, "one-a", "two-b", "--json", "--name", "*loss*").out)
    assert [run["run"] for run in found["runs"]] == ["one-a", "two-b"]
    assert {"name": "--lr", "values": {"one-a": "0.1", "two-b": "0.2"}} in found["settings"]
    assert found["same_settings"] == 4
    (loss,) = found["metrics"]
    source = "output/metrics.jsonl"
    assert loss == {
        "name": "loss",
        "better": "less",
        "last": {"one-a": 0.5, "two-b": 1.0},
        "best": {"one-a": 0.5, "two-b": 0.25},
        "best_runs": ["two-b"],
        "sources": {"one-a": source, "two-b": source},
    }


def test_runs_that_are_the_same_say_so(start, capsys):
    for name in ("one-a", "two-b", "six-c"):
        write(start(name), losses=[(1.0, 0.5)])
    shown = compare(capsys, "one-a", "two-b", "six-c")
    assert set(cells(shown)) == {"", "state", "duration"}
    assert shown.err == "source, job and arguments are identical\n"


def test_numbers_that_are_none_are_never_the_best(start, capsys):
    write(start("one-a"), losses=[(float("nan"), 0.5)])
    write(start("two-b"), losses=[(3.0, 0.5)])
    write(start("six-c"), losses=[(4.0, 0.5)])
    found = cells(compare(capsys, "one-a", "two-b", "six-c"))
    assert found["loss, last"] == ["nan", "3 *", "4"]
    loss = json.loads(compare(capsys, "one-a", "two-b", "--name", "loss", "--json").out)
    assert loss["metrics"][0]["last"] == {"one-a": "nan", "two-b": 3.0}
    assert loss["metrics"][0]["best_runs"] == []


def test_cost_restarts_and_source_are_told(start, two, capsys):
    folder = start("six-c").folder
    (folder / "price.json").write_text('{"hourly": "2", "currency": "USD", "source": "x"}')
    (folder / "exit_records").mkdir()
    (folder / "exit_records/attempt.json").write_text('{"attempt": 2}')
    found = cells(compare(capsys, "one-a", "six-c"))
    assert found["cost"] == ["-", "0.00 USD"]
    assert found["restarts"] == ["0", "2"]
    assert found["state"] == ["succeeded", "running"]
    assert found["--lr"] == ["0.1", "-"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["one-a"], 64, "only one run was given: one-a"),
        (["one-a", "one-a"], 64, "only one run was given: one-a"),
        (["one-a", "nowhere"], 66, "nowhere"),
        ([], 64, "RUN"),
    ],
)
def test_what_is_no_comparison_is_refused(two, capsys, words, code, told):
    assert told in compare(capsys, *words, code=code).err


def test_nothing_that_a_terminal_obeys_reaches_it(start):
    for name, value in (("one-a", HOSTILE), ("two-b", "y")):
        write(start(name), args=["--name", value], env={HOSTILE: value})
    page = OnTerminal("compare", "one-a", "two-b")
    assert page.end() == 0
    assert "\\x1b]52;c;eA==\\x07\\u202e[bold]" in page.seen
    assert "\x1b]52" not in page.seen


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (["--lr", "-1", "--x=", "y"], [("--lr", "-1"), ("--x", ""), ("argument 1", "y")]),
        (["--a", "--b"], [("--a", "yes"), ("--b", "yes")]),
        (["a", "-v", "--"], [("argument 1", "a"), ("argument 2", "-v"), ("argument 3", "--")]),
        ([], []),
    ],
)
def test_arguments_by_name(words, pairs):
    assert list(argument_pairs(words)) == pairs


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, "less") for name in ("loss", "val/loss", "trainloss", "step_seconds", "wer")),
        *((name, "more") for name in ("eval_accuracy", "images_per_second", "tokens/s", "mfu")),
        *((name, None) for name in ("lr", "grad_norm", "steps_per_epoch", "lossless", "x/state")),
    ],
)
def test_which_value_is_better(name, side):
    assert better(name) == side
