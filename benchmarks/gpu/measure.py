"""Every strategy, precision, speed, memory and failure on the GPUs of this machine.

    make gpu                                      # writes results.md, after each section
    python benchmarks/gpu/measure.py speed steps  # these sections again; the others stay
    python benchmarks/gpu/measure.py --dry        # all of it in a small form on the CPU

Exits with code 1 if a strategy fails or trains something else than one process does, if a step
waits for the GPU or attention is not fused, if `diagnose` does not name a failure, or if a verb
does not see the GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import failures
import runs
import sight
import torch
from runs import Machine, Result, Size

sys.path.insert(0, str(runs.ENTRYPOINTS))

from trainer import arguments
from trainer.errors import ConfigError
from trainer.parallel.layout import STRATEGIES, Layout
from trainer.parallel.process_group import DistributedContext

PAGE = runs.HERE / "results.md"
TOLERANCE = 1e-3
"""Largest relative difference of a loss from that of one process, in fp32."""
_GIB = 2**30
_AT_ONCE = 4
"""Runs of the small model at a time; where speed is measured, one."""
_REFUSED = re.compile(r"cannot (arrange|divide) \d+ rank")
"""What the trainer says of a strategy that needs more ranks."""
_NO_FLOAT8 = re.compile(r"--precision float8 requires .*")
_GPUS = {"H200": "h200", "H100": "h100", "B200": "b200", "A100": "a100-80gb", "L40S": "l40s"}
_GPUS |= {"A10G": "a10g", "L4": "l4", "T4": "t4", "V100": "v100"}
"""Names of `deploykit advise`, by a part of the driver's."""


