"""How fast `deploykit diagnose` reads a large log, beside `grep -E` with as many literals.

The log is one of many ranks: steps with other numbers in each line, progress bars, what NCCL tells
at INFO, warnings, and one failure at the end. `grep -E` gets every literal of the rules, in two
ways: as it is, and with a wildcard behind it. Both count the lines
that match. Wall and CPU seconds, and the peak memory of the process and of those that it started.
The ratio is the worst of both: against the faster grep, of wall and of CPU.
`make bench` runs this; it ends with 1 when a limit is missed or the cause is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deploykit.diagnose import cause_rules

RANKS = 64
TIMES = 4
"""At most so many times the seconds of grep."""
MEMORY = 200
"""MB, at most."""
_LINES = 20_000
"""Lines that are drawn and written at once."""
_WORDS = (
    "shard tokens batch sampler prefetch gradient norm warm-up cosine schedule attention cache "
    "bucket hook epoch validation perplexity throughput memory allocated reserved optimizer "
    "scaler checkpoint saved resumed profiler worker queue reader file index error rate retries "
    "time elapsed node device rank group barrier default failed 0 found none loaded state"
)
_TEMPLATES = (
    "[rank{rank}]: step {step} | loss {real:.4f} | grad norm {small:.3f} | {big} tokens/s",
    "[rank{rank}]: {{'loss': {real:.4f}, 'learning_rate': {small:.2e}, 'epoch': {small:.2f}}}",
    "{rank}: 2026-01-{day:02d} 10:{minute:02d}:{day:02d},{big} - trainer - INFO - {words}",
    (
        " iteration {step}/ 500000 | consumed samples: {big} | elapsed time per iteration (ms): "
        "{real:.1f} | lm loss: {small:.4E} | number of nan iterations:   0 |"
    ),
    (
        "n{node}:{step}:{big} [{gpu}] NCCL INFO Channel {day:02d}/0 : {rank}[{gpu}] -> {day}[0] "
        "via P2P/CUMEM"
    ),
    (
        "n{node}:{step}:{big} [{gpu}] NCCL INFO comm 0x{big:x} rank {rank} nranks 64 cudaDev {gpu} "
        "nvmlDev {gpu} busId {step:x} commId 0x{big:x} - Init COMPLETE"
    ),
    (
        "Epoch {day}:  {minute}%|####      | {step}/{big} [{minute}:{day:02d}<{minute}:00, "
        "{small:.2f}it/s, v_num={day}, train_loss={small:.3f}]"
    ),
    "[rank{rank}]: validation error {real:.4f}, {words} {step}",
    "[rank{rank}]: saved /scratch/run-{day}/step_{step}/shard_{rank}.pt in {small:.2f} s, {words}",
    "[rank{rank}]: data reader {day}: {words}; {words}; read {big} bytes, time {real:.2f} ms",
)
_SELDOM = (
    "[rank{rank}]:[W{day} 10:{minute:02d} ProcessGroupNCCL.cpp:{step}] Warning: {words}",
    "/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:{day}: UserWarning: {words}",
    "wandb: Network error (ReadTimeout), entering retry loop. {words}",
    "n{node}:{step}:{big} [{gpu}] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. {words}",
    "[rank{rank}]: reader {day} failed to open part {step}, retrying ({words})",
)
_LAST = "[rank17]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


class Cost(NamedTuple):
    """What a command took, with all that it started."""

    wall: float
    cpu: float
    memory: float
    """MB."""
    output: str

    def ratio(self, other: Cost) -> float:
        """The larger of two: of wall seconds and of CPU seconds."""
        return max(self.wall / other.wall, self.cpu / other.cpu)


def lines(draw: random.Random, step: int) -> Iterator[str]:
    """Some lines of a log, one in two hundred of them a warning."""
    words = _WORDS.split()
    for number in range(_LINES):
        template = draw.choice(_SELDOM if number % 200 == 0 else _TEMPLATES)
        yield template.format(
            rank=draw.randrange(RANKS),
            node=draw.randrange(8),
            gpu=draw.randrange(8),
            day=draw.randrange(1, 29),
            minute=draw.randrange(60),
            step=step + number,
            big=draw.randrange(10**6, 10**9),
            real=draw.random() * 1000,
            small=draw.random() * 10,
            words=" ".join(draw.sample(words, 5)),
        )


def write(path: Path, size: int) -> None:
    """A log of `size` bytes."""
    draw, written, step = random.Random(1), 0, 0
    with path.open("w", encoding="utf-8") as log:
        while written < size:
            written += log.write("\n".join(lines(draw, step)) + "\n")
            step += _LINES
        log.write(_LAST)
    print(f"{step + 1} lines of {RANKS} ranks, {written / 1e6:.0f} MB")


def patterns(*, wildcard: bool) -> list[str]:
    """Every literal of deploykit's rules, as `grep -E` takes them."""
    literals = {text for _, each in cause_rules.load().patterns() for text in each.literals}
    texts = (re.sub(r"([][\\.*^$+?(){}|])", r"\\\1", text) for text in sorted(literals))
    return [f"{text}.*[0-9]" if wildcard else text for text in texts]


def cost(argv: Sequence[str]) -> Cost:
    """Run a command, and count."""
    begin = time.monotonic()
    env = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(argv, stdout=output, env=env)
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # waited for
        wall = time.monotonic() - begin
        output.seek(0)
        cpu = used.ru_utime + used.ru_stime
        return Cost(wall, cpu, used.ru_maxrss / 1000, output.read())


def measure(folder: Path, size: int) -> dict[str, Cost]:
    """Each of the three over the same log, which `wc` brings into memory.

    Another process writes it: a process starts with the peak memory of the one that forked it.
    """
    log = folder / "run.log"
    found = {}
    subprocess.run([sys.executable, __file__, "--write", log, str(size)], check=True)
    cost(["wc", str(log)])
    for name, wildcard in (("grep -E, texts", False), ("grep -E, wildcards", True)):
        listed = folder / "patterns"
        every = patterns(wildcard=wildcard)
        listed.write_text("\n".join(every) + "\n")
        found[name] = cost(["grep", "-a", "-c", "-E", "-f", str(listed), str(log)])
    print(f"{len(every)} patterns")
    argv = [sys.executable, "-m", "deploykit", "diagnose", "--json", str(log)]
    found["deploykit diagnose"] = cost(argv)
    return found


def main() -> int:
    """Write, measure, print, and return 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the log (%(default)s)")
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(Path(args.write[0]), int(args.write[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.megabytes * 10**6)
    row = "{:<22}{:>9}{:>9}{:>9}".format
    print(row("", "wall (s)", "CPU (s)", "MB"))
    for name, each in found.items():
        print(row(name, f"{each.wall:.2f}", f"{each.cpu:.2f}", f"{each.memory:.0f}"))
    *greps, ours = found.values()
    ratio = max(ours.ratio(grep) for grep in greps)
    causes = [each["cause"] for each in json.loads(ours.output)["causes"]]
    print(f"ratio {ratio:.2f} (at most {TIMES}), {ours.memory:.0f} MB (at most {MEMORY}), {causes}")
    return 0 if ratio <= TIMES and ours.memory <= MEMORY and causes == ["cuda_oom"] else 1


if __name__ == "__main__":
    sys.exit(main())
