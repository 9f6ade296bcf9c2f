"""Recommend a parallel strategy, and show the memory and step time of each.

The numbers are computed, not measured, so no GPU is needed.

deploykit advise --gpu h100 --gpus-per-node 8 --parameters 7B
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from deploykit.advise import Advice, Candidate, ParallelConfig, advise, gpus, inputs, report
from deploykit.advise.inputs import AdviseOptions
from deploykit.cli import output
from deploykit.job.decode import Help, Quantity, hints, split
from deploykit.lib import paths, shell, units
from deploykit.lib.errors import UsageError

_GIB = 1024**3
_COLUMNS = (
    *("strategy", "verdict", "GiB/GPU", "param", "grad", "optim", "activ", "logits", "buffers"),
    *("reserve", "sends", "s/step", "waits", "with"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(AdviseOptions):
        kind, metadata, _ = split(hints(AdviseOptions)[field.name])
        text = next(note.text for note in metadata if isinstance(note, Help))
        usual = f" Default: {field.default}." if field.default is not None else ""
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", metavar=_metavar(kind, metadata), help=f"{text}{usual}")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the recommended job file to this path"
    )
    parser.add_argument("--list", action="store_true", help="list the known GPUs")


def _metavar(kind: Any, metadata: tuple[Any, ...]) -> str:
    """What the value of an option is, in a word."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    quantity = next((note for note in metadata if isinstance(note, Quantity)), None)
    if quantity is not None:
        return {"bytes": "SIZE"}.get(quantity.unit, "NUMBER")
    return "N" if kind is int else "NAME"


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list(as_json=args.json)
        return 0
    names = [field.name for field in dataclasses.fields(AdviseOptions)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options = inputs.read(given)
    advice = advise(*inputs.workload_of(options))
    assumed = inputs.assumed(options, advice.training)
    notes = [*([assumed] if assumed else []), *report.notes(advice)]
    runs = _for_the_trainer(advice)
    if args.write:
        _write(args.write, runs)
    if args.json:
        output.emit(_data(advice, runs, notes))
    else:
        _print(advice, runs, notes, args.write)
    return 0


def _for_the_trainer(advice: Advice) -> Advice:
    """The same question, answered with what the reference trainer can do."""
    if advice.best is None or _is_of_the_trainer(advice.best.config):
        return advice
    return advise(advice.model, advice.training, advice.cluster, _is_of_the_trainer)


def _is_of_the_trainer(config: ParallelConfig) -> bool:
    return not report.lacking(config)


def _list(*, as_json: bool) -> None:
    rows = [dataclasses.asdict(gpu) for gpu in gpus.known().values()]
    if as_json:
        output.emit(rows)
        return
    output.table(
        ["gpu", "memory", "prices", "source"],
        [[row["name"], units.memory(row["memory"]), row["prices"], row["source"]] for row in rows],
    )


def _write(path: Path, advice: Advice) -> None:
    """Write the recommended job file; an existing file is kept."""
    if advice.best is None:
        raise UsageError(
            "no strategy of the reference trainer fits, so no job file was written",
            hint="run without --write to see all strategies",
        )
    text = report.job_file(advice.model, advice.training, advice.cluster, advice.best.config)
    paths.create(path, text)


def _print(advice: Advice, runs: Advice, notes: list[str], written: Path | None) -> None:
    for line in (*report.subject(advice), "", report.recommendation(advice)):
        output.say(line)
    if runs is not advice and advice.best:
        output.say(report.not_in_trainer(report.lacking(advice.best.config), runs))
    output.say("")
    rows = [_row(each, advice) for each in advice.candidates]
    output.table(_COLUMNS, rows, headings_in_pipe=True)
    output.say("")
    for line in notes:
        output.say(line)
    if written:
        if other := report.difference(advice.model, advice.training):
            output.say(other)
        check = shell.command("deploykit", "check", written)
        output.say(f"wrote {written}; next: `{check}`")


def _row(each: Candidate, advice: Advice) -> tuple[str, ...]:
    need, step, mark = each.memory, each.step, "*" if each is advice.best else ""
    sizes = (
        *(need.total, need.parameters, need.gradients, need.optimizer, need.activations),
        *(need.logits, need.working, need.reserve, step.sent),
    )
    cells = [f"{size / _GIB:.1f}" for size in sizes]
    waits = f"{(step.exposed + step.bubble) / step.seconds:.0%}"
    seconds = f"{step.seconds:.3g}"
    name, verdict = f"{each.strategy}{mark}", advice.verdict(each)
    return (name, verdict, *cells, seconds, waits, report.degrees(each.config))


def _data(advice: Advice, runs: Advice, notes: list[str]) -> dict[str, Any]:
    return {
        "case": advice.case,
        "best": advice.best.strategy if advice.best else None,
        "second": advice.second.strategy if advice.second else None,
        "enough_nodes": advice.enough,
        "trainer": {
            "best": runs.best.strategy if runs.best else None,
            "lacks": report.lacking(advice.best.config) if advice.best else [],
        },
        "why": [report.recommendation(advice)],
        "notes": notes,
        "parameters": advice.model.parameters,
        "candidates": [_candidate(each, advice) for each in advice.candidates],
    }


def _candidate(each: Candidate, advice: Advice) -> dict[str, Any]:
    return {
        "strategy": each.strategy,
        "fits": each.fits,
        "verdict": advice.verdict(each),
        "config": dataclasses.asdict(each.config),
        "bytes": {**dict(each.memory.parts), "total": each.memory.total},
        "host_bytes": each.memory.host,
        "seconds": {
            "total": each.step.seconds,
            "compute": each.step.compute,
            "bubble": each.step.bubble,
            "communication": each.step.communication,
            "exposed": each.step.exposed,
        },
        "mfu": round(report.mfu(advice, each), 4),
        "sends": {transfer.name: transfer.sent for transfer in each.step.transfers},
    }
