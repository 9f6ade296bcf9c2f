"""Evaluate a trained model: its loss and metrics, and the samples that it gets wrong.

    python evaluate.py checkpoints --output evaluation
    python evaluate.py checkpoints --split validation --task task:task --slice-by region
    torchrun --standalone --nproc-per-node=2 evaluate.py checkpoints      # same results, faster
    deploykit evaluate RUN                                                # on the run's backend

Each rank holds the whole model and evaluates its share of the samples, each once. `evaluation.json`
contains, for classification, the accuracy, the precision, recall and F1 of each class, the
confusion matrix and the calibration; for regression, the errors; for language models, the
perplexity; and always the worst samples and the slices of ``--slice-by``. `confusion.png` shows the
matrix.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

try:
    from trainer import tasks
    from trainer.checkpoint import checkpointer
    from trainer.checkpoint.integrity import Progress, VerifiedCheckpoint
    from trainer.metrics import MetricsWriter, prefixed
    from trainer.objective import losses_of, rows_of
    from trainer.parallel import process_group
    from trainer.parallel.process_group import DistributedContext
    from trainer.task import IGNORE_INDEX, Task, call, is_integer, scores
    from trainer.train_options import ModelOptions
except ImportError as error:
    if not (error.name or "").startswith("trainer"):
        raise
    sys.exit(
        f"evaluate.py: error: {error}: the folder trainer/ is missing or from an older version of "
        "deploykit; run `deploykit init --trainer` in an empty folder for the current one"
    )

PROMPTS = ("The ", "A function ", "If ")
SAMPLE_BYTES = 200
BATCH_SIZE = 256
"""Samples that a rank evaluates at once, unless the run had fewer in a step."""
SPLITS = ("test", "validation", "training")
BINS = 15
"""Ranges of confidence, of equal width, of the calibration."""
MAX_CLASSES = 100
"""Classes above which only the most frequent confusions are written."""
MAX_CONFUSIONS = 20
MAX_WORST = 100
MAX_VALUES = 16
"""Numbers of a sample's prediction that are kept."""
MAX_SLICES = 20
"""Different values of a column, above which numbers are divided into ranges."""
RANGES = 5
Loaded = TypeVar("Loaded")


class Trained(NamedTuple):
    """Test data of a run, its model in evaluation mode and its progress."""

    test: TensorDataset
    model: nn.Module
    progress: Progress


def main() -> None:
    """Run the command line; exits with code 1 if there is no usable checkpoint."""
    parser = command_line("Evaluate a trained model.", "evaluation", "DEPLOYKIT_OUTPUT_DIR")
    add = parser.add_argument
    add("--split", choices=SPLITS, help="data to evaluate on (default: test, else validation)")
    add("--task", metavar="MODULE:FUNCTION", help="your own task, if the checkpoint belongs to it")
    add(
        "--slice-by",
        metavar="COLUMN",
        help="also evaluate each value of this column of the data separately",
    )
    add("--batch-size", type=int, metavar="N", help="batch size per rank (default: from the run)")
    add(
        "--worst",
        type=int,
        default=20,
        metavar="N",
        help="number of samples with the highest loss to list (default: 20)",
    )
    arguments = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    context = process_group.join() if world_size > 1 else process_group.alone()
    output, (task, model, progress) = load(arguments, partial(read, own=arguments.task))
    batch_size = arguments.batch_size or min(BATCH_SIZE, progress["settings"]["batch_size"])
    try:
        split, dataset = choose(task, arguments.split)
        batches = shares(task, dataset, context, max(1, batch_size))
        with torch.no_grad():
            part = examine(task, model.to(context.device), batches, context.device)
            parts = gathered(context, part)
            result = summarized(parts, dataset, arguments.slice_by, max(0, arguments.worst))
    except ValueError as error:
        if context.is_rank_zero:
            print(f"evaluate.py: error: {error}", file=sys.stderr)
        process_group.fail(1)
    if context.is_rank_zero:
        settings = progress["settings"]
        if settings["task"] == "text":
            result["samples"] = continued(model, PROMPTS, settings["sequence"])
        known = {"step": progress["step"], "split": split, "unit": task.unit}
        write(output, known | result)
    if world_size > 1:
        process_group.leave()


