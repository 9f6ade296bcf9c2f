"""Sizes, durations and plurals, as people read them."""

from __future__ import annotations

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def size(count: float) -> str:
    """Bytes of files, in powers of 1000: ``812 B``, ``1.2 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:  # noqa: PLR2004 - the step between two units
            return f"{count:.1f} {unit}".replace(".0 B", " B")
        count /= 1000
    return f"{count:.1f} GB"


def memory(count: float) -> str:
    """Bytes of memory, in powers of 1024: ``812 MiB``, ``1.2 GiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def span(seconds: float | None) -> str:
    """A duration in its two largest units, ``1h 5m``; ``-`` where it is not known."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))  # the clock may have been set back
    for number, (unit, name) in enumerate(_UNITS[:-1]):
        if whole >= unit:
            smaller, its_name = _UNITS[number + 1]
            return f"{whole // unit}{name} {whole % unit // smaller}{its_name}"
    return f"{whole}s"


def exact_span(seconds: int) -> str:
    """A duration with all its units: ``1h 2m``, ``90s`` is ``1m 30s``."""
    parts: list[str] = []
    for unit, name in _UNITS:
        count, seconds = divmod(seconds, unit)
        parts += [f"{count}{name}"] if count else []
    return " ".join(parts) or "0s"


def plural(count: int, noun: str, many: str = "") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"
