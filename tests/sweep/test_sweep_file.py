"""Sweep files: every problem at once; the search space; what a script gets."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deploykit.job.decode import Plain
from deploykit.lib.errors import DeploykitError, JobFileError, UsageError
from deploykit.sweep import file, space
from deploykit.sweep.model import Parameter
from tests.docs_runner import blocks

HEAD = "objective: {metric: loss}\ntrials: 3\n"


def read(tmp_path, text, name="sweep.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return file.read(path).sweep


def problems(tmp_path, text):
    with pytest.raises(JobFileError) as caught:
        read(tmp_path, text)
    return [str(problem) for problem in caught.value.problems]


def test_every_problem_with_its_line_and_what_was_meant(tmp_path):
    found = problems(
        tmp_path,
        "paramters:\n"
        "  lr: {range: [1e-4, x], lgo: true}\n"
        "objective: {metric: loss, direction: minimise}\n"
        "trials: 0\n",
    )
    assert found == [
        "line 1: paramters: unknown key (did you mean 'parameters'?)",
        "line 2: paramters.lr.lgo: unknown key (did you mean 'log'?)",
        "line 2: paramters.lr.range[1]: expected a number such as 0.1 or 1e-4; got 'x'",
        (
            "line 3: objective.direction: expected one of minimize, maximize; got 'minimise' "
            "(did you mean 'minimize'?)"
        ),
        "line 4: trials: must be at least 1, got 0",
    ]


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ("{}", "expected exactly one of `choice` and `range`"),
        ("{choice: [1], range: [1, 2]}", "expected exactly one of `choice` and `range`"),
        ("{choice: []}", "parameters.x.choice: is empty"),
        ("{choice: [a, a]}", "parameters.x.choice: contains a duplicate value"),
        ("{choice: [1, 2], log: true}", "parameters.x.log: applies only to a `range`"),
        ("{range: [2, 1]}", "expected the lowest and the highest value"),
        ("{range: [1, 2, 3]}", "expected the lowest and the highest value"),
        ("{range: [0, 1], log: true}", "must be greater than 0 with `log`"),
        ("{range: [1, 8], log: true, step: 1}", "cannot be combined with `log`"),
        ("{range: [0.5, 8], int: true}", "must use whole numbers with `int`"),
        ("{range: [-1e999, 1]}", "expected the lowest and the highest value"),
        ("{range: [0, 1e17], int: true}", "is too large for whole numbers"),
        ("{range: [0, 1], step: 1e-9}", "divides the range into more than 1,000,000 values"),
        ("{range: [0, 1], step: 2}", "must be greater than 0, and at most the width of the range"),
        ("{choice: [1], as: 'env:A B'}", "'A B' is not a valid environment variable name"),
        ("{choice: [1], as: '--x'}", "must contain {value}"),
        ('{choice: [1], as: "--x \'{value}"}', "contains an unclosed quote"),
        (
            "{choice: [1], if: {y: 1}}",
            "parameters.x.if.y: is not a parameter listed above this one",
        ),
    ],
)
def test_a_parameter_that_is_wrong(tmp_path, parameter, said):
    (found,) = problems(tmp_path, f"parameters: {{x: {parameter}}}\n{HEAD}")
    assert said in found


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("sampler: tpe", "trials: is required"),
        ("sampler: cma-es\ntrials: 4", "`cma-es` requires at least two parameters with a `range`"),
        ("sampler: grid", "parameters.x: a grid requires a `step`"),
        ("pruner: hyperband\ntrials: 4", "max_steps: is required for `hyperband`"),
        ("repeat: 3\ntrials: 4\nrepeat_as: --s", "repeat_as: must contain {value}"),
        ("repeat: 3\ntrials: 4\npruner: asha", "repeat: cannot be combined with a pruner"),
    ],
)
def test_a_search_that_is_wrong(tmp_path, keys, said):
    (found,) = problems(
        tmp_path, f"parameters: {{x: {{range: [0, 1]}}}}\nobjective: {{metric: loss}}\n{keys}\n"
    )
    assert said in found


def test_a_condition_names_a_value_of_a_choice_above(tmp_path):
    text = "parameters:\n  opt: {choice: [sgd, adam]}\n  m: {range: [0, 1], if: {opt: sdg}}\n"
    (found,) = problems(tmp_path, text + HEAD)
    assert "line 3: parameters.m.if.opt: 'sdg' is not a value of that parameter" in found
    assert "did you mean 'sgd'?" in found


def test_the_file_of_the_guide_is_valid(tmp_path):
    page = Path(__file__).parents[2] / "docs/how-to/sweep.md"
    (whole,) = (one.text for one in blocks(page.read_text()) if one.language == "yaml")
    assert read(tmp_path, whole).trials == 40


def test_yaml_and_toml_say_the_same(tmp_path):
    yaml = read(tmp_path, f"parameters: {{a: {{choice: [1, 0.5, true, x]}}}}\n{HEAD}")
    toml = read(
        tmp_path,
        "trials = 3\n[objective]\nmetric = 'loss'\n[parameters.a]\nchoice = [1, 0.5, true, 'x']\n",
        "sweep.toml",
    )
    assert yaml == toml


def test_a_grid_from_the_command_line_keeps_the_texts():
    swept = file.from_grid(["lr=0.10,1e-3", "b=x"], ["objective.metric=loss"]).sweep
    assert list(space.points(swept.parameters)) == [
        {"lr": "0.10", "b": "x"},
        {"lr": "1e-3", "b": "x"},
    ]
    for wrong in (["lr"], ["=1"], ["lr=1", "lr=2"]):
        with pytest.raises(UsageError):
            file.from_grid(wrong, ["objective.metric=loss"])


def test_what_the_script_gets(tmp_path):
    swept = read(
        tmp_path,
        "parameters:\n"
        "  lr: {choice: [0.10]}\n"
        "  b: {choice: ['a b']}\n"
        "  c: {choice: ['$(x)'], as: \"env:C\"}\n"
        "  d: {choice: ['1']  , as: \"--set 'opt d={value}'\"}\n" + HEAD,
    )
    values = {"lr": "0.10", "b": "a b", "c": "$(x)", "d": "1"}
    assert space.passed(swept.parameters, values) == (
        ["--lr", "0.10", "--b", "a b", "--set", "opt d=1"],
        {"C": "$(x)"},
    )


def test_a_grid_leaves_out_what_has_no_effect(tmp_path):
    swept = read(
        tmp_path,
        "sampler: grid\n"
        "parameters:\n"
        "  opt: {choice: [sgd, adam]}\n"
        "  m: {range: [0, 0.3], step: 0.1, if: {opt: sgd}}\n"
        "  n: {range: [1, 2], int: true}\nobjective: {metric: loss}\n",
    )
    points = list(space.points(swept.parameters))
    assert len(points) == space.trials(swept) == 4 * 2 + 2
    assert [point.get("m") for point in points] == [
        *("0.0", "0.0", "0.1", "0.1", "0.2", "0.2", "0.3", "0.3"),
        *(None, None),
    ]


@given(st.floats(0, 1, exclude_max=True), st.booleans(), st.booleans())
def test_values_are_within_their_range(share, log, whole):
    one = Parameter(range=("3", "700"), log=log, int=whole)
    value = space.at(one, share)
    assert 3 <= float(value) <= 700
    assert ("." not in value) == whole


def test_whole_numbers_of_a_log_range_include_both_ends():
    one = Parameter(range=("1", "4"), log=True, int=True)
    found = {space.at(one, number / 1000) for number in range(1000)}
    assert found == {"1", "2", "3", "4"}


NUMBERS = st.sampled_from(["0", "1", "-1e999", "1e30", "1e-30", "0.1", "8", "nan", "x"])
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "choice": st.lists(st.one_of(NUMBERS, st.booleans(), st.integers(), st.none())),
        "range": st.lists(NUMBERS.map(Plain), max_size=3),
        "log": st.booleans(),
        "int": st.booleans(),
        "step": NUMBERS.map(Plain),
        "as": st.sampled_from(["env:A", "--x={value}", "'", "{value}", ""]),
        "if": st.dictionaries(st.sampled_from("abc"), NUMBERS),
    },
)
KEYS = st.fixed_dictionaries(
    {"objective": st.just({"metric": "loss"})},
    optional={
        "parameters": st.dictionaries(st.sampled_from("abc"), PARAMETERS),
        "trials": st.integers(-1, 10),
        "sampler": st.sampled_from(["grid", "random", "sobol", "tpe", "cma-es", 1]),
        "pruner": st.sampled_from(["asha", "hyperband", None]),
        "repeat": st.integers(0, 3),
    },
)


def grid_of(**parameter):
    """A grid of one parameter, as data."""
    return {"objective": {"metric": "loss"}, "sampler": "grid", "parameters": {"a": parameter}}


@given(KEYS, st.floats(0, 1, exclude_max=True))
@example(grid_of(range=["0", "1"], step="0"), 0.0)
@example(grid_of(range=["0", "0"], step="0"), 0.0)
@example(grid_of(range=["0", "-1e999"], int=True), 0.0)
def test_any_data_are_a_sweep_or_problems(data, share):
    with contextlib.suppress(JobFileError):
        swept = file.from_data(Path("x"), data, Path()).sweep
        assert space.trials(swept) >= 0
        values = space.choose(swept.parameters, lambda _, one: space.at(one, share))
        arguments, env = space.passed(swept.parameters, values)
        assert len(arguments) + len(env) >= len(values)


@given(st.text())
def test_any_text_is_a_sweep_or_an_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "sweep.yaml"
    path.write_text(text, errors="replace")
    with pytest.raises(DeploykitError):
        file.read(path)
