"""The benchmark of training loops: what it measures, refuses and reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def overhead(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import loop_overhead

    return loop_overhead


def samples(overhead, start=4.0, **more):
    """Of each loop, in three repeats beside the same reference; `start` is that of ours."""
    times = {"by_hand": [2.0, 3.0, 4.0], "with_lightning": [3.0, 4.5, 8.0], **more}
    return {
        name: [
            overhead.Sample(one, start if name == "ours" else 4.0, reference)
            for one, reference in zip(each, times["by_hand"], strict=True)
        ]
        for name, each in times.items()
    }


def test_ratios_are_those_of_the_same_repeat(overhead):
    found = {row["loop"]: row for row in overhead.rows(samples(overhead))}
    assert found["by_hand"]["ratio"] == 1
    assert found["with_lightning"] == {
        "loop": "with_lightning",
        "cpu_ms": 4.5,
        "cpu_ms_min": 3.0,
        "ratio": 1.5,
        "start_s": 4.0,
        "start_ratio": 1.0,
    }


@pytest.mark.parametrize(
    ("ours", "start", "told"),
    [
        ([2.1, 3.0, 4.0], 4.4, []),
        ([2.6, 3.9, 5.2], 4, ["ours takes 1.30 times as long as by_hand per step, more than 1.02"]),
        (
            [2.0, 3.0, 4.0],
            5,
            ["ours takes 1.25 times as long as by_hand to the first step, more than 1.10"],
        ),
        (
            [4.0, 6.0, 8.0],
            4,
            [
                "ours takes 2.00 times as long as by_hand per step, more than 1.02",
                "ours is not faster than with_lightning",
            ],
        ),
    ],
)
def test_a_missed_target_is_said(overhead, ours, start, told):
    assert overhead.missed(overhead.rows(samples(overhead, start, ours=ours))) == told


def test_the_reference_comes_first_and_every_framework_of_the_claim_is_there(overhead):
    names = overhead.loops()
    assert names[0] == "by_hand"
    peers = {"with_accelerate", "with_fastai", "with_lightning", "with_transformers"}
    assert peers <= set(names)
    assert not {"common", "turns"} & set(names)


def test_loops_take_turns_in_turning_order(overhead, monkeypatch):
    seen = []
    monkeypatch.setattr(
        overhead, "run", lambda name, *_: seen.append(name) or overhead.Sample(1.0, 1.0, 1.0)
    )
    found = overhead.measure(["a", "b", "c"], 3, Path(sys.executable), {})
    assert "".join(seen) == "abcbcacab"
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.xdist_group("frameworks")
def test_the_hand_written_loop_is_measured(overhead, capsys):
    argv = ["--only", "by_hand", "--repeats", "1", "--steps", "80", "--json"]
    assert overhead.main([*argv, "--python", sys.executable]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["loop"] == "by_hand"
    assert 0.1 < row["cpu_ms_min"] <= row["cpu_ms"] < 1000
    assert row["start_s"] > 100 * row["cpu_ms"] / 1000


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.xdist_group("frameworks")
def test_ours_takes_turns_with_the_hand_written_loop(overhead):
    env = overhead.environment(steps=80)
    sample = overhead.run(overhead.OURS, Path(sys.executable), env)
    assert min(sample.cpu_ms, sample.reference_ms) > 0.1
    assert sample.start_s > 100 * sample.cpu_ms / 1000


@pytest.mark.torch
@pytest.mark.xdist_group("frameworks")
def test_too_few_steps_are_no_figure(overhead, capsys):
    """The warm-up takes 50 steps, so of these nothing would be counted."""
    argv = ["--only", "by_hand", "--repeats", "1", "--steps", "20"]
    assert overhead.main([*argv, "--python", sys.executable]) == 2
    assert "measurement failed: by_hand exited with code 1" in capsys.readouterr().err