def command_line(description: str, output: str, variable: str = "") -> argparse.ArgumentParser:
    """The options of a program that reads a checkpoint; `output` is its default folder.

    With a `variable` that `deploykit evaluate` sets, the checkpoint has a default too.
    """
    parser = argparse.ArgumentParser(description=description)
    given = os.environ.get("DEPLOYKIT_DATA_EVALUATED") if variable else None
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs="?" if given else None,
        default=Path(given) if given else None,
        help="checkpoint folder of train.py",
    )
    default = Path(os.environ.get(variable, output))
    parser.add_argument("--output", type=Path, default=default, help="default: %(default)s")
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
    """Load the model of digits or text; see `read`."""
    task, model, progress = read(folder)
    return Trained(cast("TensorDataset", task.test), model, progress)  # which is in memory


def read(folder: Path, own: str | None = None) -> tuple[Task, nn.Module, Progress]:
    """The task, the model and the progress of the latest valid checkpoint, of any strategy.

    `own` names the only task of yours that a checkpoint may have: loading it imports your module.
    Raises FileNotFoundError if there is no checkpoint, ValueError if none can be used.
    """
    latest = checkpointer.find_latest(folder, partial(_problem, own))
    options = ModelOptions.of(latest.progress["settings"])
    task = tasks.load(options)
    if ":" in options.task:
        model = task.model()
    else:
        with torch.device("meta"):
            model = tasks.build_model(options)
        model.to_empty(device="cpu")
    trained = checkpointer.trained_weights(latest.path)
    model.load_state_dict({name: trained[name] for name in model.state_dict()})
    return task, model.eval(), latest.progress


def _problem(own: str | None, candidate: VerifiedCheckpoint) -> str:
    """Why no model can be built from a checkpoint, or ''.

    The settings may be of unknown origin. They are tried on the meta device, without memory: a
    model is built only if the checkpoint has all of its tensors.
    """
    settings = candidate.progress.get("settings")
    if type(settings) is not dict or type(settings.get("text")) not in (str, type(None)):
        return "its settings are invalid"
    if own is not None and settings.get("task") == own and ":" in own:
        model = tasks.load(ModelOptions.of(settings)).model()
        state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        return candidate.mismatch({f"model.{name}": tensor for name, tensor in state.items()})
    if settings.get("task") not in ("digits", "text"):
        return "it belongs to your own task; pass `evaluate.py --task MODULE:FUNCTION`"
    try:
        options = ModelOptions.of(settings)
        if options.layers > len(candidate.tensors):
            return "its settings specify more layers than the checkpoint contains"
        with torch.device("meta"):
            state = tasks.build_model(options).state_dict()
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        return f"cannot build a model from its settings ({type(error).__name__})"
    return candidate.mismatch({f"model.{name}": tensor for name, tensor in state.items()})


def choose(task: Task, wanted: str | None) -> tuple[str, Dataset[Any]]:
    """The name and the data of a split. Raises ValueError if the task does not have it."""
    has = {name: data for name in SPLITS if (data := getattr(task, name)) is not None}
    name = wanted or next((name for name in SPLITS[:2] if name in has), "")
    if name not in has:
        lacks = f"no {name} data" if wanted else "neither test nor validation data"
        raise ValueError(f"the task has {lacks}; choose --split {' or '.join(has)}")
    return name, has[name]


