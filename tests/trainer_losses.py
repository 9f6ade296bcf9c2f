"""What the trainer wrote about a run."""

from __future__ import annotations

import json
from pathlib import Path


def losses(folder):
    """The loss at each step, from the output folder."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
