"""Evaluate the model of a run, as a run of its own.

The evaluation has the source, the job and the data of the run, with another program:
``evaluate.py``. It reads the checkpoint from the folder in ``DEPLOYKIT_DATA_EVALUATED``, and writes
`evaluation.json` to ``DEPLOYKIT_OUTPUT_DIR``. Both runs keep a record of each other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from deploykit.backends import base
from deploykit.job.decode import from_json, read_record
from deploykit.job.file import Overrides
from deploykit.job.model import State
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, NotFound, UsageError
from deploykit.observe import evaluation
from deploykit.observe.evaluation import Evaluation
from deploykit.run import export, fetch, lifecycle, model_channel, registry, rerun
from deploykit.run import state as run_state
from deploykit.run.export import Checkpoint
from deploykit.run.lifecycle import Prepared
from deploykit.run.registry import Run

SCRIPT = "evaluate.py"
CHANNEL = "evaluated"
_SENT = "deploykit_evaluate.py"
"""The name of our program beside the run's script, which may have an `evaluate.py` of its own."""
_PARENT = "evaluation_of.json"
"""In the run folder of an evaluation: what it evaluates."""
_CHILDREN = "evaluations.jsonl"
"""In the run folder of an evaluated run: its evaluations, a line for each."""
_FETCHED = "fetched"
"""In the run folder of an evaluation: its result, if that was elsewhere."""
_MAX_RECORD = 1 << 20
_NAME_END = "-eval"
_MAX_NAME = 40
_OF_TRAINING: Overrides = (
    ("checkpoints", None),
    ("output", None),
    ("outputs", []),
    ("keep_checkpoints", None),
    ("retries", 0),
    ("profile", None),
    ("resources.nodes", 1),
    ("resources.min_nodes", None),
)
"""Keys of the run that are for its training alone, with their values in an evaluation."""


@dataclass(frozen=True)
class Planned:
    """An evaluation that can be submitted."""

    prepared: Prepared
    row: Run
    checkpoint: Checkpoint
    script: str

    def submit(self) -> Run:
        """Send it, and record what it evaluates. Raises as `lifecycle.submit`."""
        plan = self.prepared.plan
        if not registry.lookup(plan.run):  # else it has its record, or belongs to another job
            self._record()
        return lifecycle.submit(plan)

    def _record(self) -> None:
        plan = self.prepared.plan
        child = paths.private_folder(paths.run_folder(plan.run))
        record = {"run": self.row.run, "checkpoint": self.checkpoint.label, "script": self.script}
        paths.write(child / _PARENT, json.dumps(record) + "\n")
        children = Path(self.row.folder, _CHILDREN)
        paths.touch(children)
        with children.open("a", encoding="utf-8") as file:  # which another evaluation may do too
            file.write(json.dumps(plan.run) + "\n")


@contextlib.contextmanager
def prepare(  # noqa: PLR0913 - the command's options
    row: Run,
    *,
    checkpoint: str | None = None,
    split: str | None = None,
    slice_by: str | None = None,
    script: Path | None = None,
    overrides: Overrides = (),
    arguments: Sequence[str] = (),
    backend: str | None = None,
    run: str | None = None,
    fetch_first: bool = True,
) -> Iterator[Planned]:
    """The plan of an evaluation of a run, to be submitted within the context.

    `script` is a program of yours, by its path on this machine. `fetch_first` may copy the
    checkpoint to this machine, if `backend` cannot read it where it is. Raises NotFound without a
    checkpoint or a program, and what `rerun.prepare` raises.
    """
    chosen = export.choose(row, checkpoint)
    entry = row.job_data().get("entrypoint") or {}
    folder = PurePosixPath(entry.get("script") or "").parent
    program, files = _program(row, chosen, folder, script)
    channel = model_channel.of_checkpoint(row, chosen, backend or row.backend, fetch=fetch_first)
    words = ["--split", split] if split else []
    words += ["--slice-by", slice_by] if slice_by else []
    if words:
        _refuse_unread(words[::2], row, program, files)
    task = _task(entry.get("args") or ())
    if task and not script and chosen.kind == "trainer":
        words += ["--task", task]
    name = f"{row.name[: _MAX_NAME - len(_NAME_END)].rstrip('-')}{_NAME_END}"
    changes: list[Any] = [
        ("name", name),
        *_OF_TRAINING,
        ("entrypoint", {"script": program, "args": words}),
        (f"data.{CHANNEL}", channel),
        *overrides,
    ]
    with rerun.prepare(row, changes, run, arguments, backend, files) as prepared:
        model_channel.require_reachable(prepared.plan, CHANNEL)
        yield Planned(prepared, row, chosen, script.name if script else SCRIPT)