@dataclass
class Part:
    """What a rank knows of its samples; of all tensors the first size is their number."""

    numbers: list[Tensor] = field(default_factory=list)
    """Position of each sample in the data."""
    losses: list[Tensor] = field(default_factory=list)
    """Sum of the losses of a sample's targets."""
    counts: list[Tensor] = field(default_factory=list)
    """Number of its targets that count, or the sum of their weights."""
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    """What is known of its prediction; see `_judged`."""
    sums: dict[str, float] = field(default_factory=dict)
    """Of all: the loss, the metrics of the task, and their number of targets."""
    bins: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Predictions in each range of confidence: number, sum of confidence, number correct."""
    kinds: set[str] = field(default_factory=set)
    """Of the predictions: classes, tokens, yes or no, numbers; `other` if they are unknown."""
    classes: int = 0


def examine(
    task: Task,
    model: nn.Module,
    batches: Iterable[tuple[Sequence[int], Any]],
    device: torch.device,
) -> Part:
    """Evaluate batches of samples with their positions in the data."""
    part = Part()
    for numbers, batch in batches:
        inputs, targets = pytree.tree_map_only(
            Tensor, lambda leaf: leaf.to(device), task.split(batch)
        )
        outputs = call(model, inputs)
        size = len(numbers)
        count = float(task.targets_in(targets))
        losses = losses_of(task, outputs, targets)
        total = float(losses.sum(dtype=torch.float64)) if losses.dim() else float(losses) * count
        sums = {"targets": count, "loss": total if count else 0.0}
        for name, function in task.metric_functions.items():
            sums[name] = float(function(outputs, targets)) if count else 0.0
        for name, value in sums.items():
            part.sums[name] = part.sums.get(name, 0.0) + value
        by_sample, counts = _by_sample(task, outputs, targets, losses, size)
        part.numbers.append(torch.tensor(numbers))
        part.losses.append(by_sample)
        part.counts.append(counts)
        kind, columns = _judged(task, outputs, targets, size, part)
        part.kinds.add(kind)
        for name, column in columns.items():
            part.columns.setdefault(name, []).append(column.cpu())
    return part


def shares(
    task: Task, dataset: Any, context: DistributedContext, batch_size: int
) -> Iterator[tuple[Sequence[int], Any]]:
    """Batches of this rank's samples, with their positions in the data; no sample is repeated."""
    rank, ranks = context.rank, context.world_size
    numbered: Iterator[tuple[int, Any]]
    if isinstance(dataset, IterableDataset):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(0)
        numbered = islice(enumerate(dataset), rank, None, ranks)
    else:
        numbered = ((number, dataset[number]) for number in range(rank, len(dataset), ranks))
    collate = task.collate or default_collate
    while batch := list(islice(numbered, batch_size)):
        numbers, samples = zip(*batch, strict=True)
        yield numbers, collate(list(samples))


