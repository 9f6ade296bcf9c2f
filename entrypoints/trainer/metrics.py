"""Metrics as JSON lines in ``metrics.jsonl``, and in TensorBoard where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO


class Record:
    """Where numbers are written. Without a folder, nowhere: ranks other than 0 have such a one.

    A resumed run, which has done `step` steps, continues the file. What an interrupted run wrote
    after its last checkpoint is dropped, since those steps are run again, and so is the final
    line of a run that now goes on: the file reads like that of a run never interrupted.
    """

    def __init__(self, folder: Path | None, step: int, *, tensorboard: bool) -> None:
        self._file = _continued(folder / "metrics.jsonl", step) if folder else None
        self._board = _board(folder / "tensorboard", step) if folder and tensorboard else None

    def write(self, step: int, epoch: int, **numbers: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "epoch": epoch, **numbers}) + "\n")
            self._file.flush()
        if self._board is not None:
            self._board.file_writer.add_summary(_summary(numbers), step)

    def close(self) -> None:
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()


def _summary(numbers: Mapping[str, float]) -> Any:
    """All numbers as one record: `add_scalar` for each would take five times as long."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = (Summary.Value(tag=name, simple_value=value) for name, value in numbers.items())
    return Summary(value=values)


def _continued(path: Path, step: int) -> TextIO:
    kept = list(_lines_until(path, step)) if step and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(kept), encoding="utf-8")
    scratch.replace(path)  # a kill in between loses no line
    return path.open("a", encoding="utf-8")


def _lines_until(path: Path, step: int) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            return  # cut short by a kill
        try:
            values = json.loads(line)
            kept = values["step"] <= step and "test_accuracy" not in values
        except (ValueError, LookupError, TypeError, RecursionError):
            kept = False  # written by something else
        if kept:
            yield line


def _board(folder: Path, step: int) -> Any:
    """TensorBoard's writer, or None and one line that says so."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: metrics go to metrics.jsonl only", flush=True)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
