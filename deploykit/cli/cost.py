"""Estimate what a job costs on its backend: low, likely and worst case.

Without --backend, covers the file's `backend` and every backend with a section in it, else the
default backend.

deploykit cost exp.yaml --explain               show how each amount is calculated
deploykit cost --set resources.nodes=4 --json   for programs
deploykit cost --refresh                        fetch current prices first
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from deploykit.backends import base as backend
from deploykit.cli import describe, output
from deploykit.cost import cap, money
from deploykit.cost.estimate import CASES, Estimate
from deploykit.job.file import JobFile, Option
from deploykit.run import lifecycle

SHARED = ("job", "only_backend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--explain", action="store_true", help="show how each amount is calculated")
    parser.add_argument(
        "--refresh", action="store_true", help="fetch current prices from the provider first"
    )
    parser.add_argument(
        "--max-cost", metavar="MONEY", help="compare the worst case with this cap, such as '50 USD'"
    )


def run(args: argparse.Namespace) -> int:
    names = [args.backend] if args.backend else lifecycle.named(args.job, args.set)
    records = [_cost(name, args, heading=len(names) > 1) for name in names]
    if args.json:
        output.emit(records[0] if len(records) == 1 else {"backends": records})
    return 0


def _cost(name: str, args: argparse.Namespace, *, heading: bool) -> dict[str, Any]:
    """Return what the job costs on one backend, and print it unless JSON is wanted."""
    file = _job(name, args)
    options = file.sections[name]
    engine = backend.require(name, "cost")
    if args.refresh and (args.backend or backend.offers(engine, "refresh_prices")):
        prices = backend.require(name, "refresh_prices")
        output.note(prices.refresh_prices(file.job, options))
    estimate = engine.cost(file.job, options)
    others: Mapping[str, Estimate] = {}
    if backend.offers(engine, "refresh_prices"):
        others = engine.alternatives(file.job, options)
    use = describe.budget(file.job.budget) if file.job.budget is not None else None
    if not args.json:
        if heading and not estimate.free:
            output.say(f"{name}:")
        _show(name, estimate, others, explain=args.explain)
        if use is not None:
            output.say(str(use))
        if file.job.max_cost is not None and estimate.charges:
            _show_cap(money.parse(file.job.max_cost), estimate)
    more: dict[str, Any] = {"others": {way: other.cases() for way, other in others.items()}}
    more |= {"max_cost": file.job.max_cost, "budget": use and use.data()}
    return {"backend": name, **estimate.data(), **more}


def _job(name: str, args: argparse.Namespace) -> JobFile:
    """The job for one backend; its cap is shown and not enforced. Raises JobFileError."""
    own = [Option("--max-cost", f"max_cost={args.max_cost}")] if args.max_cost else []
    file = lifecycle.load(args.job, [*args.set, *own], [name], args.arguments)
    others = ("max_cost", "stop_at_cap", "budget")
    problems = [one for one in lifecycle.problems(file, name) if one.path not in others]
    output.warnings(file.raise_on(problems))
    return file


def _show(name: str, estimate: Estimate, others: Mapping[str, Estimate], *, explain: bool) -> None:
    """Print the cases, those of the same job bought in another way, and where prices come from."""
    if estimate.free:
        output.say(f"{name}: nothing is billed ({estimate.free})")
        return
    for text in estimate.unknown:
        output.say(f"unknown: {text}")
    for case in CASES:
        output.say(f"{case:<7} {estimate.text(case)}")
        if explain:
            output.say(*(f"  {line}" for line in estimate.explained(case)))
    for other, its in others.items():
        low, worst = its.text("low"), its.text("worst")
        output.say(f"{other}: {low} to {worst}")
    if estimate.source:
        output.say(f"prices: {estimate.source}")
    output.note(*(f"warning: {text}" for text in estimate.warnings))
    if explain:
        output.say(*estimate.notes)


def _show_cap(limit: money.Money, estimate: Estimate) -> None:
    """Print whether the job may cost more than its cap."""
    if limit.currency != estimate.currency:
        output.say(f"max_cost is in {limit.currency}, but the prices are in {estimate.currency}")
    elif cap.exceeds(limit, estimate):
        output.say(f"max_cost: the job could cost more than {limit}, so `submit` would refuse it")
    else:
        output.say(f"max_cost: the job cannot cost more than {limit}")
