"""The report that all three examples end with.

Staleness of a gradient: how many updates the weights have got between the moment when it read them
and the moment when it is applied. 0 is what synchronous training has.
"""

from __future__ import annotations

from collections import Counter

_BAR = 40
_SINGLE = 4


def mean(counts: Counter[int]) -> float:
    return sum(stale * count for stale, count in counts.items()) / counts.total()


def summary(counts: Counter[int]) -> str:
    return f"staleness mean {mean(counts):.2f}, max {max(counts)} of {counts.total()} gradients"


def histogram(counts: Counter[int]) -> str:
    """One line for each staleness up to 3, then one for 4 to 7, 8 to 15 and so on."""
    bins: Counter[tuple[int, int]] = Counter()
    for stale, count in counts.items():
        low = 1 << (stale.bit_length() - 1) if stale >= _SINGLE else stale
        bins[low, 2 * low - 1 if stale >= _SINGLE else stale] += count
    lines = [f"{'staleness':>11} {'gradients':>9}"]
    for (low, high), count in sorted(bins.items()):
        name = str(low) if low == high else f"{low} to {high}"
        bar = "#" * round(_BAR * count / counts.total())
        lines.append(f"{name:>11} {count:>9} {bar}".rstrip())
    return "\n".join(lines)


def headline(mode: str, result: tuple[float, float], rate: float) -> str:
    """`result` is the accuracy and the loss on the test images, `rate` is in samples a second."""
    right, loss = result
    return f"{mode}: test accuracy {right:.4f}, loss {loss:.6f}, {rate:.0f} samples/s"


def report(mode: str, result: tuple[float, float], rate: float, counts: Counter[int]) -> str:
    return "\n".join((headline(mode, result, rate), histogram(counts), summary(counts)))
