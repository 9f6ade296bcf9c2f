"""The time left at half time, in runs of real libraries.

The files in `halves` were recorded on 2026-11-24: what the launcher logged of rank 0, and states of
its bar as `progress` in the run folder held them. Lines without numbers were taken out. Each script
trains a small network on a CPU for about a minute: three epochs of 100 steps of 0.15 s, the first
step takes 4 s as if it compiled, and an evaluation of 3 s follows each epoch. trl, deepspeed and
plain take 360 steps without one. transformers 5.23.0, trl 1.16.0, accelerate 1.15.0, lightning
2.6.6, fastai 2.8.12, keras 3.15.1, deepspeed 0.19.8; `pytorch-examples` prints the lines of
https://github.com/pytorch/examples/blob/main/mnist/main.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploykit.job.model import LogLine
from deploykit.observe import logfiles
from deploykit.observe.metrics import progress, series
from deploykit.observe.metrics.log_reader import LogReader
from deploykit.observe.metrics.progress import Length
from deploykit.observe.metrics.series import Collection

HALVES = Path(__file__).parent / "halves"
EPOCHS = Length(epochs=3, epochs_source="argument --epochs")
KNOWN = {
    "deepspeed": Length(total=360, total_source="argument --max-steps"),
    "fastai-nobar": EPOCHS,
    "lightning": EPOCHS,
    "pytorch-examples": EPOCHS,
    "transformers-nobar": EPOCHS,
}
"""Where the log does not tell how long the run will be, but an argument does."""
NAMES = sorted(path.stem for path in HALVES.glob("*.log"))


def lines(path):
    if not path.exists():
        return []
    return [logfiles.parse(line, 0) for line in path.read_bytes().decode().split("\n") if line]


def looked_at(name, part, *, watched):
    """What is known after a part of the time, and the seconds that were left then.

    `watched` is by a `watch` from the beginning; else by a first look then.
    """
    log, states = lines(HALVES / f"{name}.log"), lines(HALVES / f"{name}.progress")
    start, end = log[0].time, log[-1].time
    now = start + (end - start) * part
    said = [line for line in log if line.time <= now]
    states = [state for state in states if state.time <= now]
    said = sorted([*said, *states], key=lambda line: line.time) if watched else said + states[-1:]
    known = KNOWN.get(name, Length())
    reader, collection = LogReader({}, known.epochs), Collection()
    collection.add(reader.feed(said))
    found = progress.of(collection, reader, known, now.timestamp())
    return found, (end - now).total_seconds()


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_time_left_at_half_time(name, watched):
    """Within a tenth of what remains, which is stricter than a tenth of the whole."""
    found, left = looked_at(name, 0.5, watched=watched)
    assert found.left == pytest.approx(left, rel=0.1)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"accelerate", "transformers-nobar"}))
def test_the_time_left_later(name):
    """The other two logs do not tell where epochs end: an evaluation comes as news."""
    for part in (0.6, 0.75, 0.9):
        found, left = looked_at(name, part, watched=True)
        assert found.left == pytest.approx(left, abs=max(left * 0.1, 2)), part


def marks(*, epochs, each, step, evaluation, first):
    """Times and counts of a run that evaluates after each epoch."""
    time, found = 0.0, [(0.0, 0.0)]
    for number in range(1, epochs * each + 1):
        time += first if number == 1 else step
        found.append((time, float(number)))
        time += evaluation if number % each == 0 else 0.0
    return found, time


@pytest.mark.parametrize("evaluation", [0.0, 3.0, 30.0])
@pytest.mark.parametrize("at", [101, 150, 199, 200, 250])
def test_evaluations_that_are_yet_to_come_count(evaluation, at):
    run, end = marks(epochs=5, each=100, step=0.2, evaluation=evaluation, first=60)
    so_far = run[: at + 1]
    left = series.by_epochs(so_far, 500, 100)
    assert left == pytest.approx(end - so_far[-1][0])


def test_before_the_first_epoch_has_ended_an_evaluation_is_not_known():
    run, _ = marks(epochs=5, each=100, step=0.2, evaluation=3, first=60)
    assert series.by_epochs(run[:101], 500, 100) is None
    assert series.by_epochs([], 500, 100) is None


def test_thin_marks_give_the_pace_of_whole_epochs():
    run, _ = marks(epochs=5, each=100, step=0.2, evaluation=3, first=0.2)
    assert series.by_epochs(run[::100], 500, 100) is None
    assert series.rate(run[:301:100]) == pytest.approx(100 / 23)


def test_time_goes_on_between_two_steps_but_not_for_ever():
    said = [LogLine(f"step {number}/100", rank=0, time=moment(number * 10)) for number in (1, 2, 3)]
    reader, collection = LogReader(), Collection()
    collection.add(reader.feed(said))
    left = [progress.of(collection, reader, Length(), 30.0 + age).left for age in (-5, 0, 4, 500)]
    assert left == [970, 970, 966, 960]


def test_the_file_of_a_bar_may_be_older_than_the_log():
    bar = "  5%|5         | {}/100 [00:50<00:50,  1.00it/s]"
    at = [(50, 50, False), (49, 49.6, True)]
    reader = LogReader()
    list(
        reader.feed(
            LogLine(bar.format(step), rank=0, time=moment(time), bar=old) for step, time, old in at
        )
    )
    assert [one.reading.step for one in reader.bars.values()] == [50]


def moment(seconds):
    return datetime.fromtimestamp(seconds, UTC)
