"""Every strategy trains like one process: the same losses, gradients and weights, on 4 ranks.

A new strategy is a new row of `STRATEGIES`. The measured differences are printed (`pytest -s`);
docs/explanation/strategies.md lists them.
"""

import re
import sys

import pytest
import torch

from tests.nightly import few
from tests.trainer import ranks
from tests.trainer.rank_pool import RankPool, write_help_topics
from tests.trainer.ranks import train
from trainer.parallel.layout import Layout
from trainer.parallel.process_group import DistributedContext

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

STRATEGIES = {
    "ddp": (),
    "manual": (),
    "zero1": (),
    "zero2": (),
    "zero3": (),
    "hsdp": ("--shard-ranks", "2"),
    "tp": (),
    "tp-dp": ("--tensor-parallel", "2"),
    "fsdp-tp": ("--tensor-parallel", "2"),
    "pp": ("--micro-batches", "4"),
    "pp-dp": ("--micro-batches", "2"),
    "pp-fsdp": ("--micro-batches", "2"),
    "pp-tp": ("--micro-batches", "2"),
}
"""Name to options, which spread a model over four ranks."""

TASKS = ("digits", "text")
PAIRS = [(strategy, task) for strategy in STRATEGIES for task in TASKS]
EACH_KIND = (("ddp", "digits"), ("zero3", "text"), ("tp", "text"), ("pp-dp", "digits"))
"""In single precision the others are for the night: in double precision all strategies run."""
EXACTLY = [(strategy, "text") for strategy in STRATEGIES]
EXACTLY += [(strategy, "digits") for strategy in ("ddp", "zero3", "fsdp-tp", "pp-dp")]

THREE = {
    "hsdp-tp": ("--tensor-parallel", "2", "--shard-ranks", "2"),
    "pp-fsdp-tp": (),
    "pp-hsdp-tp": ("--shard-ranks", "1", "--sequence-parallel", "--loss-parallel"),
}
"""Three dimensions and more, on eight ranks."""

ALSO = {
    "offload": ("zero3", "--offload"),
    "offload-2": ("zero2", "--offload"),
    "sequence": ("tp", "--sequence-parallel"),
    "sequence-dp": ("tp-dp", "--tensor-parallel", "2", "--sequence-parallel"),
    "sequence-fsdp": ("fsdp-tp", "--tensor-parallel", "2", "--sequence-parallel"),
    "sequence-pp": ("pp-tp", "--sequence-parallel"),
    "loss-tp": ("tp", "--loss-parallel"),
    "loss-fsdp": ("fsdp-tp", "--tensor-parallel", "2", "--sequence-parallel", "--loss-parallel"),
    "loss-pp": ("pp-tp", "--sequence-parallel", "--loss-parallel"),
    "selective": ("zero3", "--checkpoint-activations", "selective"),
    "selective-tp": ("tp", "--checkpoint-activations", "selective"),
    "each-ddp": ("ddp", "--reduce-each"),
    "each-zero3": ("zero3", "--reduce-each"),
    "each-hsdp": ("hsdp", "--shard-ranks", "2", "--reduce-each"),
    "static-graph": ("ddp", "--static-graph"),
    "static-each": ("ddp", "--static-graph", "--reduce-each"),
    "buckets": ("ddp", "--bucket-mb", "1"),
    "fused-zero1": ("zero1", "--optimizer-implementation", "fused"),
    "fused-fsdp-tp": (
        *("fsdp-tp", "--tensor-parallel", "2"),
        *("--optimizer-implementation", "fused"),
    ),
    "context-ddp": ("ddp", "--context-parallel", "4"),
    "context-manual": ("manual", "--context-parallel", "2"),
    "context-zero1": ("zero1", "--context-parallel", "2"),
    "context-zero2": ("zero2", "--context-parallel", "4"),
    "context-zero3": ("zero3", "--context-parallel", "2"),
    "context-hsdp": ("hsdp", "--context-parallel", "2", "--shard-ranks", "1"),
    "context-tp": ("tp-dp", "--context-parallel", "2", "--tensor-parallel", "2"),
    "context-sequence": (
        *("fsdp-tp", "--context-parallel", "2", "--tensor-parallel", "2"),
        *("--sequence-parallel", "--loss-parallel"),
    ),
    "context-selective": (
        *("zero3", "--context-parallel", "4", "--checkpoint-activations", "selective"),
    ),
}
"""More ways to spread the model of the task "text"."""

