"""Values of arguments that several verbs have."""

from __future__ import annotations

import argparse

from deploykit.job.decode import DURATION


def count(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(10**18)) and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def rank(text: str) -> int:
    """The number of a rank. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(10**9))):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank, such as 0")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, from a number or a time such as 30m. Raises ArgumentTypeError."""
    try:
        number = float(text) if text.replace(".", "", 1).isdecimal() else DURATION.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s or 30m") from None
    return float(number)
