"""The models of examples/models, and the strategies that they are trained with.

A pool of ranks in the environment that has transformers, torchvision and peft trains them.
"""

from __future__ import annotations

from typing import ClassVar

from tests.frameworks.people import PYTHON, ROOT
from tests.trainer import rank_pool, ranks

SGD = ("--optimizer", "sgd", "--batch-size", "16", "--log-every", "1", "--epochs", "99")
FAST = (*SGD, "--lr", "0.1")

LAYOUTS = (
    "4 ddp",
    "4 zero1",
    "4 zero2",
    "4 zero3",
    "4 hsdp --shard-ranks 2",
    "4 tp",
    "4 tp-dp --tensor-parallel 2",
    "4 fsdp-tp --tensor-parallel 2",
    "8 hsdp-tp --tensor-parallel 2 --shard-ranks 2",
    "4 pp --micro-batches 4",
    "4 pp-dp --micro-batches 2",
    "4 pp-fsdp --micro-batches 2",
    "4 pp-tp --micro-batches 2",
    "8 pp-fsdp-tp --micro-batches 2",
)
"""Number of ranks, strategy and its options."""


def options(name, images):
    """The options of a model by its name here; `images` is a folder that `write_images` made."""
    language = ("--task", "language_model:task", *SGD, "--lr", "0.03", "--task-option")
    return {
        "Llama": (*language, "family=llama"),
        "GPT-2": (*language, "family=gpt2"),
        "ResNet-18": (
            *("--task", "image_classifier:task", "--task-option", f"data={images}"),
            *(*SGD, "--lr", "0.001", "--sync-batchnorm"),
        ),
        "BERT": ("--task", "text_classifier:task", *FAST, "--task-option", "dropout=0"),
        "recommender": ("--task", "recommender:task", *FAST),
        "Llama, LoRA": ("--task", "fine_tuning:task", *FAST),
    }[name]


MODELS = ("BERT", "recommender", "Llama, LoRA", "GPT-2", "Llama", "ResNet-18")


def reference(name, layout):
    """The layout of one process whose losses `layout` must have.

    Batch normalization has the statistics of a micro-batch: of as many as `layout` has.
    """
    words = layout.split()
    if name != "ResNet-18" or "--micro-batches" not in words:
        return "1 single"
    return f"1 single --micro-batches {words[words.index('--micro-batches') + 1]}"


class Pools:
    """Pools of ranks by their number, for use as a context."""

    def __init__(self, folder):
        self._folder = folder
        self._pools = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pool in self._pools.values():
            pool.close()

    def train(self, folder, layout, *given):
        """Train; returns the losses by step, or the errors, one for each rank."""
        world, *strategy = layout.split()
        if world not in self._pools:
            place = self._folder / f"{world}-ranks"
            place.mkdir()
            self._pools[world] = _Pool(int(world), place)
        words = (*given, "--no-tensorboard", "--strategy", *strategy)
        errors = [*filter(None, self._pools[world].try_to_train(folder, *words))]
        return errors or ranks.losses(folder)


class _Pool(rank_pool.RankPool):
    python = str(PYTHON)
    variables: ClassVar = {
        "PYTHONPATH": f"{ROOT}/examples/models:{ranks.ENTRYPOINTS}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
    }