ONE_OF_EACH = (
    *("offload", "sequence-fsdp", "loss-pp", "selective-tp", "each-hsdp", "static-each", "buckets"),
    *("fused-fsdp-tp", "context-ddp", "context-sequence", "context-selective"),
)
"""The others are for the night."""

REFUSED = {
    "--strategy hsdp --shard-ranks 3": "does not divide the 4 ranks: use one of 1, 2, 4",
    "--strategy tp --tensor-parallel 2": "remove that option, or choose tp-dp or fsdp-tp",
    "--strategy fsdp-tp --tensor-parallel 3": "hidden size 64 cannot be divided by 3 ranks",
    "--strategy tp-dp --tensor-parallel 8": "does not divide the 4 ranks: use one of 1, 2, 4",
    "--strategy tp --task text --heads 2": "--heads 2 cannot be divided by 4 ranks",
    "--strategy tp --sequence-parallel": "choose --task text, or remove the option",
    "--strategy tp --task text --sequence-parallel --sequence 30": "choose --sequence 32",
    "--strategy zero1 --static-graph --micro-batches 2": "or add --reduce-each",
    "--strategy zero1 --compress bf16": "fp16 works with gloo",
    "--strategy tp --loss-parallel": "choose --task text, or remove the option",
    "--strategy pp-tp --pipeline-parallel 4": "sizes of at least 2 whose product is 4, or start 4",
    "--strategy pp-fsdp-tp --pipeline-parallel 3": "product divides 4, or start 8 ranks",
    "--strategy zero3 --context-parallel 3 --task text": "divide the 4 ranks: use one of 1, 2, 4",
    "--strategy ddp --context-parallel 4 --task text --sequence 30": "choose --sequence 32",
    "--strategy ddp --context-parallel 2": "requires a sequence: choose --task text",
    "--strategy ddp --context-parallel 2 --task text --compile": "remove one of them",
    "--strategy hsdp --context-parallel 2 --shard-ranks 4 --task text": "left after 2 for cp: use",
    "--strategy hsdp-tp --shard-ranks 3": "the 2 ranks left after 2 for tp: use one of 1, 2",
    "--strategy pp --pipeline-parallel 2": "remove that option, or use pp-dp for several",
    "--strategy pp --micro-batches 2": "of at least 4, the number of stages, not 2",
    "--strategy pp --micro-batches 6 --schedule interleaved": "a multiple of 4, the ranks",
    "--strategy pp --micro-batches 8 --stages-per-rank 2": "only interleaved has several stages",
    "--strategy pp --schedule interleaved --stages-per-rank 1 --micro-batches 4": "at least 2",
    "--strategy pp-dp --pipeline-parallel 3 --micro-batches 4": ": use 2",
    "--strategy pp-fsdp --pipeline-parallel 4 --micro-batches 4": ": use 2",
    "--batch-size 66": "--batch-size 66 must be a multiple of 4: 4 data shard(s) times 1",
    "--strategy pp-dp --micro-batches 4 --batch-size 12": "must be a multiple of 8: 2 data shard",
}
"""Options that do not fit four ranks on CPUs, and a part of the message."""

