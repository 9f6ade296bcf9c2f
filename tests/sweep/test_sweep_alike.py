"""Sweeps whose trials all fail in the same way: they stop, and show the refused argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.job import checks
from deploykit.lib import paths
from tests.sweep import plain

PARSER = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", "--lr", type=float, default=0.1)
parser.add_argument("--amp", action=argparse.BooleanOptionalAction)
parser.add_argument("data", nargs="?")
options = parser.parse_args()
print(f"step 1/1 loss={options.learning_rate}", flush=True)
"""
HIDDEN = PARSER.replace("options =", "(lambda it: None)(parser)\noptions =")
"""The same, but another function gets the parser: it may add options."""


def test_a_parameter_that_the_script_refuses_is_found_before_the_start(toy, write, sweep):
    (toy / "train.py").write_text(PARSER)
    write(
        sampler="grid",
        parameters="{lerning-rate: {choice: [1]}, lr: {choice: [1]}, no-amp: {choice: [1]}, "
        "x: {choice: [1], as: '--decay={value}'}, e: {choice: [1], as: 'env:E'}}",
    )
    sweep("start", code=65)
    assert "lerning-rate: train.py has no option --lerning-rate" in sweep.notes
    assert "did you mean '--learning-rate'?" in sweep.notes
    assert "x: train.py has no option --decay" in sweep.notes
    assert sweep.notes.count("has no option") == 2
    assert plain.started(paths.state()) == {}


@pytest.mark.parametrize(
    "change",
    [
        ("parser.parse_args()", "parser.parse_known_args()[0]"),
        ('"--amp"', '"--" + "amp"'),
        ("options =", "add_more(parser)\noptions ="),
        ("options =", "more(to=parser)\noptions ="),
        ("options =", "own = parser.add_argument_group()\nmore(own)\noptions ="),
        ("ArgumentParser()", "ArgumentParser(parents=[other])"),
        ("ArgumentParser()", "HfArgumentParser(Arguments)"),
        ("import argparse", "import argparse as"),
    ],
)
def test_options_that_the_source_does_not_show_are_not_refused(change):
    assert checks.argparse_options(PARSER.encode()) == [
        *("--help", "--learning-rate", "--lr", "--amp", "--no-amp")
    ]
    changed = PARSER.replace(*change)
    assert changed != PARSER
    assert checks.argparse_options(changed.encode()) is None


def test_three_first_trials_that_fail_alike_stop_the_sweep(toy, write, sweep):
    (toy / "train.py").write_text(HIDDEN)
    write(sampler="grid", trials=9, parameters="{lerning-rate: {range: [1, 9], step: 1}}")
    shown = sweep("start", "--sweep", "s", code=1)
    assert (
        "s: stopped\n  reason  the first 3 trials all failed in the same way before any step: "
        in shown
    )
    assert "error: unrecognized arguments: --lerning-rate" in shown
    assert sum(plain.started(paths.state()).values(), 0) == 0  # the script ends before it counts
    runs = {path.name for path in Path(paths.state(), "runs").iterdir()}
    assert {"s-0", "s-1", "s-2"} <= runs
    assert "s-8" not in runs
    (toy / "train.py").write_text(PARSER)
    resumed = sweep("resume", "s", code=1)  # with the source of the start
    assert "all failed in the same way" in resumed


def test_trials_that_made_steps_do_not_stop_it(write, sweep):
    choices = [f"raise ValueError({number})" for number in range(3)] + ["pass"]
    write(sampler="grid", trials=4, parameters=f"{{do: {{choice: {choices}}}}}")
    found = sweep("start", "--json")
    assert found["counts"] == {"failed": 3, "succeeded": 1}
    assert (found["state"], found["reason"]) == ("finished", "")


def test_trials_that_fail_in_different_ways_do_not_stop_it(toy, write, sweep):
    (toy / "train.py").write_text("import sys\nexec(sys.argv[2])\n")
    choices = ["import one_that_is_missing", "raise ValueError(2)", "open('/no/file')", "1 / 0"]
    write(sampler="grid", trials=4, parameters=f"{{do: {{choice: {choices}}}}}")
    found = sweep("start", "--json", code=1)
    assert (found["counts"], found["state"]) == ({"failed": 4}, "finished")


@pytest.mark.torch
@pytest.mark.slow
def test_on_this_machine(tmp_path, monkeypatch, sweep):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(HIDDEN)
    Path("job.yaml").write_text("name: toy\nentrypoint: {script: train.py}\n")
    grid = ["--grid", "lerning-rate=1,2,3,4,5,6", "--metric", "loss", "--sweep", "s"]
    shown = sweep("start", *grid, code=1)
    assert "unrecognized arguments: --lerning-rate" in shown
    assert "3 of 6: 3 failed" in shown
