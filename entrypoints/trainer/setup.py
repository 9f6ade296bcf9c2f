"""What a model is prepared for: the options, the ranks and the task of a run."""

from __future__ import annotations

from trainer.data import Batch, check_equal_sizes
from trainer.deferred import FirstWeights
from trainer.layout import Layout
from trainer.objective import Objective
from trainer.presets import Preset
from trainer.process_group import DistributedContext
from trainer.task import Task
from trainer.timing import StepTimer
from trainer.train_options import TrainOptions


class Setup:
    """What every part of a strategy needs to know.

    `sample` is a batch of this rank for measurements. `timer` times the sections of a step.
    Raises ConfigError if a pipeline cannot take the batches.
    """

    def __init__(self, layout: Layout, task: Task, sample: Batch) -> None:
        if layout.preset.pipeline:
            check_equal_sizes(task, sample.targets, layout.options.batch_size)
        self.layout = layout
        self.task = task
        self.sample = sample
        self.timer = StepTimer(layout.context.device)
        self.weights = FirstWeights(task, layout.options)
        self.context_parallel = None
        if layout.dims.cp > 1:
            from trainer.context_parallel import ContextParallel

            self.context_parallel = ContextParallel(layout.mesh.group("cp"), layout.position.cp)
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