MISPLACED = {
    "--strategy ddp --offload": "zero2 or zero3 or fsdp or hsdp or tp-dp or fsdp-tp or hsdp-tp",
    "--strategy zero3 --compress fp16": "--compress requires --strategy ddp or zero1, not",
    "--strategy zero3 --shard-ranks 2": "requires --strategy hsdp or hsdp-tp or pp-hsdp-tp, not",
    "--strategy hsdp --shard-ranks 0": "--shard-ranks must be at least 1",
    "--strategy ddp --sequence-parallel": "requires --strategy tp or tp-dp or fsdp-tp",
    "--strategy pp-dp --context-parallel 2": "--context-parallel requires --strategy ddp or manual",
    "--strategy tp --context-parallel 2": "zero1 or zero2 or zero3 or fsdp or hsdp or tp-dp or",
    "--strategy ddp --schedule gpipe": "--schedule requires --strategy pp or pp-dp or pp-fsdp or",
    "--strategy tp --precision float8": "--precision float8 requires --strategy single or",
    "--strategy pp --precision float8": "--precision float8 requires --strategy single or",
    "--strategy hsdp-tp --precision float8": "--precision float8 requires --strategy single or",
    "--strategy manual --reduce-each": "--reduce-each requires --strategy ddp or zero1 or zero2",
}
"""Options of other strategies, and a part of the message."""

FEW = ("--steps", "4")
"""Enough where an error would show in the first step. A step of tp takes 0.15 s per rank."""
COMPRESSING = ("--steps", "12")
"""PowerSGD compresses nothing in the first 10."""
FEATURES = ("--micro-batches", "2", "--clip", "0.5", "--checkpoint-activations")
ADAMW = ("--optimizer", "adamw", "--lr", "0.001")

LOSS = 1e-6
"""Of the loss at any of 50 steps: single precision, summed in another order."""
WEIGHTS = 1e-6
"""Of any weight after them. Digits with a learning rate of 0.05 leave 2e-4: in that model's ReLUs
and maxima rounding decides now and then where one sample's gradient goes, and large steps keep it.
"""
NORM = 1e-5
"""Of a gradient's norm, relative to it."""
EXACT = 1e-10
"""The same of all three in double precision, a millionth of what single precision leaves."""

HALVES = {"bf16": 2e-3, "fp16": 2e-4}
"""Of the loss: a rounding step is 2**-8 and 2**-11 of a value, and partial sums are rounded too."""
COMPRESSED = {"fp16": 1e-4, "powersgd": 1.0}
"""Of the loss: fp16 rounds each gradient to 11 bits, PowerSGD keeps 4 of a matrix's directions."""


