"""Which values a tracker gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.observe.metrics.points import Point
from deploykit.observe.trackers import mlflow
from deploykit.observe.trackers.contract import About, Registration, Selection


def due(points, sent=None, *, final=True, clean=str):
    chosen = Selection(clean)
    chosen.add(points)
    return [(one.name, one.step, one.value) for one in chosen.due(sent or {}, final=final)]


def points(*steps, name="loss", source="output/metrics.jsonl"):
    return [Point(name, float(step), step, source=source) for step in steps]


def test_the_newest_step_waits_for_the_next_one_or_the_end():
    assert due(points(1, 2, 3), final=False) == [("loss", 1, 1.0), ("loss", 2, 2.0)]
    assert len(due(points(1, 2, 3))) == 3


def test_what_was_sent_is_not_sent_again():
    assert due(points(1, 2, 3), {"loss": 2}) == [("loss", 3, 3.0)]
    assert due(points(1, 2, 3), {"loss": 3}) == []


def test_steps_that_a_restart_repeats_come_once_with_the_later_value():
    first = points(1, 2, 3, 4)
    again = [Point("loss", 9.0, step, source="output/metrics.jsonl") for step in (3, 4, 5)]
    found = due([*first, *again])
    assert [step for _, step, _ in found] == [1, 2, 3, 4, 5]
    assert [value for _, _, value in found] == [1, 2, 9, 9, 9]
    assert due([*first, *again], {"loss": 3}) == [("loss", 4, 9.0), ("loss", 5, 9.0)]


def test_a_file_comes_before_the_log_and_that_before_a_service():
    log = points(1, 5, source="log (text)")
    assert due([*log, *points(1, 2)]) == [("loss", 1, 1.0), ("loss", 2, 2.0)]
    service = [Point("loss", 7.0, source="SageMaker (FinalMetricDataList)")]
    assert due([*service, *log]) == due(log)
    assert due(service) == [("loss", 0, 7.0)]
    assert due(log) == [("loss", 1, 1.0), ("loss", 5, 5.0)]


def test_values_are_in_ascending_steps_over_all_metrics():
    found = due([*points(1, 4), *points(2, 3, name="acc")])
    assert [step for _, step, _ in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [((1.0, 2.0, 3.0), [1, 2, 3]), ((0.5, 1.0, 1.5), [0, 1, 2]), ((None, None, None), [0, 1, 2])],
)
def test_without_steps_the_epoch_or_the_number_of_the_value_counts(epochs, steps):
    given = [Point("acc", 1.0, epoch=epoch, source="log (text)") for epoch in epochs]
    assert [step for _, step, _ in due(given)] == steps


def test_names_that_become_the_same_are_one_metric_of_one_source():
    given = [*points(1, 2, name="a@1"), *points(1, 2, 3, name="a#1")]
    found = due(given, clean=lambda name: name.replace("@", "_").replace("#", "_"))
    assert found == [("a_1", 1, 1.0), ("a_1", 2, 2.0), ("a_1", 3, 3.0)]


def test_what_was_forgotten_is_gone_and_the_rest_goes_on():
    chosen = Selection(str)
    chosen.add(points(1, 2, 3))
    chosen.forget({"loss": 2})
    chosen.add(points(4))
    assert [one.step for one in chosen.due({}, final=True)] == [3, 4]


def test_a_version_in_mlflow_has_the_numbers_of_the_evaluation():
    tracker = mlflow.make("http://nowhere", About("a", "job", Path(), 1.0, {}, {}), {})
    metrics = {"loss": 0.1, "evaluation accuracy": 0.75}  # those of the run are in MLflow already
    model = Registration("m", Path(), "f" * 64, "", {"run": "a"}, metrics)
    tags = tracker.registration(model)["model-versions/create"]["tags"]
    assert {"key": "deploykit.evaluation accuracy", "value": "0.75"} in tags
    assert not any("loss" in tag["key"] for tag in tags)
