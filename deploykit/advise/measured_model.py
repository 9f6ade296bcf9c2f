"""The parameters of a user's model, measured by a child process that imports torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.advise.model_shape import Layer, Model, Sample, Tensor
from deploykit.job.decode import from_json
from deploykit.lib import paths, shell
from deploykit.lib.errors import UsageError

_TIMEOUT = 300
_ERROR_LINES = 3


def measure(
    function: str,
    *,
    heads: int | None,
    sample: Sequence[int] = (),
    sequence: int | None = None,
) -> Model:
    """Build the model with ``module:function``, imported from the working folder.

    It then takes a step on a `sample` of this shape, or of `sequence` tokens. Raises UsageError if
    that fails, with the last lines of the child's stderr.
    """
    shape = "x".join(map(str, sample)) or (f"tokens:{sequence}" if sequence else "")
    return _count(f"--model {function}", function, shape, heads)


def measure_task(function: str, options: Mapping[str, int], *, heads: int | None) -> Model:
    """The model of a task of the trainer, counted on the first sample of its training data.

    The function gets these options. Raises UsageError as `measure` does.
    """
    model = _count(f"--task {function}", function, f"task:{json.dumps(options)}", heads)
    return dataclasses.replace(model, task=function)


def _count(option: str, function: str, shape: str, heads: int | None) -> Model:
    script = paths.shipped("entrypoints") / "count_model.py"
    done = shell.run([sys.executable, str(script), function, shape], timeout=_TIMEOUT)
    if done.code:
        stderr = "\n".join(done.err.strip().splitlines()[-_ERROR_LINES:])
        raise UsageError(
            f"{option}: building the model failed in {Path.cwd()}",
            hint=f"{stderr}\n{sys.executable} imports it, and requires torch",
        )
    try:
        return from_counts(from_json(done.out.strip().splitlines()[-1]), heads=heads)
    except (LookupError, TypeError, ValueError):
        raise UsageError(
            f"{option} printed text when Python exited", hint="make it print nothing"
        ) from None


def from_counts(counts: Mapping[str, Any], *, heads: int | None = None) -> Model:
    """Convert the output of entrypoints/count_model.py to a model.

    The width is that of the largest embedding; its rows are a vocabulary if the head or a tied
    layer has as many outputs. The MLP's width is the largest size in a block. What the model does
    with a sample is taken from the count where formulas do not know it: without an embedding or
    without blocks.
    """
    embeddings = [shape for _, shape in counts["embedding"]]
    rows, width = max(embeddings, default=[0, 0])
    outputs = {shape[0] for _, shape in counts["head"] if len(shape) > 1}
    tied = bool(counts.get("tied"))
    sizes = [size for _, shape in counts["block"] for size in shape]
    feedforward = max(sizes, default=0)
    inner = [shape for _, shape in counts["block"] if len(shape) > 1 and feedforward in shape]
    known = width and counts["layers"]
    sample = counts.get("sample")
    return Model(
        _layer("embedding", counts["embedding"]),
        _layer("block", counts["block"]),
        counts["layers"],
        _layer("head", counts["head"]),
        width=width,
        heads=heads or max(1, width // 64),
        vocabulary=rows if tied or rows in outputs else 0,
        feedforward=feedforward,
        gated=len(inner) > 2,  # noqa: PLR2004 - an MLP has two matrices, a gated one three
        tied=tied,
        length=counts.get("length", 0),
        sample=Sample(**sample) if sample and not known else None,
    )


def _layer(name: str, tensors: Sequence[tuple[str, Sequence[int]]]) -> Layer:
    """A layer; tensor parallelism is assumed to split every matrix by columns."""
    return Layer(
        name,
        tuple(
            Tensor(each, tuple(shape), "column" if len(shape) > 1 else "none")
            for each, shape in tensors
        ),
    )
