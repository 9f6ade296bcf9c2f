"""The report printed by all three examples.

The staleness of a gradient is the number of weight updates between reading the weights for it and
applying it. In synchronous training, it is 0.
"""

from __future__ import annotations

from collections import Counter

_BAR = 40
_SINGLE = 4


def mean(counts: Counter[int]) -> float:
    """The mean staleness, from counts by staleness."""
    return sum(stale * count for stale, count in counts.items()) / counts.total()


def summary(counts: Counter[int]) -> str:
    """Mean and maximum in one line."""
    return f"staleness mean {mean(counts):.2f}, max {max(counts)} of {counts.total()} gradients"


def histogram(counts: Counter[int]) -> str:
    """One line per staleness up to 3, then one each for 4 to 7, 8 to 15 and so on."""
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
    """The first line; `result` is test accuracy and loss, `rate` is in samples per second."""
    right, loss = result
    return f"{mode}: test accuracy {right:.4f}, loss {loss:.6f}, {rate:.0f} samples/s"


def report(mode: str, result: tuple[float, float], rate: float, counts: Counter[int]) -> str:
    """Headline, histogram and summary."""
    return "\n".join((headline(mode, result, rate), histogram(counts), summary(counts)))