def _by_sample(
    task: Task, outputs: Any, targets: Any, losses: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of each sample, and its number of targets, each (samples,)."""

    def count(row: int) -> float:
        return float(task.targets_in(rows_of(targets, slice(row, row + 1), size)))

    if task.count is None and is_integer(targets):
        counts = (targets != IGNORE_INDEX).view(size, -1).sum(1).double().cpu()
    elif task.count is None:
        counts = torch.ones(size, dtype=torch.float64)
    else:
        counts = torch.tensor([count(row) for row in range(size)], dtype=torch.float64)
    if losses.dim() and losses.numel() % size == 0:
        return losses.reshape(size, -1).sum(1, dtype=torch.float64).cpu(), counts
    rows = [slice(row, row + 1) for row in range(size)]
    means = [
        float(losses_of(task, rows_of(outputs, row, size), rows_of(targets, row, size)).mean())
        for row in rows
    ]
    return torch.tensor(means, dtype=torch.float64) * counts, counts


def _judged(
    task: Task, outputs: Any, targets: Any, size: int, part: Part
) -> tuple[str, dict[str, Tensor]]:
    """The kind of the predictions, and what is known of each sample's; updates `part`."""
    predicted = _scores(outputs)
    if predicted is None or not isinstance(targets, Tensor):
        return "other", {}
    if is_integer(targets):
        if predicted.shape[:-1] == targets.shape and predicted.shape[-1] > 1:
            return _chosen(predicted, targets, size, part)
    elif predicted.numel() == targets.numel() <= MAX_VALUES * size:
        predicted, expected = predicted.reshape(size, -1), targets.float().reshape(size, -1)
        loss = getattr(task.loss, "func", task.loss)  # of a partial
        if loss is functional.binary_cross_entropy_with_logits:
            return _decided(predicted.sigmoid(), expected, part)
        return "numbers", {"predicted": predicted.double(), "expected": expected.double()}
    return "other", {}


def _scores(outputs: Any) -> Tensor | None:
    """The outputs as one tensor; None if they are anything else."""
    try:
        return scores(outputs).float()
    except AttributeError:
        return None


def _chosen(
    predicted: Tensor, targets: Tensor, size: int, part: Part
) -> tuple[str, dict[str, Tensor]]:
    """The classes or tokens of the highest scores (targets, classes)."""
    part.classes = max(part.classes, predicted.shape[-1])
    confidence, choice = predicted.softmax(-1).max(-1)
    counted, hit = targets != IGNORE_INDEX, choice == targets
    _count_bins(part.bins, confidence[counted], hit[counted])
    hits = (hit & counted).reshape(size, -1).sum(1).double()
    if targets.dim() > 1:
        return "tokens", {"hits": hits}
    columns = {"predicted": choice, "expected": targets, "confidence": confidence.double()}
    return "classes", {**columns, "hits": hits}


def _decided(chance: Tensor, expected: Tensor, part: Part) -> tuple[str, dict[str, Tensor]]:
    """Yes or no by their chances, both (samples, decisions)."""
    choice, right = chance > 0.5, expected > 0.5  # noqa: PLR2004 - even odds
    _count_bins(part.bins, torch.where(choice, chance, 1 - chance), choice == right)
    part.classes = 2
    columns = {"predicted": choice.long(), "expected": right.long()}
    return "yes or no", {**columns, "hits": (choice == right).double().mean(1)}


def _count_bins(bins: Tensor, confidence: Tensor, hit: Tensor) -> None:
    """Add predictions to the ranges of their confidence; a range includes its upper end."""
    at = (confidence * BINS).ceil().long().clamp(1, BINS).flatten().cpu() - 1
    confidence, hit = confidence.flatten().double().cpu(), hit.flatten().double().cpu()
    bins.index_add_(0, at, torch.stack([torch.ones_like(hit), confidence, hit], dim=1))


def gathered(context: DistributedContext, part: Part) -> list[Part]:
    """The parts of all ranks. Collective."""
    parts: list[Any] = [part] * context.world_size
    if context.world_size > 1:
        distributed.all_gather_object(parts, part)
    return parts


def _require_targets(parts: Sequence[Part]) -> None:
    """Raise ValueError if there is nothing to evaluate."""
    if not any(part.numbers for part in parts):
        raise ValueError("the data has no samples")
    if not any(part.sums["targets"] for part in parts if part.numbers):
        raise ValueError("no sample has a target: all targets are ignored")


def summarized(
    parts: Sequence[Part], dataset: Dataset[Any], column: str | None, worst: int
) -> dict[str, Any]:
    """The numbers of all samples, in their order. Raises ValueError without targets or `column`."""
    _require_targets(parts)
    order = torch.cat([tensor for part in parts for tensor in part.numbers]).argsort()

    def joined(lists: Sequence[list[Tensor]]) -> Tensor:
        return torch.cat([tensor for each in lists for tensor in each])[order]

    losses = joined([part.losses for part in parts])
    counts = joined([part.counts for part in parts])
    kinds = set().union(*(part.kinds for part in parts))
    kind = kinds.pop() if len(kinds) == 1 else "other"
    names = {name for part in parts for name in part.columns} if kind != "other" else set()
    known = {name: joined([part.columns.get(name, []) for part in parts]) for name in names}
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    targets = sums.pop("targets")
    means = {name: value / max(targets, 1) for name, value in sums.items()}
    result: dict[str, Any] = {"evaluated": len(losses), "targets": targets, "kind": kind, **means}
    labels = _labels(dataset, max(part.classes for part in parts))
    if kind in {"classes", "yes or no"}:
        result |= _classes(known, labels)
    if kind in {"classes", "yes or no", "tokens"}:
        result["calibration"] = _calibration(torch.stack([part.bins for part in parts]).sum(0))
    if kind == "tokens":
        result["perplexity"] = math.exp(min(means["loss"], 700))
        result.setdefault("accuracy", float(known["hits"].sum()) / max(targets, 1))
    if kind == "numbers":
        result |= _errors(known["predicted"], known["expected"])
    if column is not None:
        values = column_of(dataset, column, len(losses))
        result["slices"] = {
            "column": column,
            "values": [
                {"value": value, **_of_slice(rows, losses, counts, known)}
                for value, rows in _slices(values)
            ],
        }
    result["worst"] = _worst(losses / counts.clamp(min=1e-12), known, labels, min(worst, MAX_WORST))
    return result


def _labels(dataset: Any, classes: int) -> list[str]:
    """The names of the classes: the data's `classes`, as torchvision's have, or numbers."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    named = getattr(dataset, "classes", None)
    if isinstance(named, list | tuple) and len(named) == classes:
        return [str(name) for name in named]
    return [str(number) for number in range(classes)]


def _classes(known: Mapping[str, Tensor], labels: Sequence[str]) -> dict[str, Any]:
    """Accuracy, precision, recall and F1 of each class, and the confusion matrix.

    Rows of `confusion` are true classes, columns are predictions.
    """
    predicted, expected = known["predicted"].flatten(), known["expected"].flatten()
    counted = (expected >= 0) & (expected < len(labels))
    predicted, expected = predicted[counted], expected[counted]
    size = len(labels)
    right = torch.bincount(expected[predicted == expected], minlength=size).double()
    of_class = torch.bincount(expected, minlength=size).double()
    chosen = torch.bincount(predicted, minlength=size).double()
    precision, recall = right / chosen.clamp(min=1), right / of_class.clamp(min=1)
    f1 = 2 * right / (chosen + of_class).clamp(min=1)
    result: dict[str, Any] = {
        "accuracy": float(right.sum() / of_class.sum()),
        "labels": list(labels),
        "classes": {
            label: {
                "precision": float(precision[at]),
                "recall": float(recall[at]),
                "f1-score": float(f1[at]),
                "support": int(of_class[at]),
            }
            for at, label in enumerate(labels)
        },
    }
    pairs, times = torch.unique(expected * size + predicted, return_counts=True)
    wrong = [
        (int(number), int(pair) // size, int(pair) % size)
        for pair, number in zip(pairs, times, strict=True)
        if int(pair) // size != int(pair) % size
    ]
    result["confused"] = [
        {"expected": labels[one], "predicted": labels[other], "times": number}
        for number, one, other in sorted(wrong, key=lambda each: -each[0])[:MAX_CONFUSIONS]
    ]
    if size <= MAX_CLASSES:
        matrix = torch.bincount(expected * size + predicted, minlength=size * size)
        result["confusion"] = matrix.view(size, size).tolist()
    return result


def _calibration(bins: Tensor) -> dict[str, Any]:
    """The expected calibration error, and the accuracy in each range of confidence.

    https://arxiv.org/abs/1706.04599
    """
    number, confidence, hits = bins.unbind(1)
    gaps = (confidence - hits).abs().sum() / number.sum().clamp(min=1)
    return {
        "ece": float(gaps),
        "bins": [
            {
                "from": at / BINS,
                "to": (at + 1) / BINS,
                "count": int(number[at]),
                "confidence": float(confidence[at] / number[at]) if number[at] else None,
                "accuracy": float(hits[at] / number[at]) if number[at] else None,
            }
            for at in range(BINS)
        ],
    }


def _errors(predicted: Tensor, expected: Tensor) -> dict[str, float]:
    """Mean absolute error, root mean square error, mean error, and R² (1 is perfect, 0 a mean)."""
    errors = predicted - expected
    spread = float((expected - expected.mean(0)).square().sum())
    squares = float(errors.square().sum())
    return {
        "mae": float(errors.abs().mean()),
        "rmse": math.sqrt(float(errors.square().mean())),
        "bias": float(errors.mean()),
        **({"r2": 1 - squares / spread} if spread else {}),
    }


def column_of(dataset: Any, name: str, size: int) -> list[Any]:
    """The value of a column for each sample: of a table, an attribute, or a part of the samples.

    Raises ValueError if the data has no such column.
    """
    if isinstance(dataset, Subset):
        whole = column_of(dataset.dataset, name, len(dataset.dataset))  # type: ignore[arg-type]
        return [whole[index] for index in dataset.indices]
    values = getattr(dataset, name, None)
    if name in (getattr(dataset, "column_names", None) or ()):
        values = dataset[name]
    elif values is None or isinstance(values, str) or not hasattr(values, "__len__"):
        streamed = isinstance(dataset, IterableDataset)
        samples = dataset if streamed else map(dataset.__getitem__, range(size))
        values = [sample[name] for sample in islice(samples, size) if _has(sample, name)]
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(values) != size:
        has = f"{len(values)} values for {size} samples" if values else "no such column"
        raise ValueError(
            f"--slice-by {name}: the data has {has}; a column is a key of each sample, a column "
            f"of a table, or an attribute of the dataset: dataset.{name} = [...]"
        )
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def _has(sample: Any, name: str) -> bool:
    return isinstance(sample, Mapping) and name in sample


def _slices(values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Each value, or range of many numbers, with the rows that have it."""
    values = [value if isinstance(value, int | float) else str(value) for value in values]
    different = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    if len(different) > MAX_SLICES and all(isinstance(value, int | float) for value in different):
        numbers = torch.tensor(values, dtype=torch.float64)
        ends = numbers.quantile(torch.linspace(0, 1, RANGES + 1, dtype=torch.float64))
        at = torch.bucketize(numbers, ends[1:-1])
        for number in range(RANGES):
            text = f"{float(ends[number]):.4g} to {float(ends[number + 1]):.4g}"
            yield text, (at == number).nonzero().flatten()
        return
    rows: dict[Any, list[int]] = {value: [] for value in different}
    for row, value in enumerate(values):
        rows[value].append(row)
    largest = sorted(different, key=lambda value: -len(rows[value]))[:MAX_SLICES]
    for value in different:
        if value in largest:
            yield str(value), torch.tensor(rows[value])


def _of_slice(
    rows: Tensor, losses: Tensor, counts: Tensor, known: Mapping[str, Tensor]
) -> dict[str, float]:
    """The number of samples of a slice, their loss, and their accuracy or mean absolute error."""
    number = float(counts[rows].sum())
    result: dict[str, float] = {"evaluated": len(rows)}
    if number:
        result["loss"] = float(losses[rows].sum()) / number
    if number and "hits" in known:
        result["accuracy"] = float(known["hits"][rows].sum()) / number
    elif len(rows) and "predicted" in known:
        errors = known["predicted"][rows] - known["expected"][rows]
        result["mae"] = float(errors.abs().mean())
    return result


def _worst(
    losses: Tensor, known: Mapping[str, Tensor], labels: Sequence[str], most: int
) -> list[dict[str, Any]]:
    """The samples with the highest loss per target: which, and what was predicted of them."""

    def text(value: Tensor) -> Any:
        if value.is_floating_point():
            values = [round(number, 6) for number in value.flatten().tolist()]
            return values[0] if len(values) == 1 else values
        numbers = value.flatten().tolist()
        names = [labels[each] if 0 <= each < len(labels) else str(each) for each in numbers]
        return names[0] if len(names) == 1 else names

    order = losses.nan_to_num(math.inf).argsort(descending=True, stable=True)
    worst = []
    for row in order[:most].tolist():
        sample: dict[str, Any] = {"index": row, "loss": float(losses[row])}
        for name in ("predicted", "expected"):
            if name in known:
                sample[name] = text(known[name][row])
        if "confidence" in known:
            sample["confidence"] = float(known["confidence"][row])
        worst.append(sample)
    return worst


def write(output: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`, a line of metrics and a picture, and print the most important."""
    path = output / "evaluation.json"
    finite = pytree.tree_map(_finite, result)
    path.write_text(json.dumps(finite, indent=1, allow_nan=False) + "\n")
    if "confusion" in result:
        draw_confusion(result["confusion"], output / "confusion.png", result["labels"])
    numbers = {name: value for name, value in result.items() if isinstance(value, float)}
    if "calibration" in result:
        numbers["ece"] = result["calibration"]["ece"]
    writer = MetricsWriter(output, 0, tensorboard=False)
    writer.write(result["step"], 0, **prefixed(result["split"].replace("idation", ""), numbers))
    writer.close()
    shown = path.name if path.is_absolute() else path  # in a run folder, which the end shows
    print(f"{shown}: {result['split']} {summary(result)}")


def _finite(value: Any) -> Any:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def continued(model: nn.Module, prompts: Sequence[str], sequence: int) -> list[str]:
    """Each prompt and the bytes that the text model draws after it, at a temperature of 0.8.

    The model sees the last `sequence` bytes, with spaces before them if there are fewer.
    """
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    drawn = [bytearray(prompt.encode()) for prompt in prompts]
    for _ in range(SAMPLE_BYTES):
        windows = [list(sample[-sequence:].rjust(sequence, b" ")) for sample in drawn]
        with torch.no_grad():
            following = model(torch.tensor(windows, device=device))[:, -1].cpu()
        chances = (following / 0.8).softmax(dim=-1)
        bytes_ = torch.multinomial(chances, 1, generator=generator)
        for sample, byte in zip(drawn, bytes_.flatten().tolist(), strict=True):
            sample.append(byte)
    return [sample.decode(errors="replace") for sample in drawn]


def summary(result: dict[str, Any]) -> str:
    """The result in one line."""
    if "perplexity" in result:
        parts = [f"perplexity {result['perplexity']:.2f}"]
    elif "classes" in result:
        seen = {name: one for name, one in result["classes"].items() if one["support"]}
        parts = [f"accuracy {result['accuracy']:.4f}"]
        if seen:  # else no target is the number of a class
            worst = min(seen, key=lambda name: seen[name]["f1-score"])
            parts.append(f"lowest F1 {seen[worst]['f1-score']:.3f} (class {worst})")
    elif "mae" in result:
        parts = [f"mean absolute error {result['mae']:.6g}"]
        parts += [f"R² {result['r2']:.4f}"] if "r2" in result else []
    else:
        parts = [f"loss {result['loss']:.4f}"]
    parts[0] += f" ({result['targets']:.0f} {result['unit']})"
    if "calibration" in result:
        parts.append(f"ece {result['calibration']['ece']:.4f}")
    if "samples" in result:
        parts.append(f"sample: {result['samples'][0]!r}")
    return "; ".join(parts)


def draw_confusion(
    confusion: Sequence[Sequence[int]], path: Path, labels: Sequence[str] | None = None
) -> None:
    """Draw a confusion matrix (classes, classes) to a PNG file if matplotlib is installed."""
    try:
        from sklearn.metrics import ConfusionMatrixDisplay

        matrix = torch.tensor(confusion).numpy()
        display = ConfusionMatrixDisplay(matrix, display_labels=labels).plot(cmap="Blues")
    except ImportError:
        print("skipped confusion.png, because matplotlib is not installed; see evaluation.json")
    else:
        display.figure_.savefig(path)


if __name__ == "__main__":
    main()
