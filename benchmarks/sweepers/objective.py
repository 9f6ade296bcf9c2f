"""The objective of all sweepers: sleeps for a time that depends on its argument, and prints a loss.

    python objective.py --log FILE --index 3

Appends a line of JSON to FILE: when it began and ended.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

TRIALS = 40
_SHORTEST, _SPREAD = 2.0, 8.0


def seconds(index: int) -> float:
    """How long a trial takes: 2 to 16 s, evenly on a logarithmic scale."""
    return _SHORTEST * _SPREAD ** random.Random(index).random()


def evaluate(index: int, log: str) -> float:
    """The loss of a trial."""
    began = time.time()
    time.sleep(seconds(index))
    record = {"index": index, "began": began, "ended": time.time()}
    with Path(log).open("a") as file:
        file.write(json.dumps(record) + "\n")
    return float((index - 17) ** 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--index", type=int, required=True)
    given = parser.parse_args()
    print(f"loss={evaluate(given.index, given.log)}")
