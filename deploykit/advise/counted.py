"""A model of the user's own: built and counted by a child process that has torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit import parsing, paths, shell
from deploykit.advise.shape import Layer, Model, Tensor
from deploykit.errors import UsageError

_SECONDS = 300
_LINES = 3


def count(where: str, *, heads: int | None) -> Model:
    """The model that ``module:function`` builds, found from the working folder.

    Raises UsageError when it cannot be built, with the last lines of what the child said.
    """
    script = paths.shipped("entrypoints") / "count_model.py"
    done = shell.run([sys.executable, str(script), where], timeout=_SECONDS)
    if done.code:
        said = "\n".join(done.err.strip().splitlines()[-_LINES:])
        raise UsageError(
            f"--model {where} cannot be built in {Path.cwd()}",
            hint=f"{said}\nit is imported by {sys.executable}, which needs torch",
        )
    try:
        return model(parsing.json(done.out.strip().splitlines()[-1]), heads=heads)
    except (LookupError, TypeError, ValueError):
        raise UsageError(
            f"--model {where} printed something after it was counted", hint="let it print nothing"
        ) from None


def model(found: Mapping[str, Any], *, heads: int | None = None) -> Model:
    """What entrypoints/count_model.py printed, as a model.

    Width and vocabulary are those of the largest embedding, the MLP's width the largest size in a
    block. A model without an embedding has width 0: its activations are not known.
    """
    tables = [shape for _, shape in found["embedding"]]
    vocabulary, width = max(tables, default=[0, 0])
    sizes = [size for _, shape in found["block"] for size in shape]
    return Model(
        _layer("embedding", found["embedding"]),
        _layer("block", found["block"]),
        found["layers"],
        _layer("head", found["head"]),
        width=width,
        heads=heads or max(1, width // 64),
        vocabulary=vocabulary,
        feedforward=max(sizes, default=0),
    )


def _layer(name: str, tensors: Sequence[tuple[str, Sequence[int]]]) -> Layer:
    """Every matrix counts as split by tensor parallelism."""
    return Layer(
        name,
        tuple(
            Tensor(each, tuple(shape), "column" if len(shape) > 1 else "none")
            for each, shape in tensors
        ),
    )