def _program(
    row: Run, checkpoint: Checkpoint, folder: PurePosixPath, script: Path | None
) -> tuple[str, dict[str, Path]]:
    """The path of the program in the source, and the files to add to it.

    Raises NotFound for a script of one's own that has no such program.
    """
    if script is not None:
        if not script.is_file():
            raise NotFound(f"{script} not found")
        path = (folder / script.name).as_posix()
        return path, {path: script}
    if checkpoint.kind == "trainer":
        path = (folder / _SENT).as_posix()
        return path, {path: paths.shipped("entrypoints") / SCRIPT}
    with tarfile.open(rerun.kept_source(row)) as archive:
        sent = {str(PurePosixPath(name)) for name in archive.getnames()}
    own = [(folder / SCRIPT).as_posix(), SCRIPT]
    if program := next((path for path in own if path in sent), None):
        return program, {}
    variable = model_channel.variable(CHANNEL)
    raise NotFound(
        f"the source of {row.run} has no {SCRIPT} to evaluate {checkpoint.label}",
        hint="only models of the reference trainer can be evaluated without your own code; write "
        f"an {SCRIPT} that loads the model from {variable} and writes its results to "
        f"{evaluation.NAME} in DEPLOYKIT_OUTPUT_DIR, and pass it with --script {SCRIPT}",
    )


def _refuse_unread(
    options: Sequence[str], row: Run, program: str, files: Mapping[str, Path]
) -> None:
    """Raise UsageError for an option that the text of a program does not mention."""
    if program in files:
        text = files[program].read_bytes()
    else:
        with tarfile.open(rerun.kept_source(row)) as archive:
            file = archive.extractfile(program)
            text = file.read() if file else b""
    for option in options:
        if not re.search(option.strip("-").replace("-", "[-_]").encode(), text):
            raise UsageError(
                f"{PurePosixPath(program).name} does not read {option}",
                hint=f"let it parse {option}, or pass its own arguments after `--`",
            )


def _task(arguments: Sequence[str]) -> str | None:
    """The task of one's own that a run of the reference trainer has."""
    words = list(map(str, arguments))
    tasks = [
        after if word == "--task" else word.removeprefix("--task=")
        for word, after in itertools.pairwise([*words, ""])
        if word == "--task" or word.startswith("--task=")
    ]
    return tasks[-1] if tasks and ":" in tasks[-1] else None


def _children(row: Run) -> list[str]:
    """The ids of the evaluations of a run, the oldest first."""
    try:
        lines = read_record(Path(row.folder, _CHILDREN), _MAX_RECORD).splitlines()
        return [name for line in lines if isinstance(name := from_json(line), str)]
    except (OSError, ValueError):
        return []


def of(row: Run) -> list[Run]:
    """The evaluations of a run with their current state, the newest first."""
    known = registry.lookup(*_children(row)).values()
    rows = run_state.refresh(list(known)) if known else []
    return sorted(rows, key=lambda each: each.created, reverse=True)


def parent(row: Run) -> tuple[str, str] | None:
    """The run that an evaluation is of, and the name of its checkpoint; None for other runs."""
    try:
        record = from_json(read_record(Path(row.folder, _PARENT), _MAX_RECORD))
        return str(record["run"]), str(record["checkpoint"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def newest(row: Run) -> tuple[Run, Evaluation] | None:
    """The result of an evaluation, or of the newest finished one of another run."""
    for each in [row] if parent(row) else of(row):
        if (known := result(each)) is not None:
            return each, known
    return None


def result(row: Run) -> Evaluation | None:
    """The result of an evaluation, which is fetched once if it is elsewhere; None without one.

    What goes wrong is among its problems.
    """
    if row.state != State.SUCCEEDED.value:
        return None
    try:
        return evaluation.read(_file(row))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, DeploykitError) as error:
        return Evaluation(problems=[f"{row.run}: {error}"])


def _file(row: Run) -> Path:
    """The file of the result, on this machine."""
    engine = base.find(row.backend)
    if not base.offers(engine, "files"):
        return fetch.folder_here(row, "output") / evaluation.NAME
    copied = Path(row.folder, _FETCHED)
    path = copied / "output" / evaluation.NAME
    if path.is_file():
        return path
    listing = fetch.listing(row, ("output",))
    if listing.here:
        return fetch.folder_here(row, "output") / evaluation.NAME
    names = {evaluation.NAME, *fetch.ARCHIVES}
    fetch.fetch(row, [one for one in listing.files if one.file.name in names], (), copied)
    return path
