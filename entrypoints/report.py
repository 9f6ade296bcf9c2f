"""What a trained model can do, on the test samples it has never seen.

    python report.py checkpoints --output report

For digits: `report.json` with the scores of each class and the confusion matrix, and a picture of
it, `confusion.png`. For text: the perplexity, and samples of what the model writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trainer.restore import command
from trainer.writing import write

PROMPTS = ("The ", "A function ", "If ")
PIECE = 256
"""Samples evaluated at once."""


def main() -> None:
    output, task, model, progress = command("Report what a trained model can do.", "report")
    scores = outputs(model, task.test)
    kind = progress["settings"]["task"]
    report = {"step": progress["step"], **REPORTS[kind](model, scores, task.test.tensors[1])}
    path = output / "report.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    if "confusion" in report:
        draw(report["confusion"], output / "confusion.png")
    print(f"{path}: {summary(report)}")


@torch.no_grad()
def outputs(model: nn.Module, dataset: TensorDataset) -> Tensor:
    """The model's scores for every sample."""
    return torch.cat([model(inputs) for inputs in dataset.tensors[0].split(PIECE)])


def digits(_model: nn.Module, scores: Tensor, targets: Tensor) -> dict[str, Any]:
    """Precision, recall and F1 of each class; row of `confusion`: true class, column: guessed."""
    from sklearn.metrics import classification_report, confusion_matrix

    guesses = scores.argmax(dim=1)
    named = classification_report(targets, guesses, output_dict=True, zero_division=0)
    return {
        "accuracy": named["accuracy"],
        "loss": cross_entropy(scores, targets).item(),
        "classes": {name: named[name] for name in named if name.isdigit()},
        "confusion": confusion_matrix(targets, guesses).tolist(),
    }


def text(model: nn.Module, scores: Tensor, targets: Tensor) -> dict[str, Any]:
    """Perplexity: e to the mean loss of a byte; 256 for a model that knows nothing."""
    loss = cross_entropy(scores.flatten(0, -2), targets.flatten()).item()
    generator = torch.Generator().manual_seed(0)
    samples = [write(model, prompt, 200, generator) for prompt in PROMPTS]
    return {"loss": loss, "perplexity": math.exp(loss), "samples": samples}


REPORTS = {"digits": digits, "text": text}


def summary(report: dict[str, Any]) -> str:
    if "accuracy" in report:
        worst = min(report["classes"], key=lambda name: report["classes"][name]["f1-score"])
        score = report["classes"][worst]["f1-score"]
        return f"accuracy {report['accuracy']:.4f}; the weakest class is {worst}, F1 {score:.3f}"
    return f"perplexity {report['perplexity']:.2f}; it writes: {report['samples'][0]!r}"


def draw(confusion: Sequence[Sequence[int]], path: Path) -> None:
    """The confusion matrix as a picture, where matplotlib is installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no confusion.png, the numbers are in report.json")
        return
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="guessed", ylabel="true", title="Test images by class")
    axes.imshow(confusion, cmap="Blues")
    axes.set_xticks(range(len(confusion)))
    axes.set_yticks(range(len(confusion)))
    half = max(map(max, confusion)) / 2
    for row, counts in enumerate(confusion):
        for column, number in enumerate(counts):
            colour = "white" if number > half else "black"
            axes.text(column, row, number or "", ha="center", va="center", color=colour)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    main()
