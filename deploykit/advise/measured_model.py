"""The parameters of a user's model, measured by a child process that imports torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit import paths, shell
from deploykit.advise.model_shape import Layer, Model, Tensor
from deploykit.decode import from_json
from deploykit.errors import UsageError

_TIMEOUT = 300
_ERROR_LINES = 3


def measure(function: str, *, heads: int | None) -> Model:
    """Build the model with ``module:function``, imported from the working folder.

    Raises UsageError if that fails, with the last lines of the child's stderr.
    """
    script = paths.shipped("entrypoints") / "count_model.py"
    done = shell.run([sys.executable, str(script), function], timeout=_TIMEOUT)
    if done.code:
        stderr = "\n".join(done.err.strip().splitlines()[-_ERROR_LINES:])
        raise UsageError(
            f"--model {function}: building the model failed in {Path.cwd()}",
            hint=f"{stderr}\n{sys.executable} imports it, and requires torch",
        )
    try:
        return from_counts(from_json(done.out.strip().splitlines()[-1]), heads=heads)
    except (LookupError, TypeError, ValueError):
        raise UsageError(
            f"--model {function} printed text when Python exited", hint="make it print nothing"
        ) from None


def from_counts(counts: Mapping[str, Any], *, heads: int | None = None) -> Model:
    """Convert the output of entrypoints/count_model.py to a model.

    Width and vocabulary are those of the largest embedding; the MLP's width is the largest size in
    a block. A model without an embedding gets width 0: its activations are unknown.
    """
    embeddings = [shape for _, shape in counts["embedding"]]
    vocabulary, width = max(embeddings, default=[0, 0])
    sizes = [size for _, shape in counts["block"] for size in shape]
    return Model(
        _layer("embedding", counts["embedding"]),
        _layer("block", counts["block"]),
        counts["layers"],
        _layer("head", counts["head"]),
        width=width,
        heads=heads or max(1, width // 64),
        vocabulary=vocabulary,
        feedforward=max(sizes, default=0),
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