class Section(NamedTuple):
    """A table of the page."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    failed: list[str]


class Sizes(NamedTuple):
    """The models: one for correctness, and two for speed."""

    small: Size
    gpt2: Size
    llama: Size


_GPT2, _LLAMA = "language_models:gpt2", "language_models:llama"


REAL = Sizes(
    Size("4 layers of 256", 4, 256, 4, 256, 8, 20),
    Size("GPT-2, 124 million parameters", 12, 768, 12, 1024, 16, 30, _GPT2),
    Size("Llama, 1.24 billion parameters", 16, 2048, 32, 2048, 4, 20, _LLAMA),
)
DRY = Sizes(
    Size("2 layers of 32", 2, 32, 4, 32, 4, 6),
    Size("GPT-2 with 2 layers of 32", 2, 32, 4, 32, 4, 6, _GPT2, 512),
    Size("Llama with 2 layers of 64", 2, 64, 8, 32, 2, 6, _LLAMA, 512),
)


def strategies(machine: Machine, sizes: Sizes) -> Section:
    """Each strategy on all GPUs, against one process with the same global batch, in fp32."""
    size, ranks = sizes.small, machine.ranks
    names = [name for name in STRATEGIES if name not in {"single", "dp"}]
    words = {n: [f"--strategy={n}", *["--micro-batches=4"] * STRATEGIES[n].pipeline] for n in names}
    refused = {name for name in names if _refused(size, ranks, words[name])}
    single = ("single", 1, ["--strategy=single", f"--batch-size={size.batch * ranks}"])
    others = [(name, ranks, words[name]) for name in names if name not in refused]
    (_, alone), *found = _trained(machine, size, [single, *others])
    rows, failed = [_row("single", 1, alone, "-")], _errors("single", alone)
    for name, result in found:
        difference = result.difference(alone)
        rows.append(_row(name, ranks, result, f"{difference:.1e}"))
        failed += _errors(name, result)
        if not result.error and difference > TOLERANCE:
            failed.append(f"{name} differs from one process by {difference:.1e}")
    rows += [(name, str(ranks), "more ranks needed", "") for name in names if name in refused]
    text = (
        f"{size.name}, {size.steps} steps. "
        "Difference: the largest relative change in loss, against one process."
    )
    return Section("Strategies", text, ("strategy", *_HEADER), rows, failed)


def _trained(
    machine: Machine, size: Size, wanted: Sequence[tuple[str, int, Sequence[str]]]
) -> Iterator[tuple[str, Result]]:
    """Train each, by name, with a number of ranks and options; on GPUs several at a time."""
    with ThreadPoolExecutor(_AT_ONCE if machine.gpus else 1) as pool:
        found = [
            (name, pool.submit(runs.train, machine, size, ranks, *words))
            for name, ranks, words in wanted
        ]
        yield from ((name, each.result()) for name, each in found)


def _refused(size: Size, ranks: int, words: Sequence[str]) -> bool:
    """Whether the strategy needs more ranks, as the trainer itself finds, without starting it."""
    try:
        Layout(
            arguments.parse([*size.words(ranks), *words]),
            DistributedContext(0, ranks, torch.device("cpu")),
        )
    except ConfigError as error:
        return _REFUSED.search(str(error)) is not None
    return False


def options(machine: Machine, sizes: Sizes) -> Section:
    """Precision, compilation and memory saving, on all GPUs."""
    size, ranks = sizes.small, machine.ranks
    cases = (
        ("fp32", ()),
        ("bf16", ("--precision=bf16",)),
        ("fp16", ("--precision=fp16",)),
        ("float8", ("--precision=float8",)),
        ("bf16, compiled", ("--precision=bf16", "--compile")),
        ("bf16, full recompute", ("--precision=bf16", "--checkpoint-activations")),
        ("bf16, selective recompute", ("--precision=bf16", "--checkpoint-activations=selective")),
        ("fsdp with CPU offload", ("--strategy=fsdp", "--offload")),
        ("optimizer: for-loop", ("--optimizer-implementation=for-loop",)),
        ("optimizer: foreach", ("--optimizer-implementation=foreach",)),
        ("optimizer: fused", ("--optimizer-implementation=fused",)),
        ("compressed gradients", ("--compress=fp16",)),
        ("context parallelism", (f"--context-parallel={ranks}",)),
    )
    wanted = [(name, ranks, ["--strategy=ddp", *words]) for name, words in cases]
    rows, failed, first = [], [], None
    for name, found in _trained(machine, size, wanted):
        first = first or found
        if refused := _NO_FLOAT8.search(found.error):
            rows.append((name, str(ranks), refused.group(), ""))
            continue
        rows.append(_row(name, ranks, found, f"{found.difference(first):.1e}"))
        failed += _errors(name, found)
    text = (
        f"{size.name}, ddp unless noted. "
        "Difference: the largest relative change in loss, against fp32."
    )
    return Section("Options", text, ("option", *_HEADER), rows, failed)


_HEADER = ("ranks", "difference", "memory per rank")


def _row(name: str, ranks: int, result: Result, difference: str) -> tuple[str, ...]:
    if result.error:
        return name, str(ranks), f"failed: {result.error}", ""
    return name, str(ranks), difference, f"{result.memory / _GIB:.2f} GiB"


def _errors(name: str, result: Result) -> list[str]:
    return [f"{name}: {result.error}"] if result.error else []


def speed(machine: Machine, sizes: Sizes) -> Section:
    """GPT-2 in the trainer, and in the hand-written loop."""
    return _beside_by_hand("Speed", machine, sizes.gpt2)


def llama(machine: Machine, sizes: Sizes) -> Section:
    """The same of a larger model."""
    return _beside_by_hand("Llama", machine, sizes.llama)


def _beside_by_hand(title: str, machine: Machine, size: Size) -> Section:
    rows, failed = [], []
    for name, words in (("as it is", ()), ("compiled", ("--compile",))):
        found = runs.train(machine, size, machine.ranks, *_FAST, *words)
        by_hand = failures.by_hand(machine, size, *words) if not found.error else 0.0
        ratio = f"{found.tokens_per_second / by_hand:.2f}" if by_hand else "-"
        rows.append((*_rate(name, found), f"{by_hand:,.0f}", ratio))
        failed += _unless_too_large(name, found)
        failed += [] if by_hand or found.error else [f"{name}: the hand-written loop failed"]
    text = f"{size.name}. bf16, ddp and the fused AdamW, in the trainer and in a hand-written loop."
    return Section(title, text, (*_RATE, "by hand", "ratio"), rows, failed)


def replicas(machine: Machine, sizes: Sizes) -> Section:
    """DataParallel, in one process, beside DDP: the same global batch on all GPUs."""
    size, ranks = sizes.gpt2, machine.ranks
    batch = f"--batch-size={size.batch * ranks}"
    rows, failed = [], []
    for name, processes in (("single", 1), ("dp", 1), ("manual", ranks), ("ddp", ranks)):
        if name in {"dp", "manual"} and (ranks == 1 or (name == "dp" and not machine.gpus)):
            rows.append((name, str(processes), "more GPUs needed", "", ""))
            continue
        found = runs.train(machine, size, processes, f"--strategy={name}", batch, *_BF16)
        _, rate, memory, _ = _rate(name, found)
        steps = found.tokens_per_second / (size.batch * ranks * size.sequence)
        rows.append((name, str(processes), f"{steps:.2f}" if not found.error else "", rate, memory))
        failed += _unless_too_large(name, found)
    text = f"{size.name}. bf16, {size.batch * ranks} sequences a step for {ranks} GPU(s)."
    header = ("strategy", "processes", "steps/s", "tokens/s", "memory of a rank")
    return Section("Replicas", text, header, rows, failed)


def tuning(machine: Machine, sizes: Sizes) -> Section:
    """What the options do for the speed and the memory of the larger model."""
    cases = (
        ("bf16, compiled", ("--compile",)),
        ("full recompute", ("--compile", "--checkpoint-activations")),
        ("selective recompute", ("--compile", "--checkpoint-activations=selective")),
        ("float8", ("--compile", "--precision=float8")),
        ("fsdp", ("--compile", "--strategy=fsdp")),
    )
    rows, failed = [], []
    for name, words in cases:
        found = runs.train(machine, sizes.llama, machine.ranks, *_FAST, *words)
        rows.append(_rate(name, found))
        failed += _unless_too_large(name, found)
    text = f"{sizes.llama.name}. All compiled, with ddp unless noted."
    return Section("Tuning", text, _RATE, rows, failed)


_BF16 = ("--precision=bf16",)
_FAST = ("--strategy=ddp", "--optimizer-implementation=fused", *_BF16)
_RATE = ("what", "tokens/s", "memory per rank", "MFU")


def _rate(name: str, result: Result) -> tuple[str, ...]:
    if result.error:
        large = "out of memory" in result.error
        return name, "needs more memory" if large else f"failed: {result.error}", "", ""
    share = "-" if result.mfu is None else f"{result.mfu:.1%}"
    return name, f"{result.tokens_per_second:,.0f}", f"{result.memory / _GIB:.2f} GiB", share


def _unless_too_large(name: str, result: Result) -> list[str]:
    """What failed; a GPU with too little memory for a model is no failure."""
    return [] if "out of memory" in result.error else _errors(name, result)


def memory(machine: Machine, sizes: Sizes) -> Section:
    """What `deploykit advise` predicts, beside what was allocated."""
    gpu = next((name for part, name in _GPUS.items() if part in machine.gpu), "cpu")
    rows, failed = [], []
    for name in ("ddp", "zero3") if machine.ranks > 1 else ("single",):
        predicted = failures.predicted(machine, sizes.gpt2, gpu, name)
        found = runs.train(machine, sizes.gpt2, machine.ranks, f"--strategy={name}", *_BF16)
        failed += _errors(name, found)
        measured = f"{found.memory / _GIB:.2f} GiB"
        ratio = f"{predicted / found.memory:.2f}" if found.memory and predicted else "-"
        rows.append((name, f"{predicted / _GIB:.2f} GiB", measured, ratio))
    text = f"{sizes.gpt2.name}. The prediction excludes the CUDA context."
    return Section("Memory", text, ("strategy", "predicted", "measured", "ratio"), rows, failed)


def steps(machine: Machine, sizes: Sizes) -> Section:
    """Whether a step that is not logged waits for the GPU, and which attention it uses."""
    waiting = failures.waits(machine, sizes.small)
    program = runs.HERE / "flash_only.py"
    slow = runs.train(machine, sizes.small, machine.ranks, *_BF16, program=program).error
    rows = [
        ("a step without logging", waiting or "does not wait for the GPU"),
        ("attention in bf16", slow or "is FlashAttention"),
    ]
    text = "Checked with `set_sync_debug_mode` and `sdpa_kernel`."
    return Section("Steps", text, ("what", "result"), rows, [one for one in (waiting, slow) if one])


def diagnosed(machine: Machine, _: Sizes) -> Section:
    """Failures made on purpose, through the launcher, and what `diagnose` says of them."""
    rows, failed = [], []
    for name, expected, said in failures.diagnosed(machine):
        rows.append((name, expected, said))
        if said != expected:
            failed.append(f"diagnose says {said} of {name}, expected {expected}")
    text = "Each was run with `deploykit submit` on this machine; the first line is the preflight."
    return Section("Failures", text, ("failure", "expected", "diagnosed"), rows, failed)


def verbs(machine: Machine, sizes: Sizes) -> Section:
    """What the launcher sees of a training that runs on the GPU."""
    rows, failed = [], []
    for name, said, problem in sight.seen(machine, sizes.gpt2):
        rows.append((name, said.replace("|", "/")))
        failed += [f"{name}: {problem}"] if problem else []
    text = f"{sizes.gpt2.name}, training on one rank."
    return Section("Verbs", text, ("verb", "output"), rows, failed)


SECTIONS: dict[str, Callable[[Machine, Sizes], Section]] = {
    "strategies": strategies,
    "options": options,
    "speed": speed,
    "llama": llama,
    "replicas": replicas,
    "tuning": tuning,
    "memory": memory,
    "steps": steps,
    "failures": diagnosed,
    "verbs": verbs,
}


def page(machine: Machine, sections: Sequence[Section], day: dt.date, before: str = "") -> str:
    """The page of the documentation; sections of the page before that were not measured stay."""
    parts = {part.partition("\n")[0]: part for part in before.split("\n## ")[1:]}
    parts |= {one.title: "\n".join(_lines(one)) for one in sections}
    titles = [*map(str.capitalize, SECTIONS)]
    missing = [title for title in titles if title not in parts]
    head = "\n".join(_head(machine, day, missing))
    return "\n## ".join([head, *(parts[title] for title in titles if title in parts)])


def _head(machine: Machine, day: dt.date, missing: Sequence[str]) -> Iterator[str]:
    yield "<!-- Written by `make gpu`; change benchmarks/gpu/measure.py. -->\n\n# On GPUs\n"
    yield f"Measured on {day} with `make gpu`:\n"
    yield from (f"* {fact}" for fact in machine.facts)
    yield from ("", f"Not measured here: {', '.join(missing)}.") if missing else ()
    yield ""


def _lines(section: Section) -> Iterator[str]:
    yield f"{section.title}\n\n{section.text}\n"
    yield f"| {' | '.join(section.header)} |"
    yield f"|{' --- |' * len(section.header)}"
    yield from (f"| {' | '.join(row)} |" for row in section.rows)
    yield from (f"\nFailed: {text}" for text in section.failed)
    yield ""


def main() -> int:
    """Measure everything, or some sections; without `--dry`, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="a small form on the CPU; no page")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    given = parser.parse_args()
    if unknown := set(given.sections) - SECTIONS.keys():
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; the sections are {', '.join(SECTIONS)}"
        )
    machine = runs.machine(dry=given.dry)
    if not given.dry and not machine.gpus:
        print("no GPU was found: `python benchmarks/gpu/measure.py --dry` tries it on the CPU")
        return 1
    return _measure(machine, given.sections, dry=given.dry)


def _measure(machine: Machine, sections: Sequence[str], *, dry: bool) -> int:
    """Measure, and write the page after each section; 1 if anything failed."""
    found, before = [], PAGE.read_text("utf-8") if sections else ""
    for name in sections or SECTIONS:
        started = time.monotonic()
        found.append(SECTIONS[name](machine, DRY if dry else REAL))
        print("\n" + "\n".join(_lines(found[-1])), flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if not dry:
            PAGE.write_text(page(machine, found, dt.datetime.now(dt.UTC).date(), before), "utf-8")
    return int(any(one.failed for one in found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        failures.HOME = Path(home)
        sys.exit(main())
