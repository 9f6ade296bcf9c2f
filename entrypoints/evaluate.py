"""Evaluate a trained model on the test data.

    python evaluate.py checkpoints --output evaluation

For digits, `evaluation.json` has precision, recall and F1 of each class and the confusion matrix,
and `confusion.png` shows the matrix. For text, it has the perplexity and generated samples.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trainer import tasks
from trainer.checkpoint import checkpointer
from trainer.checkpoint.integrity import Progress, VerifiedCheckpoint
from trainer.train_options import ModelOptions

PROMPTS = ("The ", "A function ", "If ")
SAMPLE_BYTES = 200
BATCH_SIZE = 256
"""Samples that are evaluated at once."""
Loaded = TypeVar("Loaded")


class Trained(NamedTuple):
    """Test data of a run, its model in evaluation mode and its progress."""

    test: TensorDataset
    model: nn.Module
    progress: Progress


def main() -> None:
    """Run the command line; exits with code 1 if there is no usable checkpoint."""
    parser = command_line("Evaluate a trained model.", "evaluation")
    output, (test, model, progress) = load(parser.parse_args(), trained_model)
    with torch.no_grad():
        scores = torch.cat([model(inputs) for inputs in test.tensors[0].split(BATCH_SIZE)])
        evaluate = digits if progress["settings"]["task"] == "digits" else text
        result = {"step": progress["step"], **evaluate(model, scores, test.tensors[1])}
    path = output / "evaluation.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if "confusion" in result:
        draw_confusion(result["confusion"], output / "confusion.png")
    print(f"{path}: {summary(result)}")


def command_line(description: str, output: str) -> argparse.ArgumentParser:
    """The options of a program that reads a checkpoint; `output` is its default folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoints", type=Path, help="checkpoint folder of train.py")
    parser.add_argument("--output", type=Path, default=Path(output), help="default: %(default)s")
    return parser


def load(arguments: argparse.Namespace, read: Callable[[Path], Loaded]) -> tuple[Path, Loaded]:
    """Make the output folder of a command line, and read its checkpoints.

    Exits with code 1 if there is no usable checkpoint.
    """
    try:
        loaded = read(arguments.checkpoints)
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments.output, loaded


def trained_model(folder: Path) -> Trained:
    """Load the model of the latest valid checkpoint in `folder`, saved with any strategy.

    Raises FileNotFoundError if there is none, ValueError if none can be used.
    """
    latest = checkpointer.find_latest(folder, _problem)
    options = ModelOptions.of(latest.progress["settings"])
    with torch.device("meta"):
        model = tasks.build_model(options)
    trained = checkpointer.trained_weights(latest.path)
    model.to_empty(device="cpu").load_state_dict(
        {name: trained[name] for name in model.state_dict()}
    )
    test = cast("TensorDataset", tasks.load(options).test)  # that of digits and text is in memory
    return Trained(test, model.eval(), latest.progress)


def _problem(candidate: VerifiedCheckpoint) -> str:
    """Why no model can be built from a checkpoint, or ''.

    The settings may be of unknown origin. They are tried on the meta device, without memory: a
    model is built only if the checkpoint has all of its tensors.
    """
    settings = candidate.progress.get("settings")
    if type(settings) is not dict or type(settings.get("text")) not in (str, type(None)):
        return "its settings do not come from a run"
    if settings.get("task") not in ("digits", "text"):
        return "it belongs to your own task: only digits and text can be loaded here"
    try:
        options = ModelOptions.of(settings)
        if options.layers > len(candidate.tensors):
            return "its settings have more layers than the checkpoint"
        with torch.device("meta"):
            state = tasks.build_model(options).state_dict()
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        return f"its settings describe no model ({type(error).__name__})"
    return candidate.mismatch({f"model.{name}": tensor for name, tensor in state.items()})


def digits(_model: nn.Module, scores: Tensor, targets: Tensor) -> dict[str, Any]:
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


def text(model: nn.Module, scores: Tensor, targets: Tensor) -> dict[str, Any]:
    """Metrics of scores (windows, sequence, 256) and targets (windows, sequence), and samples.

    The perplexity is e to the mean loss per byte; without training it is about 256.
    """
    loss = cross_entropy(scores.flatten(0, -2), targets.flatten()).item()
    samples = continued(model, PROMPTS, targets.shape[1])
    return {"loss": loss, "perplexity": math.exp(loss), "samples": samples}


def continued(model: nn.Module, prompts: Sequence[str], sequence: int) -> list[str]:
    """Each prompt and the bytes that the text model draws after it, at a temperature of 0.8.

    The model sees the last `sequence` bytes, with spaces before them if there are fewer.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [bytearray(prompt.encode()) for prompt in prompts]
    for _ in range(SAMPLE_BYTES):
        windows = [list(sample[-sequence:].rjust(sequence, b" ")) for sample in drawn]
        chances = (model(torch.tensor(windows))[:, -1] / 0.8).softmax(dim=-1)
        following = torch.multinomial(chances, 1, generator=generator)
        for sample, byte in zip(drawn, following.flatten().tolist(), strict=True):
            sample.append(byte)
    return [sample.decode(errors="replace") for sample in drawn]


def summary(result: dict[str, Any]) -> str:
    """The result in one line."""
    if "accuracy" in result:
        worst = min(result["classes"], key=lambda name: result["classes"][name]["f1-score"])
        score = result["classes"][worst]["f1-score"]
        return f"accuracy {result['accuracy']:.4f}; lowest F1 {score:.3f} (class {worst})"
    return f"perplexity {result['perplexity']:.2f}; sample: {result['samples'][0]!r}"


def draw_confusion(confusion: Sequence[Sequence[int]], path: Path) -> None:
    """Draw a confusion matrix (classes, classes) to a PNG file if matplotlib is installed."""
    from sklearn.metrics import ConfusionMatrixDisplay

    try:
        display = ConfusionMatrixDisplay(torch.tensor(confusion).numpy()).plot(cmap="Blues")
    except ImportError:
        print("no confusion.png, because matplotlib is not installed; see evaluation.json")
    else:
        display.figure_.savefig(path)


if __name__ == "__main__":
    main()
