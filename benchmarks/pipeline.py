"""Pipelines: measured and ideal bubble per schedule, and stages balanced by time or by layers.

There are two kinds of models. *Sleeping* layers sleep for a given time, and twice as long in the
backward pass. To a pipeline this looks like a busy accelerator, so four stages can be measured on
two cores. *Real* layers compute, with one thread per rank, on two ranks only. All the rest is the
trainer's: strategy, schedules, communication over gloo. Repeats of all cases alternate within one
run, and medians count. `make bench` runs this file; it exits with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

_ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
sys.path.insert(0, str(_ENTRYPOINTS))

from trainer import arguments, bubble, models, optimizers, process_group  # noqa: E402
from trainer.data import Batch  # noqa: E402
from trainer.layout import Layout  # noqa: E402
from trainer.setup import Setup  # noqa: E402
from trainer.strategy import Strategy  # noqa: E402
from trainer.task import Task  # noqa: E402

WIDTH = 8
"""Size of the activations between sleeping layers, and number of classes."""

CLOSE = 0.05
"""Largest allowed difference between measured and ideal bubble, as a share of the step."""

FASTER = 1.2
"""Speed-up that balanced stages must reach if the formula predicts at least as much."""

EVEN = (1.0,) * 8
UNEVEN = (1.0,) * 8 + (4.0,) * 4


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A layer that sleeps for `seconds` in its forward and twice as long in its backward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        """The input, after a sleep."""
        return _Sleep.apply(value * self.weight, self.seconds)


def sleeping(units: Sequence[float], ms: float) -> tuple[nn.Sequential, Tensor]:
    """A model whose layers sleep for `units` times `ms` milliseconds, and an input (1, WIDTH)."""
    layers = {f"sleep{n}": Sleeper(unit * ms / 1000) for n, unit in enumerate(units)}
    return nn.Sequential(OrderedDict(layers)), torch.randn(1, WIDTH)


def linear() -> tuple[nn.Sequential, Tensor]:
    """Eight MLPs, the last two 128 times as large, and an input (32, 256)."""
    sizes = [32] * 6 + [4096] * 2
    layers = {
        f"feed{n}": nn.Sequential(nn.Linear(256, size), nn.ReLU(), nn.Linear(size, 256))
        for n, size in enumerate(sizes)
    }
    return nn.Sequential(OrderedDict(layers)), torch.randn(32, 256)


def cnn() -> tuple[nn.Sequential, Tensor]:
    """The trainer's CNN, whose convolutions dominate, and an input (64, 1, 8, 8)."""
    return models.cnn(), torch.randn(64, 1, 8, 8)


