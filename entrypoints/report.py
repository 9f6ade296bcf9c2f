"""Evaluate a trained model on the test data.

    python report.py checkpoints --output report

For digits, `report.json` has precision, recall and F1 of each class and the confusion matrix, and
`confusion.png` shows the matrix. For text, it has the perplexity and generated samples.
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

from trainer.checkpoint import restore
from trainer.text_generation import generate

PROMPTS = ("The ", "A function ", "If ")
BATCH_SIZE = 256
"""Samples that are evaluated at once."""


def main() -> None:
    """Run the command line; exits with code 1 if there is no usable checkpoint."""
    parser = restore.command_line("Evaluate a trained model.", "report")
    output, restored = restore.read(parser.parse_args(), restore.restore)
    test, model, progress = restored
    scores = predict(model, test)
    evaluate = REPORTS[progress["settings"]["task"]]
    report = {"step": progress["step"], **evaluate(model, scores, test.tensors[1])}
    path = output / "report.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    if "confusion" in report:
        draw_confusion(report["confusion"], output / "confusion.png")
    print(f"{path}: {summary(report)}")


@torch.no_grad()
def predict(model: nn.Module, dataset: TensorDataset) -> Tensor:
    """The model's scores (samples, ..., classes) for a dataset."""
    return torch.cat([model(inputs) for inputs in dataset.tensors[0].split(BATCH_SIZE)])


def report_digits(_model: nn.Module, scores: Tensor, targets: Tensor) -> dict[str, Any]:
    """Metrics of scores (images, 10) and targets (images,).

    Rows of `confusion` are true classes, columns are predictions.
    """
    from sklearn.metrics import classification_report, confusion_matrix

    predictions = scores.argmax(dim=1)
    by_class = classification_report(targets, predictions, output_dict=True, zero_division=0)
    return {
        "accuracy": by_class["accuracy"],
        "loss": cross_entropy(scores, targets).item(),
        "classes": {name: by_class[name] for name in by_class if name.isdigit()},
        "confusion": confusion_matrix(targets, predictions).tolist(),
    }


def report_text(model: nn.Module, scores: Tensor, targets: Tensor) -> dict[str, Any]:
    """Metrics of scores (windows, sequence, 256) and targets (windows, sequence), and samples.

    The perplexity is e to the mean loss per byte; without training it is about 256.
    """
    loss = cross_entropy(scores.flatten(0, -2), targets.flatten()).item()
    generator = torch.Generator().manual_seed(0)
    samples = [generate(model, prompt, 200, generator) for prompt in PROMPTS]
    return {"loss": loss, "perplexity": math.exp(loss), "samples": samples}


REPORTS = {"digits": report_digits, "text": report_text}


def summary(report: dict[str, Any]) -> str:
    """The report in one line."""
    if "accuracy" in report:
        worst = min(report["classes"], key=lambda name: report["classes"][name]["f1-score"])
        score = report["classes"][worst]["f1-score"]
        return f"accuracy {report['accuracy']:.4f}; lowest F1 {score:.3f} (class {worst})"
    return f"perplexity {report['perplexity']:.2f}; sample: {report['samples'][0]!r}"


def draw_confusion(confusion: Sequence[Sequence[int]], path: Path) -> None:
    """Draw a confusion matrix (classes, classes) to a PNG file if matplotlib is installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no confusion.png, the numbers are in report.json")
        return
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true", title="Test images by class")
    axes.imshow(confusion, cmap="Blues")
    axes.set_xticks(range(len(confusion)))
    axes.set_yticks(range(len(confusion)))
    dark = max(map(max, confusion)) / 2
    for row, counts in enumerate(confusion):
        for column, number in enumerate(counts):
            color = "white" if number > dark else "black"
            axes.text(column, row, str(number or ""), ha="center", va="center", color=color)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    main()
