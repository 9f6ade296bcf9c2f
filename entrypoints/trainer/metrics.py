"""Metrics as JSON lines in ``metrics.jsonl`` and as TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO


class MetricsWriter:
    """Writes metrics to `folder`; with folder None (all ranks but 0) it writes nothing.

    A run resumed after `step` steps appends to the file. Lines that an interrupted run wrote after
    its last checkpoint are dropped, because their steps are repeated, and so is the final line of
    a finished run that is continued. The file reads as if the run had never been interrupted.
    """

    def __init__(self, folder: Path | None, step: int, *, tensorboard: bool) -> None:
        self._opened = ExitStack()
        self._file: TextIO | None = None
        if folder:
            self._file = self._opened.enter_context(_open_truncated(folder / "metrics.jsonl", step))
        self._board_folder = folder / "tensorboard" if folder and tensorboard else None
        self._first_step = step + 1

    @cached_property
    def _board(self) -> Any:
        """TensorBoard's writer. Its import takes 0.4 s, so not before the first step."""
        if self._board_folder is None:
            return None
        writer = _tensorboard_writer(self._board_folder, self._first_step)
        return writer and self._opened.enter_context(writer)

    def write(self, step: int, epoch: int, **metrics: float) -> None:
        """Write the metrics of one step as one line, and flush it."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "epoch": epoch, **metrics}) + "\n")
            self._file.flush()
        if self._board is not None:
            self._board.file_writer.add_summary(_summary(metrics), step)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


def prefixed(prefix: str, result: Mapping[str, float]) -> dict[str, float]:
    """The results of an evaluation as metrics, such as ``val_loss``."""
    return {f"{prefix}_{name}": value for name, value in result.items() if name != "targets"}


def in_words(result: Mapping[str, float]) -> str:
    """Those in one line, such as ``loss 0.1000, accuracy 0.9500``."""
    return ", ".join(f"{name} {value:.4f}" for name, value in result.items() if name != "targets")


def _summary(metrics: Mapping[str, float]) -> Any:
    """All metrics in one record; one `add_scalar` per metric would take five times as long."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = (Summary.Value(tag=name, simple_value=value) for name, value in metrics.items())
    return Summary(value=values)


def _open_truncated(path: Path, step: int) -> TextIO:
    """Open the file for appending, with the lines up to `step` in it."""
    kept = list(_lines_until(path, step)) if step and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)  # atomic: a kill loses no line
    return path.open("a", encoding="utf-8")


def _lines_until(path: Path, step: int) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            return  # truncated by a kill
        try:
            values = json.loads(line)
            kept = values["step"] <= step and "test_accuracy" not in values
        except (ValueError, LookupError, TypeError, RecursionError):
            kept = False  # not written by this trainer
        if kept:
            yield line


def _tensorboard_writer(folder: Path, first_step: int) -> Any:
    """TensorBoard's writer, or None with a notice if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: metrics go to metrics.jsonl only", flush=True)
        return None
    return SummaryWriter(str(folder), purge_step=first_step)