@dataclass(frozen=True)
class Case:
    """A model, a pipeline size and a schedule."""

    model: str
    ranks: int
    schedule: str
    micro_batches: int
    balance: str = "time"

    @property
    def stages_per_rank(self) -> int:
        """2 for the interleaved schedule, otherwise 1."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def formula(self) -> float:
        """The ideal bubble."""
        return bubble.ideal(self.ranks, self.micro_batches, self.stages_per_rank)


@dataclass(frozen=True)
class Result:
    """Median step time and bubble of the repeats, and the predicted step time.

    Other load on the machine only increases both; `least_ms` and `least_bubble` are the minima.
    """

    case: Case
    step_ms: float
    bubble: float
    predicted_ms: float
    least_ms: float
    least_bubble: float


def even_cases(ranks: int) -> Iterator[Case]:
    """Cases with equal stages, as the formulas assume."""
    for schedule in ("gpipe", "1f1b", "interleaved"):
        for micro_batches in (ranks, 4 * ranks):
            yield Case("sleeping, even", ranks, schedule, micro_batches)


def uneven_cases(ranks: int, models: Sequence[str] = ("sleeping, uneven",)) -> Iterator[Case]:
    """Cases with unequal layers, balanced by layers and by time in turn."""
    for model in models:
        for balance in ("layers", "time"):
            yield Case(model, ranks, "1f1b", 8, balance)


class Trial:
    """A case, prepared on this rank."""

    def __init__(self, case: Case, context: process_group.DistributedContext, ms: float) -> None:
        builders: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
            "sleeping, even": partial(sleeping, EVEN, ms),
            "sleeping, uneven": partial(sleeping, UNEVEN, ms),
            "real, linear": linear,
            "real, cnn": cnn,
        }
        torch.manual_seed(0)
        model, micro_batch = builders[case.model]()
        inputs = micro_batch.repeat(case.micro_batches, *[1] * (micro_batch.dim() - 1))
        self.case = case
        self.batch = Batch(
            inputs, torch.zeros(len(inputs), dtype=torch.long), len(inputs), len(inputs)
        )
        self.strategy = _strategy(case, context, self.batch, model)
        self.step_ms: list[float] = []
        self.bubbles: list[float] = []
        self.run()  # sets up connections; not measured
        self.step_ms.clear()

    def run(self) -> None:
        """One step."""
        torch.distributed.barrier()
        began = time.perf_counter()
        self.strategy.backward(self.batch)
        torch.distributed.barrier()
        self.step_ms.append((time.perf_counter() - began) * 1000)
        self.strategy.step()
        self.bubbles += self.strategy.extra_metrics().values()

    def result(self) -> Result:
        """The medians and minima of the steps so far."""
        pipeline: Any = self.strategy.pipeline
        ranks = pipeline.seconds_by_rank
        seconds = bubble.step_seconds(ranks, self.case.micro_batches, self.case.stages_per_rank)
        return Result(
            self.case,
            statistics.median(self.step_ms),
            statistics.median(self.bubbles),
            seconds * 1000,
            min(self.step_ms),
            min(self.bubbles),
        )


def _strategy(
    case: Case, context: process_group.DistributedContext, batch: Batch, model: nn.Sequential
) -> Strategy:
    words = f"--strategy pp --schedule {case.schedule} --micro-batches {case.micro_batches}"
    size = f"--batch-size {len(batch.inputs)} --balance {case.balance}"
    chosen = arguments.parse([*words.split(), *size.split()])
    task = Task(lambda: model, TensorDataset(batch.inputs, batch.targets))
    setup = Setup(Layout(chosen, context), task, batch)
    return Strategy(setup, partial(optimizers.create, chosen))


def work(cases: Sequence[Case], repeats: int, ms: float) -> None:
    """Measure on this rank; rank 0 prints the results as its last line."""
    torch.set_num_threads(1)
    context = process_group.join()
    trials = [Trial(case, context, ms) for case in cases]
    for _ in range(repeats):
        for trial in trials:
            trial.run()
    context.log(json.dumps([asdict(trial.result()) for trial in trials]))
    trials.clear()
    process_group.leave()


def measure(cases: Sequence[Case], repeats: int, ms: float) -> list[Result]:
    """Start ranks for cases that all need the same number, and return their results."""
    task = json.dumps([[asdict(case) for case in cases], repeats, ms])
    torchrun = ("-m", "torch.distributed.run", "--standalone")
    ranks = f"--nproc-per-node={cases[0].ranks}"
    done = subprocess.run(
        [sys.executable, *torchrun, ranks, __file__, "--rank", task],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout.splitlines()[-1])
    return [Result(**{**each, "case": Case(**each["case"])}) for each in results]


def bubble_rows(results: Sequence[Result]) -> Iterator[tuple[str, bool]]:
    """The lines of the first table, each with whether its target is met."""
    line = "{:<18}{:>6}{:>13}{:>7}{:>9}{:>10}{:>7}  {}".format
    yield line("model", "ranks", "schedule", "pieces", "formula", "measured", "least", "met"), True
    for each in results:
        case, met = each.case, abs(each.bubble - each.case.formula) <= CLOSE
        shares = (f"{share:.1%}" for share in (case.formula, each.bubble, each.least_bubble))
        facts = (case.model, case.ranks, case.schedule, case.micro_batches)
        yield line(*facts, *shares, "yes" if met else "NO"), met


def balance_rows(results: Sequence[Result]) -> Iterator[tuple[str, bool]]:
    """The second: what cutting by time gains."""
    line = "{:<18}{:>6}{:>11}{:>9}{:>10}{:>8}{:>7}  {}".format
    heads = ("layers ms", "time ms", "predicted", "faster", "least")
    yield line("model", "ranks", *heads, "met"), True
    for naive, balanced in zip(results[::2], results[1::2], strict=True):
        predicted = naive.predicted_ms / balanced.predicted_ms
        faster, least = naive.step_ms / balanced.step_ms, naive.least_ms / balanced.least_ms
        met = predicted < FASTER or faster >= FASTER
        measured = (f"{naive.step_ms:.1f}", f"{balanced.step_ms:.1f}")
        gains = (f"{gain:.2f}" for gain in (predicted, faster, least))
        yield (
            line(naive.case.model, naive.case.ranks, *measured, *gains, "yes" if met else "NO"),
            met,
        )


def main() -> int:
    """Measure, print, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=6, metavar="N", help="default: 6")
    parser.add_argument(
        "--ms", type=float, default=20.0, help="sleep of a short layer; default: 20"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        cases, repeats, ms = json.loads(args.rank)
        work([Case(**case) for case in cases], repeats, ms)
        return 0
    two = [*even_cases(2), *uneven_cases(2, ("sleeping, uneven", "real, linear", "real, cnn"))]
    four = [*even_cases(4), *uneven_cases(4)]
    results = [each for cases in (two, four) for each in measure(cases, args.repeats, args.ms)]
    even = [each for each in results if each.case.model == "sleeping, even"]
    rows = [*bubble_rows(even), *balance_rows([each for each in results if each not in even])]
    print("\n".join(row for row, _ in rows))
    return 0 if all(met for _, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
