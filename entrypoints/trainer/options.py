"""The trainer's command line, and what does not go together on it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from trainer import strategies, tasks
from trainer.profile import STEPS

DEFAULTS = {
    "digits": {"lr": 0.05, "batch_size": 64, "optimizer": "sgd", "epochs": 15},
    "text": {"lr": 1e-3, "batch_size": 32, "optimizer": "adamw", "epochs": 1},
}
"""Of the options that are not given."""

COUNTS = (
    *("epochs", "batch_size", "micro_batches", "sequence", "layers", "log_every", "keep"),
    *("shard_ranks", "tensor_parallel", "pipeline_parallel", "stages_per_rank"),
)

_SHARDED = ("zero2", "zero3", "fsdp", "hsdp", "fsdp-tp")
_TENSOR = ("tp", "tp-dp", "fsdp-tp")
_PIPELINE = ("pp", "pp-dp", "pp-fsdp")

OWNERS = {
    "compress": ("ddp", "zero1"),
    "static_graph": ("ddp", "zero1"),
    "shard_ranks": ("hsdp",),
    "offload": _SHARDED,
    "tensor_parallel": _TENSOR,
    "sequence_parallel": _TENSOR,
    "pipeline_parallel": _PIPELINE,
    "schedule": _PIPELINE,
    "stages_per_rank": _PIPELINE,
    "balance": _PIPELINE,
}
"""Options that mean something to these strategies only."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends the process with every problem that shows before anything starts."""
    parser = argparse.ArgumentParser(
        description="Train a small model, spread over processes in a way chosen by name.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _task(parser)
    _learning(parser)
    _spreading(parser)
    _keeping(parser)
    options = parser.parse_args(arguments)
    for name, value in DEFAULTS[options.task].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    problems = list(_problems(options))
    if problems:
        parser.error("; ".join(problems))
    return options


def _task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is learned").add_argument
    add("--task", choices=DEFAULTS, default="digits")
    add("--text", metavar="FOLDER", help="of text files; by default Python's own reference texts")
    add(
        "--sequence", type=int, default=64, metavar="BYTES", help="that the text model sees at once"
    )
    add("--layers", type=int, default=4, help="blocks of the text model")
    add("--width", type=int, default=64, help="of the text model")
    add("--heads", type=int, default=4, help="of attention, in the text model")


def _learning(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it is learned").add_argument
    add("--epochs", type=int, help="in all, resumed ones included; 15 for digits, 1 for text")
    add("--steps", type=int, metavar="N", help="stop after step N, if that comes first")
    add("--batch-size", type=int, help="global, split over the ranks; 64 for digits, 32 for text")
    add("--optimizer", choices=("sgd", "adamw"), help="sgd for digits, adamw for text")
    add("--lr", type=float, help="learning rate; 0.05 for digits, 0.001 for text")
    add("--lr-schedule", choices=("constant", "cosine"), default="constant")
    add("--warmup", type=int, default=0, metavar="STEPS", help="in which the rate rises from 0")
    add("--weight-decay", type=float, default=0.0)
    add("--clip", type=float, metavar="NORM", help="largest norm of a step's gradient")
    add("--seed", type=int, default=0, help="for the first weights and the order of the samples")
    add("--patience", type=int, metavar="EPOCHS", help="stop after so many without improvement")
    add("--deterministic", action="store_true", help="the same bits in every run, at some cost")


def _spreading(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it is spread").add_argument
    add("--strategy", choices=strategies.TABLE, default="ddp")
    add("--micro-batches", type=int, default=1, metavar="N", help="pieces of a rank's share")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    add("--checkpoint-activations", action="store_true", help="compute them twice, keep fewer")
    add("--compile", action="store_true", help="each layer by torch.compile")
    add("--compress", choices=("fp16", "bf16", "powersgd"), help="gradients that ddp sends")
    add("--static-graph", action="store_true", help="ddp: every step uses the same parameters")
    add("--bucket-mb", type=int, default=25, metavar="MIB", help="ddp: gradients sent at once")
    add("--shard-ranks", type=int, metavar="N", help="hsdp: that hold one model; those of a node")
    add("--offload", action="store_true", help="fsdp: keep in the CPU's memory what is not used")
    add("--tensor-parallel", type=int, metavar="N", help="ranks that hold one model; tp: all")
    add("--sequence-parallel", action="store_true", help="tp: cut what lies between, too")
    add("--pipeline-parallel", type=int, metavar="N", help="ranks in a pipeline; pp: all, pp-dp: 2")
    add("--schedule", choices=("gpipe", "1f1b", "interleaved"), help="of pp; 1f1b")
    add("--stages-per-rank", type=int, metavar="N", help="of pp; 2 if interleaved, else 1")
    add("--balance", choices=("time", "layers"), help="what stages of pp have alike; time")


def _keeping(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is kept and shown").add_argument
    add("--checkpoint-every", type=int, default=1, metavar="EPOCHS")
    add("--checkpoint-steps", type=int, metavar="STEPS", help="and every so many steps")
    add("--keep", type=int, default=2, metavar="N", help="newest checkpoints, and the best one")
    add("--background-save", action="store_true", help="write checkpoints while training goes on")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--profile", metavar="FIRST:LAST", help="steps to trace with torch.profiler")
    add("--no-tensorboard", dest="tensorboard", action="store_false")
    add("--workers", type=int, default=0, metavar="N", help="processes that prepare batches")


def _problems(options: argparse.Namespace) -> Iterator[str]:
    if options.profile and not STEPS.fullmatch(options.profile):
        yield f"--profile {options.profile} must name two steps, as in 20:25"
    for name in COUNTS:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            yield f"--{name.replace('_', '-')} must be at least 1"
    for name, owners in OWNERS.items():
        if getattr(options, name) and options.strategy not in owners:
            yield (
                f"--{name.replace('_', '-')} belongs to --strategy {' or '.join(owners)}, "
                f"not to {options.strategy}"
            )
    if options.heads < 1 or options.width % options.heads:
        yield f"--width {options.width} must be a multiple of --heads {options.heads}"
    if options.task == "text" and (short := tasks.too_short(options)):
        yield short
