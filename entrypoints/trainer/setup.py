"""What a model is prepared for: the options, the ranks and the task of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.data import Batch, check_equal_sizes
from trainer.errors import ConfigError
from trainer.measure.timing import StepTimer
from trainer.objective import Objective
from trainer.parallel.deferred import FirstWeights
from trainer.parallel.layout import Layout, Preset
from trainer.parallel.process_group import DistributedContext, sum_over_ranks
from trainer.task import IGNORE_INDEX, Task, cross_entropy, is_integer
from trainer.train_options import TrainOptions


class Setup:
    """What every part of a strategy needs to know.

    `sample` is a batch of this rank for measurements. `timer` times the sections of a step.
    Raises ConfigError if a pipeline cannot take the batches, or if labels are not shifted.
    """

    def __init__(self, layout: Layout, task: Task, sample: Batch) -> None:
        if layout.preset.pipeline:
            check_equal_sizes(task, sample.targets, layout.options.batch_size)
        _check_labels(task, sample, layout.context)
        self.layout = layout
        self.task = task
        self.sample = sample
        self.timer = StepTimer(layout.context.device)
        self.weights = FirstWeights(task, layout.options)
        self.context_parallel = None
        if layout.dims.cp > 1:
            from trainer.parallel.context_parallel import ContextParallel

            group, index = layout.mesh.group("cp"), layout.position.cp
            self.context_parallel = ContextParallel(task, group, index)
        self.objective = Objective(
            layout.options, task, layout.context.device, self.context_parallel
        )

    @property
    def options(self) -> TrainOptions:
        """The options of the run."""
        return self.layout.options

    @property
    def context(self) -> DistributedContext:
        """The ranks, and the device of this one."""
        return self.layout.context

    @property
    def preset(self) -> Preset:
        """The dimensions of parallelism that the strategy combines."""
        return self.layout.preset


def _check_labels(task: Task, sample: Batch, context: DistributedContext) -> None:
    """Raise ConfigError if the labels are the tokens themselves, not shifted. Collective.

    As models of Hugging Face expect them, whose own loss shifts them.
    """
    if task.loss is not cross_entropy or not isinstance(sample.inputs, Mapping):
        return
    tokens: Any = sample.inputs.get("input_ids")
    labels = sample.targets
    if not (is_integer(tokens) and is_integer(labels) and tokens.shape == labels.shape):
        return
    counted = labels != IGNORE_INDEX
    equal, targets = sum_over_ranks(
        context, [int((counted & (tokens == labels)).sum()), int(counted.sum())]
    )
    if equal == targets > 0:
        raise ConfigError(
            "the labels are the input_ids themselves, so each position would learn to repeat its "
            "own token. A Hugging Face model's own loss shifts them, but a task's loss does not: "
            "shift them in `collate` (input_ids[:, :-1] and labels[:, 1:]), or in Task.loss"
        )
