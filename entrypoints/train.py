"""Train a small model in one process or many, with a parallelism strategy of your choice.

    python train.py --strategy single                    # one process
    torchrun --standalone --nproc-per-node=2 train.py    # two, with DDP; the same results
    deploykit submit --backend local                     # or slurm, or sagemaker

Reads torchrun's environment variables and, if set, DEPLOYKIT_OUTPUT_DIR, DEPLOYKIT_CHECKPOINT_DIR
and DEPLOYKIT_RESTART_COUNT. If restarted with the same checkpoint folder, training resumes where it
stopped, even with a different number of ranks or another strategy. When any rank receives SIGTERM
or SIGUSR2, all ranks finish the step, save a checkpoint and exit with code 75, which requests a
restart.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from trainer import tasks
from trainer.arguments import parse
from trainer.checkpoint.checkpointer import CheckpointManager
from trainer.checkpoint.integrity import Progress, VerifiedCheckpoint
from trainer.data import Batch, BatchLoader
from trainer.errors import ConfigError
from trainer.measure.meter import Meter
from trainer.measure.profiling import profiler, progress_bar
from trainer.measure.timing import timed_waits
from trainer.metrics import MetricsWriter, in_words, prefixed
from trainer.optim import gradients, optimizers
from trainer.optim.gradients import LossScaler
from trainer.parallel import process_group
from trainer.parallel.layout import Layout, accumulate
from trainer.parallel.process_group import DistributedContext, sum_over_ranks
from trainer.parallel.strategy import Strategy
from trainer.seeds import seed_all
from trainer.setup import Setup
from trainer.stop_vote import StopVote
from trainer.train_options import ModelOptions, TrainOptions

OUTPUT_DIR = Path(os.environ.get("DEPLOYKIT_OUTPUT_DIR", "output"))
CHECKPOINT_DIR = Path(os.environ.get("DEPLOYKIT_CHECKPOINT_DIR", "checkpoints"))
STOPPED = 75
"""Exit code after an early stop with a checkpoint: EX_TEMPFAIL of sysexits.h, "try again"."""


def main() -> None:
    """Run the command line; exits with 0, with the code of an error, or with `STOPPED`."""
    options = parse(sys.argv[1:])
    stop_signals = collect_stop_signals()
    context = process_group.join()
    options = accumulate(options, context)
    try:
        finished = Trainer(options, context, stop_signals).train()
    except ConfigError as error:  # on all ranks, or on all that share layers
        if getattr(error, "first", context.is_rank_zero):
            print(f"train.py: error: {error}", file=sys.stderr)
        process_group.fail(error.exit_code)
    process_group.leave()
    sys.exit(0 if finished else STOPPED)


def collect_stop_signals() -> Sequence[int]:
    """Handle SIGTERM and SIGUSR2; the returned list grows by each signal that is received."""
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _frame: stop_signals.append(received))
    return stop_signals


class Trainer:
    """A training run: the model, its data, and how far it has come."""

    def __init__(
        self, options: TrainOptions, context: DistributedContext, stop_signals: Sequence[int]
    ) -> None:
        self.options = options
        self.context = context
        torch.use_deterministic_algorithms(options.deterministic)
        seed_all(options.seed)  # what the task draws, such as a split, is the same on all ranks
        self.task = tasks.load(options)
        self.layout = Layout(options, context)
        self.batches = self.loader(self.task.training)
        setup = Setup(self.layout, self.task, next(self.batches.in_order()))
        self.strategy = Strategy(setup, partial(optimizers.create, options))
        self.epoch_steps = self.steps_per_epoch()
        self.steps = min(options.epochs * self.epoch_steps, options.steps or sys.maxsize)
        self.meter = Meter(setup)
        self.stop_vote = StopVote(stop_signals)
        self.loss_scaler = LossScaler(enabled=options.precision == "fp16")
        self.checkpoints = CheckpointManager(
            CHECKPOINT_DIR, context, keep=options.keep, background=options.background_save
        )
        self.step = self.best_step = self.idle_epochs = 0
        self.best_loss = inf
        self.validation: dict[str, float] = {}
        """Loss and metrics after the last step, if they have been measured."""
        self.resume()
        create, optimizer = self.task.lr_schedule, self.strategy.optimizer
        self.lr_schedule = optimizers.lr_schedule(
            options, optimizer, self.steps, completed=self.step, create=create
        )
        self.progress_bar = progress_bar(context, self.steps, self.step)
        folder = OUTPUT_DIR if context.is_rank_zero else None
        self.metrics = MetricsWriter(folder, self.step, tensorboard=options.tensorboard)

    def steps_per_epoch(self) -> int:
        """Steps between two evaluations; a stream has no epochs but the one of ``--steps``."""
        if not self.task.streams:
            return len(self.batches)
        if not self.options.steps:
            raise ConfigError("training data without a length requires --steps")
        return self.options.steps

    def train(self) -> bool:
        """Train to the end. Returns False after an early stop, with a checkpoint saved."""
        self.context.log(
            f"{self.context.world_size} rank(s) on {self.context.device.type}, "
            f"global batch {self.options.batch_size}, strategy {self.options.strategy}, "
            f"{self.steps} steps"
        )
        completed = True
        with profiler(self.options.profile, self.step, OUTPUT_DIR, self.context) as profile:
            while completed and not self.is_finished():
                with timed_waits(self.strategy.timer):
                    completed = self.train_epoch(self.step // self.epoch_steps, profile)
        self.progress_bar.close()
        if completed:
            self.finish()
        else:
            path = self.save()
            self.checkpoints.wait()
            self.context.log(f"stopped early after step {self.step}; checkpoint: {path}")
        self.metrics.close()
        return completed

    def train_epoch(self, epoch: int, profile: Any = None) -> bool:
        """Run the remaining steps of an epoch. Returns False if a stop was requested."""
        completed = self.step - epoch * self.epoch_steps
        batches = self.batches.epoch(epoch, self.options.seed, completed, self.options.workers)
        self.meter.start(self.step)
        for batch in self.strategy.timer.timed("data", batches):
            self.stop_vote.start()
            self.train_step(batch)
            if profile:
                profile.step()
            self.progress_bar.update()
            stop = self.stop_vote.result()
            if stop is not None:
                self.write_metrics(epoch)
            if stop:
                return False
            if self.step >= self.steps:
                break
            interval = self.options.checkpoint_steps
            if interval and self.step % interval == 0:
                self.write_metrics(epoch)
                self.save()
        self.write_metrics(epoch)
        self.progress_bar.clear()
        self.validate(epoch)
        return True

    def train_step(self, batch: Batch) -> None:
        """Compute the gradients of a batch, update the parameters, and measure."""
        self.step += 1
        self.strategy.seed_step(self.step)
        logged = self.step % self.options.log_every == 0
        strategy, scaler = self.strategy, self.loss_scaler
        lr = float(self.lr_schedule.get_last_lr()[0])
        loss = strategy.backward(batch, scaler.factor)

        norm = 0.0
        if logged or self.options.clip or scaler.enabled:
            norm = float(strategy.gradient_norm()) / scaler.factor
            self.unscale_and_clip(norm)
        if scaler.update(norm):
            strategy.step()
        else:
            strategy.optimizer.zero_grad()
        self.lr_schedule.step()
        if logged:
            own_loss = float(loss()) * self.layout.contributes_loss
            self.meter.measure(self.step, own_loss, lr=lr, gradient_norm=norm)

    def write_metrics(self, epoch: int) -> None:
        """Write the metrics of the logged steps that have not been written. Collective."""
        for step, metrics in self.meter.collect():
            self.metrics.write(step, epoch, **metrics)

    def unscale_and_clip(self, norm: float) -> None:
        """Divide the gradients by the loss scale, and clip their norm."""
        factor = 1 / self.loss_scaler.factor
        if self.options.clip and norm > self.options.clip:
            factor *= self.options.clip / norm
        if factor != 1:
            gradients.scale(self.strategy.model.parameters(), factor)

    def validate(self, epoch: int) -> None:
        """Evaluate, if there is validation data, and save a checkpoint if one is due."""
        self.validation = self.evaluate(self.task.validation)
        improved = False
        if self.validation:
            self.metrics.write(self.step, epoch, **prefixed("val", self.validation))
            self.context.log(f"epoch {epoch}: validation {in_words(self.validation)}")
            improved = (loss := self.validation["loss"]) < self.best_loss
        self.idle_epochs = 0 if improved or not self.validation else self.idle_epochs + 1
        if improved:
            self.best_loss, self.best_step = loss, self.step
        if improved or self.is_finished() or (epoch + 1) % self.options.checkpoint_every == 0:
            self.save()

    def is_finished(self) -> bool:
        """Whether all steps are done, or the validation loss no longer improves."""
        return self.step >= self.steps or self.out_of_patience()

    def out_of_patience(self) -> bool:
        """Whether the validation loss has not improved for --patience epochs."""
        return self.options.patience is not None and self.idle_epochs >= self.options.patience

    def finish(self) -> None:
        """Evaluate on the test data, and write and log the final metrics.

        If ``--patience`` has stopped the training, they are those of the best checkpoint.
        """
        self.checkpoints.wait()
        if self.step < self.steps:
            self.context.log(
                f"stopped after step {self.step} of {self.steps}: the validation loss has not "
                f"improved for {self.options.patience} epochs"
            )
            if 0 < self.best_step < self.step:
                self.load(self.checkpoints.at(self.best_step, self.checkpoint_problem))
                self.context.log(f"the best validation loss was at step {self.best_step}:")
                self.validation = {}
        validation = self.validation or self.evaluate(self.task.validation)
        test = self.evaluate(self.task.test)
        values = prefixed("val", validation) | prefixed("test", test)
        self.metrics.write(self.step, self.options.epochs, **values)
        for name, result in (("validation", validation), ("test", test)):
            if result:
                metrics = {key: result[key] for key in self.task.metric_functions}
                words = in_words(metrics or {"loss": result["loss"]})
                self.context.log(f"{name} {words} ({result['targets']:.0f} {self.task.unit})")

    @torch.no_grad()
    def evaluate(self, dataset: Dataset[Any] | None) -> dict[str, float]:
        """Mean loss and metrics over `dataset`, and its number of targets; {} for None. Collective.

        Sums and counts are added over the ranks, rather than means, because shards may differ in
        size.
        """
        if dataset is None:
            return {}
        functions = self.task.metric_functions
        sums = torch.zeros(2 + len(functions), dtype=torch.float64, device=self.context.device)
        with self.strategy.evaluating():
            for whole in self.loader(dataset).in_order(self.options.seed):
                batch = self.strategy.part(whole)
                outputs = self.strategy.forward(batch.inputs)
                if outputs is not None and self.layout.contributes_loss:
                    values = [function(outputs, batch.targets) for function in functions.values()]
                    counts = torch.as_tensor(batch.count) > 0
                    values = [torch.where(counts, each.double(), 0.0) for each in values]
                    loss = self.strategy.objective.loss(outputs, batch) * batch.total
                    sums += torch.stack([torch.as_tensor(batch.count).to(loss), loss, *values])
        targets, *means = sum_over_ranks(self.context, sums.tolist())
        means = [value / max(targets, 1) for value in means]
        return {"targets": targets} | dict(zip(("loss", *functions), means, strict=True))

    def loader(self, dataset: Dataset[Any]) -> BatchLoader:
        """A loader of this rank's shard of `dataset`."""
        size, shard = self.options.batch_size, self.layout.data_shard
        return BatchLoader(self.task, dataset, size, shard, self.context)

    def save(self) -> Path:
        """Save a checkpoint and return its path.

        The random numbers of a step and the order of the samples follow from seed and step, so the
        tensors and these few values are the complete state of a run.
        """
        progress = {
            "step": self.step,
            "settings": self.settings(),
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "idle_epochs": self.idle_epochs,
            "out_of_patience": self.out_of_patience(),
            "loss_scale": self.loss_scaler.factor,
        }
        self.strategy.average_buffers()
        return self.checkpoints.save(self.step, self.strategy.state(), progress)

    def resume(self) -> None:
        """Load the latest valid checkpoint, if there is one."""
        latest = self.checkpoints.latest(self.checkpoint_problem)
        if latest is None:
            return
        self.load(latest)
        path, progress = latest.path, latest.progress
        self.step, self.best_step = progress["step"], progress["best_step"]
        self.best_loss, self.idle_epochs = progress["best_loss"], progress["idle_epochs"]
        self.loss_scaler.factor = progress["loss_scale"]
        restarts = os.environ.get("DEPLOYKIT_RESTART_COUNT", "0")
        self.context.log(f"resumed from {path} after {self.step} steps (restart {restarts})")

    def load(self, checkpoint: VerifiedCheckpoint) -> None:
        """Load the tensors of a checkpoint. Collective."""
        state = self.strategy.state(checkpoint.tensors)
        self.checkpoints.load(checkpoint.path, state)
        self.strategy.load(state)

    def checkpoint_problem(self, checkpoint: VerifiedCheckpoint) -> str:
        """Why a checkpoint cannot be resumed, or ''.

        Raises ConfigError if it belongs to a run with other settings.
        """
        if problem := progress_problem(checkpoint.progress):
            return problem
        if changes := self.changed_settings(checkpoint.progress["settings"]):
            raise ConfigError(
                f"{checkpoint.path} was saved with different settings: "
                f"{'; '.join(changes)[:1000]}; use the same settings or another checkpoint folder"
            )
        return checkpoint.mismatch(self.strategy.state(checkpoint.tensors))

    def settings(self) -> dict[str, Any]:
        """The options that determine the results, and must not change when a run is resumed."""
        model = (each.name for each in fields(ModelOptions))
        steps = ("batch_size", "optimizer", "lr", "lr_schedule", "warmup", "weight_decay", "clip")
        names = (*model, *steps, "ema", "precision", "seed")
        return {name: getattr(self.options, name) for name in names}

    def changed_settings(self, saved: dict[str, object]) -> list[str]:
        """The settings of this run that differ from those of a checkpoint."""
        return [
            f"--{name.replace('_', '-')} was {saved.get(name)}, now {value}"
            for name, value in self.settings().items()
            if saved.get(name) != value
        ]


def progress_problem(progress: Progress) -> str:
    """Why the progress stored in an untrusted checkpoint is not valid, or ''."""
    types = {"settings": dict, "idle_epochs": int, "best_loss": float, "loss_scale": float}
    for name, expected in types.items():
        if type(progress.get(name)) is not expected:
            return f"its {name} is not of type {expected.__name__}"
    return "" if 0 < progress["loss_scale"] < inf else "its loss_scale is out of range"


if __name__ == "__main__":
    main()
