"""The trainer's command line and the checks on its options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from trainer import tasks
from trainer.measure.profiling import STEP_RANGE
from trainer.parallel.layout import STRATEGIES
from trainer.train_options import TrainOptions

INIT_FROM = "DEPLOYKIT_DATA_INIT_FROM"
"""The default of ``--init-from``: the model of `deploykit submit --init-from`."""
DIGITS = {"lr": 0.05, "batch_size": 64, "optimizer": "sgd", "epochs": 15}
OTHER = {"lr": 1e-3, "batch_size": 32, "optimizer": "adamw", "epochs": 1}
"""Defaults of the task "digits", and of any other."""

AT_LEAST_ONE = (
    *("epochs", "batch_size", "micro_batches", "sequence", "layers", "log_every", "keep"),
    *("shard_ranks", "tensor_parallel", "pipeline_parallel", "stages_per_rank"),
    "context_parallel",
)

_SHARDED = tuple(name for name, each in STRATEGIES.items() if each.sharded)
_TENSOR = tuple(name for name, each in STRATEGIES.items() if each.tensor)
_PIPELINE = tuple(name for name, each in STRATEGIES.items() if each.pipeline)
_WHOLE = tuple(name for name, each in STRATEGIES.items() if not (each.tensor or each.pipeline))
_REDUCING = tuple(
    name for name, each in STRATEGIES.items() if each.data not in {"", "dp"} and not each.pipeline
)

STRATEGIES_OF_OPTION = {
    "compress": ("ddp", "zero1"),
    "static_graph": ("ddp", "zero1"),
    "find_unused_parameters": ("ddp", "zero1"),
    "shard_ranks": tuple(name for name, each in STRATEGIES.items() if each.data == "hsdp"),
    "offload": _SHARDED,
    "reduce_each": ("ddp", "zero1", *(name for name in _SHARDED if name not in _PIPELINE)),
    "tensor_parallel": _TENSOR,
    "sequence_parallel": _TENSOR,
    "loss_parallel": _TENSOR,
    "context_parallel": _REDUCING,
    "pipeline_parallel": _PIPELINE,
    "schedule": _PIPELINE,
    "stages_per_rank": _PIPELINE,
    "balance": _PIPELINE,
}
"""Options that only some strategies accept."""


class _KeyValue(argparse.Action):
    """Collects KEY=VALUE arguments in a dictionary."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _flag: str | None = None,
    ) -> None:
        key, equals, value = str(values).partition("=")
        if not (key and equals):
            parser.error(f"--task-option {values} must be KEY=VALUE")
        setattr(namespace, self.dest, getattr(namespace, self.dest) | {key: value})


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults, except those that the help text already names, which are None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        named = action.default is None or action.default is False or action.default == {}
        return action.help if named else super()._get_help_string(action)


def parse(arguments: Sequence[str]) -> TrainOptions:
    """Parse the command line, with the task's defaults filled in.

    Exits with code 2 and one message with every problem that can be found before training starts.
    """
    parser = argparse.ArgumentParser(
        description="Train a small model with a parallelism strategy of your choice.",
        formatter_class=_Defaults,
    )
    _add_task(parser)
    _add_training(parser)
    _add_parallelism(parser)
    _add_output(parser)
    values = vars(parser.parse_args(arguments))
    given = {name: value for name, value in values.items() if value is not None}
    defaults = DIGITS if values["task"] == "digits" else OTHER
    options = TrainOptions(**values | defaults | given)
    problems = list(_problems(options))
    if problems:
        parser.error("; ".join(problems))
    return options


