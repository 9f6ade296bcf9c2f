"""Answers of a tracker's server are used or refused."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deploykit.lib.errors import DeploykitError
from deploykit.observe.trackers.contract import About
from deploykit.observe.trackers.mlflow import MLflow

ABOUT = About("one", "job", Path("/nowhere"), 1.0, {"--lr": "0.1"}, {"backend": "local"})
NAMES = ["run", "runs", "info", "data", "metrics", "key", "step", "run_id", "experiment_id"]
NAMES += ["experiment", "status", "lifecycle_stage", "sizes", "sent", "uploaded", "id"]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(NAMES), one),
    max_leaves=12,
)
RUN = st.fixed_dictionaries({"run": st.fixed_dictionaries({"info": ANY, "data": ANY})})
MEMORY = st.dictionaries(st.sampled_from(NAMES), ANY)


class Answers:
    """A client whose server answers with anything."""

    def __init__(self, answers):
        self._answers = iter(answers)

    def get(self, *_, **__):
        return next(self._answers, {})

    post = get


@given(st.lists(ANY | RUN, max_size=6), MEMORY)
def test_any_answer_is_used_or_refused(answers, memory):
    tracker = MLflow(Answers(answers), "http://host", ABOUT, memory)
    try:
        steps = tracker.begin()
    except DeploykitError:
        return
    assert all(isinstance(step, int) for step in steps.values())
