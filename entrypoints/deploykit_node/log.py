"""The launcher's own lines in the log: a UTC time, ``[node N]``, and a sentence."""

from __future__ import annotations

import sys
import time


def now() -> str:
    """The current time in UTC with milliseconds, ``2026-11-21T01:46:08.123Z``."""
    seconds = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def say(node: int, text: str) -> None:
    """Print `text` to stderr as the launcher of node `node`."""
    print(f"{now()} [node {node}] {text}", file=sys.stderr, flush=True)