def _add_task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("task and model").add_argument
    number = partial(add, type=int)
    add(
        "--task",
        default="digits",
        help="task to train: digits, text, or package.module:function, which returns a Task",
    )
    add(
        "--task-option",
        dest="task_options",
        action=_KeyValue,
        default={},
        metavar="KEY=VALUE",
        help="option for your task function, in options.task_options; repeatable",
    )
    add("--text", metavar="FOLDER", help="folder of text files; default: Python's help topics")
    number("--sequence", default=64, metavar="BYTES", help="context length (text)")
    number("--layers", default=4, help="number of transformer blocks (text)")
    number("--width", default=64, help="width of the hidden states (text)")
    number("--heads", default=4, help="number of attention heads (text)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    number, real = partial(add, type=int), partial(add, type=float)
    ways = ("for-loop", "foreach", "fused")
    how = "update parameters one by one, in lists, or in one kernel; default: torch's choice"
    weights = "initial weights: a safetensors file, a model folder or a checkpoint folder"
    add("--init-from", metavar="PATH", default=os.environ.get(INIT_FROM), help=weights)
    number("--epochs", help="total epochs, including resumed ones; digits: 15, text: 1")
    number("--steps", metavar="N", help="stop after step N at the latest")
    number("--batch-size", help="global batch size, split over the ranks; digits: 64, text: 32")
    add("--optimizer", choices=("sgd", "adamw"), help="optimizer; digits: sgd, text: adamw")
    add("--optimizer-implementation", choices=ways, help=how)
    real("--lr", help="learning rate; digits: 0.05, text: 0.001")
    add("--lr-schedule", choices=("constant", "cosine"), default="constant")
    number("--warmup", default=0, metavar="STEPS", help="linear learning-rate warmup")
    real("--weight-decay", default=0.0)
    real("--clip", metavar="NORM", help="maximum gradient norm")
    real(
        "--ema",
        metavar="DECAY",
        help="evaluate a moving average of the weights with this decay, such as 0.999",
    )
    number("--seed", default=0, help="seed for the initial weights and the sample order")
    number("--patience", metavar="EPOCHS", help="stop after N epochs without improvement")
    add("--deterministic", action="store_true", help="use deterministic algorithms (slower)")


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism and memory").add_argument
    number, flag = partial(add, type=int), partial(add, action="store_true")
    recomputed = "recompute activations to save memory; selective keeps the most expensive ones"
    shared = "ranks that share each layer; tp: all; tp-dp and fsdp-tp: a node's; else 2"
    parts = "ranks that share each sequence, with any ddp, zero, fsdp or hsdp strategy"
    add("--strategy", choices=STRATEGIES, default="ddp")
    number("--micro-batches", default=1, metavar="N", help="micro-batches per rank and step")
    add("--precision", choices=("fp32", "bf16", "fp16", "float8"), default="fp32")
    add(
        "--checkpoint-activations",
        nargs="?",
        const="full",
        choices=("full", "selective"),
        help=recomputed,
    )
    flag("--reduce-each", help="reduce gradients after each micro-batch: more traffic, less memory")
    flag("--compile", help="compile each layer with torch.compile")
    flag("--sync-batchnorm", help="normalize batches over the samples of all ranks")
    add("--compress", choices=("fp16", "bf16", "powersgd"), help="ddp: compress gradients")
    flag("--static-graph", help="ddp: assume that every step uses the same parameters")
    flag("--find-unused-parameters", help="ddp: allow steps that do not use all parameters")
    number("--bucket-mb", default=25, metavar="MIB", help="ddp: size of gradient buckets")
    number("--shard-ranks", metavar="N", help="hsdp: ranks per shard group; default: a node's")
    flag("--offload", help="fsdp: keep parameters in CPU memory")
    number("--tensor-parallel", metavar="N", help=shared)
    flag("--sequence-parallel", help="tp: also shard activations between layers")
    flag("--loss-parallel", help="tp: split the classes of the loss over the ranks")
    number("--context-parallel", metavar="N", help=parts)
    number("--pipeline-parallel", metavar="N", help="ranks per pipeline; pp: all, else 2")
    add("--schedule", choices=("gpipe", "1f1b", "interleaved"), help="pp: schedule; default: 1f1b")
    number("--stages-per-rank", metavar="N", help="pp: stages per rank; interleaved: 2, else 1")
    add("--balance", choices=("time", "layers"), help="pp: quantity to balance; default: time")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints and metrics").add_argument
    number = partial(add, type=int)
    number("--checkpoint-every", default=1, metavar="EPOCHS")
    number("--checkpoint-steps", metavar="STEPS", help="also save every N steps")
    number("--keep", default=2, metavar="N", help="latest checkpoints to keep, besides the best")
    add(
        "--background-save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write checkpoints while training continues",
    )
    number("--log-every", default=10, metavar="STEPS")
    add("--profile", metavar="FIRST:LAST", help="steps to trace with torch.profiler")
    add("--no-tensorboard", dest="tensorboard", action="store_false")
    number("--workers", default=0, metavar="N", help="data loader processes")


def _problems(options: TrainOptions) -> Iterator[str]:
    if options.profile and not STEP_RANGE.fullmatch(options.profile):
        yield f"--profile {options.profile} must name two steps, such as 20:25"
    for name in AT_LEAST_ONE:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            yield f"{_flag(name)} must be at least 1"
    for name, allowed in STRATEGIES_OF_OPTION.items():
        if getattr(options, name) and options.strategy not in allowed:
            yield (
                f"{_flag(name)} requires --strategy {' or '.join(allowed)}, not {options.strategy}"
            )
    if options.precision == "float8" and options.strategy not in _WHOLE:
        yield (
            f"--precision float8 requires --strategy {' or '.join(_WHOLE)}, not {options.strategy}"
        )
    if options.ema is not None and not 0 < options.ema < 1:
        yield f"--ema {options.ema:g} must be between 0 and 1, such as 0.999"
    if options.heads < 1 or options.width % options.heads:
        yield f"--width {options.width} must be a multiple of --heads {options.heads}"
    if problem := tasks.problem(options):
        yield problem


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
