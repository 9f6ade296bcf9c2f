"""Numbers in logs that real libraries printed: step, total, loss, pace and the time left.

The files in `logs` are what the launcher logged of rank 0 on 2026-11-23, of small networks on a CPU
that paused 60 ms in each batch; lines without numbers of the training were taken out. Each script
trained three epochs of 100 steps (Keras: 90; fastai too: its bar ends before its last state), but
`plain` and `deepspeed`. transformers 5.23.0, accelerate 1.15.0, tqdm 4.70.1, lightning 2.6.6,
fastai 2.8.12, keras 3.15.1, deepspeed 0.19.8; `pytorch-examples` prints the line of
https://github.com/pytorch/examples/blob/main/mnist/main.py.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploykit.cli import describe
from deploykit.job.model import LogLine
from deploykit.observe import logfiles
from deploykit.observe.metrics import progress
from deploykit.observe.metrics.log_reader import LogReader
from deploykit.observe.metrics.points import final_metrics
from deploykit.observe.metrics.progress import Length
from deploykit.observe.metrics.series import Collection, without_repeats

LOGS = Path(__file__).parent / "logs"
BY_ARGUMENT = Length(epochs=3, epochs_source="argument --epochs")
KNOWN = {"lightning-tqdm": BY_ARGUMENT, "pytorch-examples": BY_ARGUMENT}
"""Where the log does not tell how many epochs there will be."""
ENDS = {
    "transformers": ("tqdm", 300, 300, 3, 3.899),
    "accelerate": ("tqdm", 300, 300, 3, 0.4605),
    "lightning-tqdm": ("tqdm", 300, 300, 3, 0.108),
    "lightning-rich": ("Lightning", 300, 300, 3, 0.169),
    "fastai": ("fastprogress", 283, 300, 3, 0.0913),
    "keras": ("Keras", 270, 270, 3, 0.3636),
    "keras-nobar": ("Keras", 270, 270, 3, 0.4029),
    "deepspeed": ("DeepSpeed", 200, None, 1, None),
    "pytorch-examples": ("text", 1160, 1200, 3, 0.2353),
    "plain": ("text", 29, 100, None, 0.0345),
}
"""Format, step, total, epoch, loss at the end of each log."""
ONLY_EPOCHS = {
    "transformers-nobar": ("Hugging Face Trainer", 3.901),
    "accelerate-nobar": ("text", 0.4228),
    "fastai-nobar": ("fastai", 0.0938),
}
"""Format and loss of the logs that name no step."""


def lines(name):
    text = (LOGS / f"{name}.log").read_bytes().decode()
    return [logfiles.parse(line, 0) for line in text.split("\n") if line]


def read(found, known=Length()):  # noqa: B008 - it is not changed
    reader, collection = LogReader({}, known.epochs), Collection()
    collection.add(reader.feed(found))
    return progress.of(collection, reader, known), collection


def plain(*texts, rank=0):
    return [LogLine(text, rank=rank) for text in texts]


def test_every_log_is_looked_at():
    assert {path.stem for path in LOGS.glob("*.log")} == {*ENDS, *ONLY_EPOCHS}


@pytest.mark.parametrize("name", ENDS)
def test_where_a_run_is_at_the_end_of_its_log(name):
    form, step, total, epoch, loss = ENDS[name]
    found, _ = read(lines(name), KNOWN.get(name, Length()))
    assert (found.step, found.total, found.epoch) == (step, total, epoch)
    assert found.sources["step"] == f"log ({form})"
    assert found.loss == (None if loss is None else pytest.approx(loss, rel=1e-3))


@pytest.mark.parametrize("name", ONLY_EPOCHS)
def test_a_log_that_names_epochs_alone(name):
    form, loss = ONLY_EPOCHS[name]
    found, _ = read(lines(name), BY_ARGUMENT)
    assert (found.step, found.epoch, found.epochs) == (None, 3, 3)
    assert found.sources["epoch"] == f"log ({form})"
    assert found.loss == pytest.approx(loss, rel=1e-3)
    assert found.left == 0


PACES = {name: 300 for name in ENDS if name not in {"deepspeed", "plain"}} | {"plain": 29}


@pytest.mark.parametrize("name", sorted(set(PACES) - {"lightning-rich"}))
def test_the_pace_is_that_of_the_clock(name):
    """Steps by time over the second half; a machine with other work is not steady."""
    found, _ = read(lines(name), KNOWN.get(name, Length()))
    timed = [line for line in lines(name) if line.time and read([line])[0].step is not None]
    seconds = (timed[-1].time - timed[0].time).total_seconds()
    first = read(timed[:1], KNOWN.get(name, Length()))[0].step
    assert found.rate == pytest.approx((found.step - first) / seconds, rel=0.25)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("deepspeed", "RunningAvgSamplesPerSec"),
        ("transformers", "train_samples_per_second"),
        ("keras", None),
    ],
)
def test_samples_a_second(name, metric):
    found, collection = read(lines(name))
    values = {one.name: one.last.value for one in collection.series.values()}
    assert found.throughput == ((metric, values[metric]) if metric else None)


def test_every_number_of_a_log_has_its_name_and_step():
    _, collection = read(lines("keras"))
    assert {name for _, name in collection.series} == {
        *("accuracy", "loss", "val_accuracy", "val_loss")
    }
    _, collection = read(lines("deepspeed"))
    skipped = collection.series["log (DeepSpeed)", "skipped"]
    assert (skipped.count, skipped.last.step, skipped.greatest) == (21, 200, 0)
    _, collection = read(lines("transformers"))
    evaluations = collection.series["log (Hugging Face Trainer)", "eval_loss"]
    assert (evaluations.count, evaluations.last.value, evaluations.last.epoch) == (3, 3.906, 3)


LINES = {
    "iter 100: loss 3.2012, time 120.30ms, mfu 1.20%": (100, None, {"loss": 3.2012, "mfu": 1.2}),
    "step 250: train loss 2.5, val loss 2.6": (250, None, {"train_loss": 2.5, "val_loss": 2.6}),
    "loss=0.5 step 10/100": (10, 100, {"loss": 0.5}),
    "Step: 4/10": (4, 10, {}),
    "global step=7": (7, None, {}),
    "iteration 5,": (5, None, {}),
    "[00:01<00:02] batch 3/9 lr=0.1": (3, 9, {"lr": 0.1}),
    " iteration       10/   100 | learning rate: 1.5E-05 | lm loss: 1.0E+01 | loss scale: 1.0 |": (
        *(10, 100),
        {"learning_rate": 1.5e-05, "lm_loss": 10.0, "loss_scale": 1.0},
    ),
    '{"epoch": 1, "step": 3, "loss": "5.2", "name": "x"}': (3, None, {"loss": 5.2}),
    "\x1b[31mstep:  1  \x1b[32mloss:  8.1  memory:  1.00GiB(2%)  tps: 100\x1b[0m": (
        *(1, None),
        {"loss": 8.1, "tps": 100},
    ),
    "12:00 | INFO | __main__:main:7 - step 2 loss: 0.5": (2, None, {"loss": 0.5}),
    "[src/train.py:42] step 2 loss=0.5": (2, None, {"loss": 0.5}),
    "step 2 train:loss:0.5 - lr=1": (2, None, {"loss": 0.5, "lr": 1}),
    "step 3 loss nan": (3, None, {"loss": "nan"}),
    "test accuracy 0.9 (360 images)": (None, None, {"test_accuracy": 0.9}),
    "[0/25][50/1583] Loss_D: 1.4 Loss_G: 0.6 D(x): 0.5 D(G(z)): 0.4 / 0.3": (
        *(50, 25 * 1583),
        {"Loss_D": 1.4, "Loss_G": 0.6},
    ),
    "Episode 10\tLast reward: 9.00\tAverage reward: 15.80": (
        *(10, None),
        {"Last_reward": 9.0, "Average_reward": 15.8},
    ),
    "Episode: 3/500, score: 21": (3, 500, {"score": 21.0}),
    "episode 3 step 40 reward 0.5": (40, None, {"reward": 0.5}),
}
"""Lines as scripts print them: step, total, metrics."""


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_text(line):
    step, total, values = LINES[line]
    reader = LogReader()
    points = list(reader.feed(plain(line)))
    assert {one.name: one.value if one.value == one.value else "nan" for one in points} == values
    if step is not None:
        assert (reader.step.reading.step, reader.step.reading.total) == (step, total)


NOTHING = [
    *("footstep 12; 12 steps", "global batch 64, strategy ddp", "Steps: 32", "", "epochs=3"),
    *("learning_rate=0.001, batch_size=64", "loaded 5 of 10 shards in 3 s", "max_iter=100"),
    *("Traceback: line 10, in train", "step 1.5.2 of the guide", "eval step 3/20", "lr 12:30:00"),
    *("Map: 100%|█████| 12/12 [00:01<00:00, 9.5it/s]", "Loading: 1%|█ | 1/99 [00:01<00:99, 1s/it]"),
]


@pytest.mark.parametrize("line", NOTHING)
def test_a_line_without_numbers_of_the_training(line):
    found, collection = read(plain(line))
    assert not found
    assert not collection.series


def test_an_evaluation_is_not_the_training():
    found, _ = read(
        plain(
            " 50%|█████     | 50/100 [10:00<10:00, 12.00s/it]",
            " 40%|████      | 4/10 [00:04<00:06,  1.00it/s]",
        )
    )
    assert (found.step, found.total, found.left) == (50, 100, 600)
    assert found.rate == pytest.approx(1 / 12)


def test_a_bar_for_each_epoch_counts_on():
    bar = "{0}%|###  | {0}/100 [00:10<00:10, 5.00it/s]"
    found, _ = read(plain(*(bar.format(step) for step in (0, 50, 100, 0, 30))))
    assert (found.step, found.total) == (130, None)


@pytest.mark.parametrize(
    ("form", "step", "total"),
    [
        ("Epoch [{epoch}/5], Step [{within}/100], Loss: 0.5", 210, 500),
        ("Epoch [{epoch}/5], Step [{whole}/500], Loss: 0.5", 210, 500),
        ("epoch {epoch} step {within} loss 0.5", 200, None),
        ("epoch {epoch} step {whole} loss 0.5", 210, None),
    ],
)
def test_steps_within_an_epoch_and_of_the_whole_run(form, step, total):
    """A line with both does not say which; the next epoch does. 10, 20, ... 100 in each."""
    said = [
        form.format(epoch=epoch, within=within, whole=(epoch - 1) * 100 + within)
        for epoch in (1, 2)
        for within in range(10, 101, 10)
    ]
    last = form.format(epoch=3, within=10, whole=210)
    found, _ = read(plain(*said, last))
    assert (found.step, found.total) == (step + 10 * (step == 200), total)


def test_the_lowest_rank_with_numbers_is_read():
    said = [
        *plain("step 1 loss 9", rank=3),
        *plain("step 5 loss 1", rank=1),
        *plain("step 7 loss 9", rank=2),
        *plain("no numbers", rank=0),
    ]
    found, collection = read(said)
    assert (found.step, found.loss) == (5, 1)
    (series,) = collection.series.values()
    assert (series.count, series.greatest) == (1, 1)
    assert [point.value for point in without_repeats(LogReader().feed(said))] == [1]


@pytest.mark.parametrize(
    "titles",
    [("Pretrain [{}/2]", "Probe [{}/2]"), ("Epoch {}/2", "Epoch {}/2")],
    ids=["pretraining and probe", "folds"],
)
def test_a_second_loop_over_epochs_does_not_replace_the_first(titles):
    bar = ": {0}%|###| {0}/100 [00:01<00:00, 20.00it/s, loss=0.5]"
    said = [
        (title + bar.replace("{0}", str(step))).format(epoch)
        for title in titles
        for epoch in (1, 2)
        for step in (1, 100)
    ]
    points = without_repeats(LogReader().feed(plain(*said)))
    assert [point.step for point in points] == [1, 100, 101, 200, 201, 300, 301, 400]


def test_a_restart_begins_anew_and_its_points_have_its_number():
    again = LogLine("restart 1: it was preempted", node=0)
    reader = LogReader()
    said = [*plain("step 1 loss 3", "step 60 loss 2"), again, *plain("step 51 loss 1")]
    points = list(reader.feed(said))
    assert [(one.attempt, one.step) for one in points] == [(0, 1), (0, 60), (1, 51)]
    assert reader.step.reading.step == 51


def test_epochs_from_0_are_counted_so_after_a_restart_too():
    reader = LogReader()
    texts = ["epoch 0 loss 3", "epoch 1 loss 2"], ["epoch 1 loss 2", "epoch 2 loss 1"]
    said = [*plain(*texts[0]), LogLine("restart 1: it was preempted", node=0), *plain(*texts[1])]
    assert [point.epoch for point in reader.feed(said)] == [1, 2, 2, 3]


def test_patterns_of_the_job_file_come_first():
    reader = LogReader({"loss": r"lost (\S+)", "step": r"#(\d+)", "total": r"of (\d+)"})
    points = list(reader.feed(plain("round #12 of 90: lost 1,234.5 loss=7")))
    assert [(one.name, one.value, one.step) for one in points] == [("loss", 1234.5, 12)]
    assert points[0].source == "log (metrics in the job file)"
    assert reader.step.reading.total == 90


PIECES = st.sampled_from(
    [
        *(
            "step ",
            "epoch ",
            "loss=",
            "nan",
            "1e999",
            "9" * 400,
            "0",
            "-1",
            "/",
            "[",
            "]",
            "%|",
            "| ",
        ),
        *("12/30 [00:01<00:02, 0.0it/s]", "{'loss': '", "'epoch': ", " - ", "━", "•", "\r", "1/0 "),
        *(
            "Epoch 1/3 ",
            "restart 2",
            "\udcff",
            "٣",
            "1" * 5000,
            ": ",
            ", ",
            "inf",
            "1e-320",
            "s/it",
        ),
    ]
)


@given(said=st.lists(st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join), max_size=8))
def test_any_text_is_read_and_can_be_shown(said):
    found, collection = read(plain(*said), BY_ARGUMENT)
    json.dumps(describe.data(found), allow_nan=False)
    describe.line(found)
    assert all(one.count for one in collection.series.values())


@pytest.mark.parametrize(
    "line",
    [
        "[INFO|trainer.py:2520] >>   Total optimization steps = 1,200",
        "2 rank(s) on cpu, global batch 64, strategy ddp, 1200 steps",
    ],
)
def test_a_log_that_tells_its_length_first(line):
    found, _ = read(plain(line, "step 300 loss 1"))
    assert (found.step, found.total, found.sources["total"]) == (300, 1200, "log")


def test_lengths_in_arguments():
    assert progress.length_of(["--max-steps", "500", "--trainer.max_epochs=3"]) == Length(
        *(500, "argument --max-steps", 3, "argument --trainer.max_epochs")
    )
    assert progress.length_of(["-epochs", "0", "--steps", "x", "epochs", "--iters"]) == Length()
    assert progress.length_of(["optim.epochs=5"]).epochs == 5
    assert progress.length_of([]) == Length()


def test_what_sagemaker_extracted():
    when = datetime(2026, 11, 23, tzinfo=UTC)
    listed = [
        {"MetricName": "test:accuracy", "Value": 0.5, "Timestamp": when},
        {"MetricName": "loss", "Value": 2},
        {"MetricName": "odd", "Value": "x"},
        *("text", None, {"Value": 1}),
    ]
    assert [(p.name, p.value, p.time) for p in final_metrics(listed)] == [
        *(("test:accuracy", 0.5, when.timestamp()), ("loss", 2.0, None))
    ]
    assert list(final_metrics(None)) == []
