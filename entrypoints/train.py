"""Train a small model on one process or many, spread in a way chosen by name.

    python train.py --strategy single                    # one process
    torchrun --standalone --nproc-per-node=2 train.py    # two, by DDP; the same numbers
    deploykit submit --backend local                     # or slurm, or sagemaker

From the environment it reads torchrun's variables and, where deploykit set them,
DEPLOYKIT_OUTPUT_DIR, DEPLOYKIT_CHECKPOINT_DIR and DEPLOYKIT_RESTART_COUNT. Started again with the
same checkpoint folder, it goes on where it stopped, on another number of ranks or with another
strategy too. On SIGTERM or SIGUSR2 to any rank, all ranks finish the step, save, and exit with
code 75: stopped with a checkpoint, to be started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from itertools import count
from math import inf
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trainer import gradients, group, optimizers, strategies, tasks
from trainer.checkpoint import Keeper
from trainer.data import IGNORED, Batch, Batches
from trainer.group import Place, Vote
from trainer.meter import Meter
from trainer.metrics import Record
from trainer.options import parse
from trainer.precision import LossScale
from trainer.profile import Profile
from trainer.progress import Bar
from trainer.seal import Checkpoint, Progress

OUTPUT = Path(os.environ.get("DEPLOYKIT_OUTPUT_DIR", "output"))
CHECKPOINTS = Path(os.environ.get("DEPLOYKIT_CHECKPOINT_DIR", "checkpoints"))
STOPPED = 75
"""Exit code after a stop that was asked for: EX_TEMPFAIL of sysexits.h, "try again"."""


def main() -> None:
    options = parse(sys.argv[1:])
    notices = listen()
    place = group.join()
    try:
        finished = Run(options, place, notices).train()
    except ValueError as error:  # what options and ranks do not allow; every rank finds the same
        sys.exit(f"train.py: error: {error}" if place.first else 1)
    group.leave()
    sys.exit(0 if finished else STOPPED)


def listen() -> Sequence[int]:
    """The signals that ask for an early stop, as they come in."""
    notices: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _frame: notices.append(received))
    return notices


class Run:
    """A model on its way: everything that a step needs, and how far it has come."""

    def __init__(self, options: argparse.Namespace, place: Place, notices: Sequence[int]) -> None:
        self.options = options
        self.place = place
        torch.use_deterministic_algorithms(options.deterministic)
        self.task = tasks.find(options)
        self.strategy = strategies.find(options, place)
        self.batches = self.batched(self.task.training)
        self.strategy.sample = next(self.batches.in_order())
        torch.manual_seed(options.seed)
        self.strategy.prepare(self.task.model(), partial(optimizers.make, options))
        self.steps = min(options.epochs * len(self.batches), options.steps or sys.maxsize)
        self.meter = Meter(options, place, self.task, self.strategy)
        self.profile = Profile(options.profile, OUTPUT, place)
        self.bar = Bar(place, self.steps)
        self.vote = Vote(notices)
        self.scale = LossScale(enabled=options.precision == "fp16")
        self.keeper = Keeper(
            CHECKPOINTS, place, keep=options.keep, background=options.background_save
        )
        self.step = self.best_step = self.idle_epochs = 0
        self.best_loss = inf
        self.validation: tuple[float, float] | None = None
        """Accuracy and loss after the last step, once they have been measured."""
        self.resume()
        folder = OUTPUT if place.first else None
        self.record = Record(folder, self.step, tensorboard=options.tensorboard)

    def train(self) -> bool:
        """Train to the end. False when told to stop before it, with all that was done saved."""
        self.place.say(
            f"{self.place.world} rank(s) on {self.place.device.type}, "
            f"global batch {self.options.batch_size}, strategy {self.options.strategy}"
        )
        for epoch in count(self.step // len(self.batches)):
            if self.step >= self.steps or self.out_of_patience():
                break
            if not self.epoch(epoch):
                self.bar.clear()
                path = self.save()
                self.keeper.wait()
                self.place.say(f"stopped early after step {self.step}, as told; resume from {path}")
                self.record.close()
                return False
        self.finish()
        return True

    def epoch(self, epoch: int) -> bool:
        """The steps of one epoch that are still to be done. False when told to stop."""
        done = self.step - epoch * len(self.batches)
        batches = self.batches.epoch(epoch, self.options.seed, done, self.options.workers)
        self.meter.start(self.step)
        for batch in self.strategy.clock.timed("data", batches):
            self.vote.ask()
            self.profile.before(self.step + 1)
            self.learn(batch, epoch)
            self.profile.after(self.step)
            self.bar.show(self.step)
            if self.vote.stop():
                return False
            if self.step >= self.steps:
                break
            every = self.options.checkpoint_steps
            if every and self.step % every == 0:
                self.save()
        self.bar.clear()
        self.validate(epoch)
        return True

    def learn(self, batch: Batch, epoch: int) -> None:
        """One step."""
        self.step += 1
        logged = self.step % self.options.log_every == 0
        strategy, options = self.strategy, self.options
        rate = optimizers.rate(options, self.step, self.steps)
        optimizers.set_rate(strategy.optimizer, rate)
        loss = strategy.backward(batch, self.scale.factor)

        norm = 0.0
        if logged or options.clip or self.scale.enabled:
            norm = float(strategy.norm()) / self.scale.factor
            self.rescale(norm)
        if self.scale.accepts(norm):
            strategy.step()
        else:
            strategy.optimizer.zero_grad()
        if logged:
            numbers = self.meter.read(self.step, float(loss) * strategy.counts)
            numbers |= strategy.measures()
            self.record.write(self.step, epoch, **numbers, lr=rate, gradient_norm=norm)

    def rescale(self, norm: float) -> None:
        """Undo the scaling of the loss, and clip."""
        factor = 1 / self.scale.factor
        if self.options.clip and norm > self.options.clip:
            factor *= self.options.clip / norm
        if factor != 1:
            gradients.scale(self.strategy.model.parameters(), factor)

    def validate(self, epoch: int) -> None:
        """Measure, remember the best, and save when it is time."""
        self.validation = accuracy, loss = self.evaluate(self.task.validation)
        self.record.write(self.step, epoch, val_loss=loss, val_accuracy=accuracy)
        self.place.say(f"epoch {epoch}: validation loss {loss:.4f}, accuracy {accuracy:.4f}")
        better = loss < self.best_loss
        self.idle_epochs = 0 if better else self.idle_epochs + 1
        ends = self.step >= self.steps or self.out_of_patience()
        if better:
            self.best_loss, self.best_step = loss, self.step
        if better or ends or (epoch + 1) % self.options.checkpoint_every == 0:
            self.save()

    def out_of_patience(self) -> bool:
        return self.options.patience is not None and self.idle_epochs >= self.options.patience

    def finish(self) -> None:
        self.keeper.wait()
        accuracy, loss = self.validation or self.evaluate(self.task.validation)
        test_accuracy, test_loss = self.evaluate(self.task.test)
        self.record.write(
            self.step,
            self.options.epochs,
            val_loss=loss,
            val_accuracy=accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
        )
        self.record.close()
        if summary := self.strategy.summary():
            self.place.say(summary)
        for name, value in (("validation", accuracy), ("test", test_accuracy)):
            size = getattr(self.task, name).tensors[1].numel()
            self.place.say(f"{name} accuracy {value:.4f} ({size} {self.task.unit})")

    @torch.no_grad()
    def evaluate(self, dataset: TensorDataset) -> tuple[float, float]:
        """Accuracy and mean loss over all of `dataset`.

        Sums and counts are added up over the ranks, not means, whose shares may differ in size.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.place.device)
        self.strategy.model.eval()
        for batch in self.batched(dataset).in_order():
            outputs = self.strategy.forward(batch.inputs)
            if outputs is not None:
                found = _sums(outputs.flatten(0, -2).float(), batch.targets.flatten())
                sums += found * self.strategy.counts
        self.strategy.model.train()
        hits, loss, count = group.totals(self.place, sums.tolist())
        return hits / count, loss / count

    def batched(self, dataset: TensorDataset) -> Batches:
        return Batches(dataset, self.options.batch_size, self.strategy.share, self.place)

    def save(self) -> Path:
        """Nothing in a step is random and the order of the samples follows from seed and step, so
        these few values, with the tensors, are the whole state of a run.
        """
        progress = {
            "step": self.step,
            "settings": self.settings(),
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "idle_epochs": self.idle_epochs,
            "loss_scale": self.scale.factor,
        }
        return self.keeper.save(self.step, self.strategy.state(), progress)

    def resume(self) -> None:
        """Take over the newest whole checkpoint, if there is one."""
        found = self.keeper.newest(self.unfit)
        if found is None:
            return
        path, progress = found
        state = self.strategy.state()
        self.keeper.load(path, state)
        self.strategy.load(state)
        self.step, self.best_step = progress["step"], progress["best_step"]
        self.best_loss, self.idle_epochs = progress["best_loss"], progress["idle_epochs"]
        self.scale.factor = progress["loss_scale"]
        restarts = os.environ.get("DEPLOYKIT_RESTART_COUNT", "0")
        self.place.say(f"resumed from {path}, {self.step} steps done (restart {restarts})")

    def unfit(self, found: Checkpoint) -> str:
        """Why a checkpoint cannot be resumed, or ''; ValueError where it is of another run."""
        if fault := odd(found.progress):
            return fault
        if found.progress["settings"] != self.settings():
            raise ValueError(
                f"{found.path} comes from a run with {str(found.progress['settings'])[:1000]}, "
                f"this one has {self.settings()}: use the same, or another checkpoint folder"
            )
        return found.contents.unfit(self.strategy.state())

    def settings(self) -> dict[str, float | str]:
        """The options that decide the numbers, and so cannot change when a run is resumed."""
        shape = ("task", "text", "sequence", "layers", "width", "heads")
        names = (*shape, "batch_size", "optimizer", "lr", "seed")
        return {name: getattr(self.options, name) for name in names}


def odd(progress: Progress) -> str:
    """What is wrong with the progress in a checkpoint, which may come from anybody; or ''."""
    kinds = {"settings": dict, "idle_epochs": int, "best_loss": float, "loss_scale": float}
    for name, kind in kinds.items():
        if type(progress.get(name)) is not kind:
            return f"its {name} is no {kind.__name__}"
    return "" if 0 < progress["loss_scale"] < inf else "its loss_scale is out of range"


def _sums(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Hits, summed loss and number of targets, of (targets, classes) scores."""
    hits = (outputs.argmax(dim=-1) == targets).sum()
    loss = cross_entropy(outputs, targets, reduction="sum")
    return torch.stack([hits.double(), loss.double(), (targets != IGNORED).sum().double()])


if __name__ == "__main__":
    main()