@pytest.fixture(scope="class")
def eight(tmp_path_factory):
    pool = RankPool(8, tmp_path_factory.mktemp("8-ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Options of 50 steps of each task."""
    folder = write_help_topics(tmp_path_factory.mktemp("tasks") / "text", 24_000)
    model = ("--layers", "2", "--width", "32", "--heads", "4", "--sequence", "32")
    common = ("--steps", "50", "--epochs", "9", "--log-every", "1", "--no-tensorboard")
    return {
        "digits": (*common, "--task", "digits", "--batch-size", "48", "--lr", "0.01"),
        "text": (*common, "--task", "text", "--batch-size", "16", "--text", str(folder), *model),
    }


@pytest.fixture
def alone(once, tasks):
    """The folder of a run of one process."""

    def folder(task, *options, double=False):
        return once(1, *tasks[task], "--strategy", "single", *options, double=double)

    return folder


@pytest.fixture
def differences(four, alone, tasks, tmp_path):
    """How far a run on four ranks is from that of one process, with the same options but `ways`:
    the largest difference of a loss, of a weight at the end, and of a gradient's norm (relative).
    """

    def measure(task, strategy, ways, *options, double=False, pool=four):
        given = (*tasks[task], "--strategy", strategy, *options, *ways)
        pool.train(tmp_path, *given, double=double)
        reference = alone(task, *options, double=double)
        norms = logged(reference, "gradient_norm")
        found = (
            largest(logged(tmp_path, "loss") - logged(reference, "loss")),
            largest(ranks.weights(tmp_path) - ranks.weights(reference)),
            largest((logged(tmp_path, "gradient_norm") - norms) / norms),
        )
        words = (task, strategy, *ways, *options, *(f"{value:.1e}" for value in found))
        sys.stdout.write(f"MEASURED {' '.join(words)}\n")
        return found

    return measure


def logged(folder, name):
    values = [line[name] for line in ranks.lines(folder) if name in line]
    assert len(values) in (4, 12, 50)
    return torch.tensor(values, dtype=torch.float64)


def largest(values):
    return values.abs().max().item()


@pytest.mark.parametrize(("strategy", "task"), few(PAIRS, *EACH_KIND))
def test_results_are_those_of_one_process(strategy, task, differences):
    loss, weight, norm = differences(task, strategy, STRATEGIES[strategy], "--optimizer", "sgd")

    assert loss < LOSS
    assert weight < WEIGHTS
    assert norm < NORM


@pytest.mark.parametrize(("strategy", "task"), few(PAIRS, *EXACTLY))
def test_results_agree_to_the_last_digits_in_double_precision(strategy, task, differences):
    """Double precision, with micro-batches, clipping, activation checkpointing, and AdamW, which
    turns the rounding of a tiny gradient into a large part of a step.
    """
    ways = STRATEGIES[strategy]
    assert max(differences(task, strategy, ways, *FEATURES, *ADAMW, *FEW, double=True)) < EXACT


@pytest.mark.parametrize("name", few(ALSO, *ONE_OF_EACH))
def test_options_agree_to_the_last_digits_in_double_precision(name, differences):
    strategy, *ways = ALSO[name]
    options = FEATURES if name != "static-graph" else ()
    assert max(differences("text", strategy, ways, *options, *ADAMW, *FEW, double=True)) < EXACT


@pytest.mark.parametrize("strategy", ["tp", "tp-dp", "fsdp-tp", "hsdp-tp"])
def test_one_rank_has_whole_tensors(strategy, differences, pools):
    """As where a job of several GPUs is tried on one: the options stay as they are."""
    ways = ("--sequence-parallel", "--loss-parallel")
    assert max(differences("text", strategy, ways, *FEW, double=True, pool=pools[1])) < EXACT


class TestThreeDimensions:
    """On eight ranks, which end with these tests: ranks that wait take time from others."""

    @pytest.mark.parametrize("strategy", few(THREE, "pp-hsdp-tp"))
    def test_results_agree_to_the_last_digits(self, strategy, differences, eight):
        """In double precision, as above."""
        found = differences(
            "text", strategy, THREE[strategy], *FEATURES, *ADAMW, *FEW, double=True, pool=eight
        )
        assert max(found) < EXACT


@pytest.mark.parametrize(
    ("strategy", "precision"),
    few(
        [(strategy, precision) for strategy in STRATEGIES for precision in HALVES],
        *(("ddp", "bf16"), ("zero3", "bf16"), ("zero3", "fp16"), ("tp", "bf16"), ("pp-dp", "fp16")),
    ),
)
def test_half_precision_is_used_and_rounds_as_in_one_process(
    strategy, precision, differences, alone
):
    options = ("--optimizer", "sgd", *FEW, "--precision", precision)
    loss, *_ = differences("text", strategy, STRATEGIES[strategy], *options)
    full = logged(alone("text", "--optimizer", "sgd", *FEW), "loss")

    assert loss < HALVES[precision]
    assert largest(logged(alone("text", *options), "loss") - full) > LOSS


@pytest.mark.parametrize("how", COMPRESSED)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_compressed_gradients_train(strategy, how, differences):
    ways = ("--compress", how)
    loss, *_ = differences("text", strategy, ways, "--optimizer", "sgd", *COMPRESSING)

    assert LOSS < loss < COMPRESSED[how]


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")  # torch's own import
@pytest.mark.parametrize("arguments", REFUSED)
def test_invalid_combinations_are_refused_with_a_valid_one(arguments):
    with pytest.raises(ValueError, match=re.escape(REFUSED[arguments])):
        Layout(train.parse(arguments.split()), DistributedContext(0, 4, torch.device("cpu")))


@pytest.mark.parametrize("arguments", MISPLACED)
def test_options_of_other_strategies_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        train.parse(arguments.split())

    assert MISPLACED[arguments] in capsys.readouterr().err
