"""The models of examples/models with every strategy, compared with one process: a table.

    .venv/bin/python benchmarks/models.py > table.md

Each cell is the largest relative difference of the loss in 50 steps. Takes half an hour or more.
What has been measured is kept in build/models.json, and not measured again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "entrypoints")]

from tests.frameworks.models import LAYOUTS, MODELS, Pools, options, reference  # noqa: E402
from tests.frameworks.test_models import write_images  # noqa: E402

STEPS = 50
KEPT = ROOT / "build/models.json"


def main() -> None:
    """Measure what has not been measured, and print the table and the reasons of refusals."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    KEPT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_images(folder / "images")
        with Pools(folder) as pools:
            for model, layout in sorted(product(MODELS, LAYOUTS), key=expense):
                measure(model, layout, kept, pools, folder)
    print(table(kept))
    print("\n".join(sorted({f"* {each}" for each in kept.values() if isinstance(each, str)})))


def expense(run: tuple[str, str]) -> tuple[bool, bool]:
    """What to sort runs by, the quickest first."""
    model, layout = run
    return model == "ResNet-18", layout.startswith("8")


def measure(model: str, layout: str, kept: dict, pools: Pools, folder: Path) -> None:
    """Train `model` with `layout`, and with one process, unless that has been done."""
    single = reference(model, layout)
    for each in (single, layout):
        if key(model, each) not in kept:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                given = (*options(model, folder / "images"), "--steps", str(STEPS))
                found = pools.train(Path(own), each, *given)
            kept[key(model, each)] = list(found.values()) if isinstance(found, dict) else found[0]
            KEPT.write_text(json.dumps(kept))
            print(model, each, cell(model, each, kept), file=sys.stderr, flush=True)


def key(model: str, layout: str) -> str:
    """The name of a run in the file."""
    return f"{model}: {layout}"


def cell(model: str, layout: str, kept: dict) -> str:
    """The largest relative difference of a loss, or that the strategy is refused."""
    found = kept.get(key(model, layout), [])
    if isinstance(found, str):
        return "refused" if found.startswith("ConfigError") else "failed"
    if not found:
        return "not measured"
    losses = zip(found, kept.get(key(model, reference(model, layout)), []), strict=False)
    return f"{max((abs(one / other - 1) for one, other in losses), default=0):.1e}"


def table(kept: dict) -> str:
    """The cells in Markdown, a row for each strategy."""
    rows = [["ranks, strategy", *MODELS], ["---"] * (1 + len(MODELS))]
    for layout in LAYOUTS:
        ranks, strategy = layout.split(" ", 1)
        rows.append([f"{ranks}, `{strategy}`", *(cell(model, layout, kept) for model in MODELS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
