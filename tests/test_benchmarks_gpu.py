"""`make gpu`: what it reads of the trainer, and the page that it writes."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

import pytest

from tests.nightly import few

GPU = Path(__file__).resolve().parent.parent / "benchmarks/gpu"


@pytest.fixture
def gpu(monkeypatch):
    """Its modules by name, which are imported from their folder."""
    monkeypatch.syspath_prepend(str(GPU))
    monkeypatch.syspath_prepend(str(GPU.parents[1] / "entrypoints"))
    import failures
    import measure
    import runs
    import sight

    yield {"failures": failures, "measure": measure, "runs": runs, "sight": sight}
    for name in ("measure", "runs", "failures", "sight"):
        sys.modules.pop(name, None)


def test_the_reason_of_a_failure_is_its_first_error(gpu):
    text = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 1, in <module>
[rank1]: torch.OutOfMemoryError: CUDA out of memory.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py
"""
    reason = gpu["runs"].reason
    assert reason(text) == "torch.OutOfMemoryError: CUDA out of memory."
    assert reason("train.py: error: --heads 2\n") == "train.py: error: --heads 2"
    assert reason("nothing") == "it failed without an error message"


def test_two_runs_differ_by_their_largest_difference_and_by_infinity_without_common_steps(gpu):
    result = gpu["runs"].Result
    one, other = result({1: 2.0, 2: 4.0}), result({1: 2.0, 2: 4.4, 3: 9.0})
    assert other.difference(one) == pytest.approx(0.1)
    assert result({}).difference(one) == float("inf")


@pytest.mark.torch
def test_a_small_run_on_the_cpu_is_read(gpu):
    runs, measure = gpu["runs"], gpu["measure"]
    machine = runs.machine(dry=True)
    found = runs.train(machine, measure.DRY.small, 1, "--strategy=single")
    assert found.error == ""
    assert sorted(found.losses) == [1, 2, 3, 4, 5, 6]
    assert found.tokens_per_second > 0
    assert found.memory > 0


@pytest.mark.torch
@pytest.mark.parametrize("strategy", few(["pp-tp", "pp-dp"], "pp-tp"))
def test_a_layout_that_needs_more_ranks_is_refused(gpu, strategy):
    runs, measure = gpu["runs"], gpu["measure"]
    machine = runs.machine(dry=True)
    refused = runs.train(machine, measure.DRY.small, 1, f"--strategy={strategy}")
    assert measure._REFUSED.search(refused.error)


@pytest.mark.torch
@pytest.mark.nightly
def test_what_the_verbs_show_is_read(gpu, tmp_path, monkeypatch):
    """On the CPU, the verbs must show all but the GPU."""
    monkeypatch.setattr(gpu["failures"], "HOME", tmp_path)
    machine = gpu["runs"].machine(dry=True)
    seen = list(gpu["sight"].seen(machine, gpu["measure"].DRY.gpt2))
    assert [(verb, problem) for verb, _, problem in seen] == [
        (verb, "") for verb in ("doctor", "watch", "dump", "profile", "report")
    ]
    shown = {verb: text for verb, text, _ in seen}
    assert "% CPU" in shown["watch"]
    assert "(train.py:" in shown["dump"]
    assert shown["profile"].startswith("CPU times: computing ")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (4, [("single", "1", "2.50"), ("dp", "1", "2.50"), ("manual", "4", "2.50")]),
        (1, [("single", "1", "2.50"), *((n, "1", "more GPUs needed") for n in ("dp", "manual"))]),
    ],
)
def test_data_parallel_is_one_process_with_the_batch_of_all_gpus(gpu, gpus, expected, monkeypatch):
    measure, started = gpu["measure"], []
    tokens = measure.REAL.gpt2.batch * gpus * measure.REAL.gpt2.sequence

    def train(machine, size, ranks, *words):
        started.append((ranks, *words[:2]))
        return gpu["runs"].Result({1: 2.0}, 2.5 * tokens, 2**30)

    monkeypatch.setattr(gpu["runs"], "train", train)
    machine = gpu["runs"].Machine(gpus, gpus, ())
    section = measure.replicas(machine, measure.REAL)
    assert [row[:3] for row in section.rows] == [*expected, ("ddp", str(gpus), "2.50")]
    assert {batch for _, _, batch in started} == {f"--batch-size={16 * gpus}"}
    assert (1, "--strategy=dp") in [one[:2] for one in started] or gpus == 1


def test_the_page_names_the_machine_and_what_failed(gpu):
    runs, measure = gpu["runs"], gpu["measure"]
    machine = runs.Machine(1, 1, ("1 x A GPU",), "A GPU")
    others = "Strategies, Options, Llama, Replicas, Tuning, Memory, Steps, Failures, Verbs"
    section = measure.Section(
        "Speed", "In bf16.", ("model", "rate"), [("a", "1")], ["b: no memory"]
    )
    assert measure.page(machine, [section], dt.date(2026, 11, 23)).splitlines()[4:] == [
        "Measured on 2026-11-23 with `make gpu`:",
        "",
        "* 1 x A GPU",
        "",
        f"Not measured here: {others}.",
        "",
        "## Speed",
        "",
        "In bf16.",
        "",
        "| model | rate |",
        "| --- | --- |",
        "| a | 1 |",
        "",
        "Failed: b: no memory",
    ]


def test_sections_that_are_not_measured_again_stay_in_their_place(gpu):
    runs, measure = gpu["runs"], gpu["measure"]
    machine, day = runs.Machine(1, 1, ("1 x A GPU",), "A GPU"), dt.date(2026, 11, 23)
    old = [measure.Section(one, "Old.", ("a",), [("1",)], []) for one in ("Strategies", "Speed")]
    new = [measure.Section(one, "New.", ("a",), [("2",)], []) for one in ("Verbs", "Strategies")]
    text = measure.page(machine, new, day, measure.page(machine, old, day))
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Strategies",
        "## Speed",
        "## Verbs",
    ]
    assert (text.count("New."), text.count("Old.")) == (2, 1)
