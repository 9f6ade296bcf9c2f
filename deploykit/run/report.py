"""What is known of a run for `compare` and `report`: settings, source, numbers, time, nodes, cause.

`facts` reads one run, `compare` puts several side by side, and `of` adds what only the page of
`report` shows. The time of a run is split into spans: it waited, or an attempt ran.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deploykit.backends import base as backend
from deploykit.cost import prices
from deploykit.cost.prices import Spent
from deploykit.diagnose.ranking import Cause, Evidence
from deploykit.job.model import LogLine, State
from deploykit.job.settings import settings
from deploykit.lib import units
from deploykit.lib.errors import DeploykitError
from deploykit.observe import exit_records, logfiles, stacks, traces, usage
from deploykit.observe.evaluation import Evaluation
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.metrics.series import Series, is_chosen
from deploykit.observe.traces import RankProfile
from deploykit.observe.usage import Sample
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import evaluation as run_evaluation
from deploykit.run.log_selection import SLOW_RANK
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run, now

Better = Literal["less", "more"]

_LESS = {"loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "nll"}
_LESS |= {"fid", "ece"}
_COSTS = {"seconds", "time", "memory"}
_MORE = {"accuracy", "acc", "f1", "precision", "recall", "auc", "auroc", "bleu", "rouge", "map"}
_MORE |= {"r2", "psnr", "ssim", "reward", "iou", "dice"}
"""Words in the name of a metric that say which of two values is better."""
_RATE = re.compile(
    r"(?:.*[\W_])?(?:per_|/)s(?:ec|econd)?(?:[\W_].*)?|.*\w/s(?:/.*)?|mfu", re.DOTALL
)
_PREFLIGHT = "preflight: "
_EVENT = re.compile(
    r"no progress for |progress resumed|there is progress again|on_stall: |the cost cap is near|"
    r"SIG[A-Z0-9]{1,8} arrived|the ranks did not exit in time|preflight: (?:passed|stopped|FAILED)"
)
"""Lines of the launchers that belong into the timeline."""
_RESTART = re.compile(r"restart (\d{1,6}) \(")
_NETWORK = re.compile(r"network: (.{1,500})")
_FRAME = re.compile(r' {1,8}File "(.{1,400})", line (\d{1,9})(, in .{1,100})?$')
_NODE = re.compile(r"node (\d{1,9}) of (\d{1,9}) \((.{1,60})\): rendezvous at (.{1,100})")
_FILES = ("job.json", "plan.sh", "plan.json", "uncommitted.diff", "source.json")
_MAX_REMARKS = 20_000
_MAX_EVENTS = 60
_MAX_NODES = 64
_MAX_LINES = 200
"""Lines of a preflight, and of stacks."""
_MAX_PROFILES, _MAX_PROFILE_BYTES = 16, 1 << 22
"""Traces that are read, and bytes of each; `deploykit profile` reads all."""
_MAX_LOGS = 32


@dataclass(frozen=True)
class Metric:
    """One metric of a run, from the source that has most of its values."""

    name: str
    last: float
    best: float | None
    """The least or greatest; None for speed, or if the name does not say which is better."""
    source: str


@dataclass(frozen=True)
class SourceFacts:
    bundle: str
    commit: str | None
    changed: int | None
    """Bytes of uncommitted changes; None if unknown."""

    @property
    def changes(self) -> str | None:
        if self.changed is None:
            return None
        return units.size(self.changed) if self.changed else "none"


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run at one moment."""

    row: Run
    settings: dict[str, str]
    """Each key of the job and each argument, as text; without those that are not set."""
    source: SourceFacts
    seconds: float | None
    cost: Spent | None
    restarts: int
    metrics: dict[str, Metric]
    curves: dict[str, Series] = field(repr=False)
    """Of each metric, from the source of its `Metric`."""
    attempts: dict[int, int]
    """The first step of each attempt but the first."""
    remarks: list[LogLine] = field(repr=False)
    """Lines of the launchers, and those of the trainer about slow ranks."""
    progress: Progress
    problems: list[str]
    packages: dict[str, str] = field(repr=False)
    """The version of each Python package by its name; empty if it was not recorded."""
    evaluation: tuple[str, Evaluation] | None = field(default=None, repr=False)
    """The result of an evaluation and its run: this one, or the newest evaluation of it."""


def facts(row: Run, names: Sequence[str] = ()) -> RunFacts:
    """The facts of a run; `names` are patterns of the metrics that are wanted."""
    folder = Path(row.folder)
    read = RunMetrics(row)
    remarks: list[LogLine] = []

    def hear(line: LogLine) -> None:
        if len(remarks) < _MAX_REMARKS and (line.rank is None or SLOW_RANK.match(line.text)):
            remarks.append(line)

    read.refresh(heard=hear)
    read.final()
    curves: dict[str, Series] = {}
    for series in read.collection.series.values():
        other = curves.get(series.name)  # of equal length the first, as files come after logs
        if is_chosen(series.name, names) and (other is None or series.count > other.count):
            curves[series.name] = series
    metrics = {name: _metric(series) for name, series in curves.items()}
    evaluated = run_evaluation.newest(row)
    if evaluated is not None and evaluated[0].run != row.run:
        metrics |= _evaluated(*evaluated, names)
    patch, price = folder / "uncommitted.diff", folder / backend.PRICE
    changed = patch.stat().st_size if row.revision is not None and patch.exists() else None
    billed = row.billed if State(row.state).final else row.seconds(now())
    return RunFacts(
        row=row,
        settings=dict(settings(row.job_data())),
        source=SourceFacts(row.bundle, row.revision, changed),
        seconds=row.seconds(now()),
        cost=prices.spent(price, billed) if price.exists() else None,
        restarts=exit_records.attempt(folder) or 0,
        metrics=metrics,
        curves=curves,
        attempts=read.collection.restarts,
        remarks=remarks,
        progress=read.progress(),
        problems=[*read.problems, *(evaluated[1].problems if evaluated else ())],
        packages=usage.packages(folder, remarks),
        evaluation=evaluated and (evaluated[0].run, evaluated[1]),
    )


def _evaluated(row: Run, result: Evaluation, names: Sequence[str]) -> dict[str, Metric]:
    """The numbers of a run's evaluation, as metrics of the run."""
    numbers = {f"evaluation {name}": value for name, value in result.numbers.items()}
    return {
        name: Metric(name, value, value if better(name) else None, row.run)
        for name, value in numbers.items()
        if is_chosen(name, names)
    }


def _metric(series: Series) -> Metric:
    name = series.name.lower()
    # single values of time and memory are noise
    is_speed = bool(_words(name) & _COSTS or _RATE.fullmatch(name))
    side = None if is_speed else better(name)
    best = None if side is None else series.least if side == "less" else series.greatest
    return Metric(series.name, series.last.value, best, series.source)


def better(name: str) -> Better | None:
    """Which of two values of a metric is better, by its name; None if that does not say."""
    name = name.lower()
    words = _words(name)
    if _RATE.fullmatch(name) or words & _MORE:
        return "more"
    return "less" if words & (_LESS | _COSTS) or name.endswith("loss") else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name))


@dataclass(frozen=True)
class Setting:
    """A setting of each run; None if a run does not have it."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class MetricRow:
    """One metric of each run; None if a run does not have it."""

    name: str
    better: Better | None
    values: tuple[Metric | None, ...]

    @property
    def differs(self) -> bool:
        """Whether its last or best value is not the same in all runs."""
        return len({metric and (metric.last, metric.best) for metric in self.values}) > 1

    @property
    def has_best(self) -> bool:
        """Whether the best value of a run may be another than its last."""
        return any(metric is not None and metric.best is not None for metric in self.values)

    def winners(self, value: Callable[[Metric], float | None]) -> frozenset[int]:
        """The places of the best values; none if all are equal or only one run has it."""
        by_run = {at: value(metric) for at, metric in enumerate(self.values) if metric is not None}
        finite = {at: n for at, n in by_run.items() if n is not None and math.isfinite(n)}
        if self.better is None or len(set(finite.values())) < 2:  # noqa: PLR2004 - no choice
            return frozenset()
        top = (min if self.better == "less" else max)(finite.values())
        return frozenset(at for at, number in finite.items() if number == top)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in the order in which they were named."""

    facts: tuple[RunFacts, ...]
    settings: tuple[Setting, ...]
    """Those that differ."""
    same: int
    """The number of the others."""
    packages: tuple[Setting, ...]
    """Packages of which the runs have different versions, or some none."""
    metrics: tuple[MetricRow, ...]
    """All, whether or not they differ."""


def compare(runs: Sequence[RunFacts]) -> Comparison:
    """Compare runs: the source, then keys of the job, then arguments, then metrics."""
    given = dict.fromkeys(name for run in runs for name in run.settings)
    names = sorted(given, key=lambda name: name.startswith(("-", "argument ")))
    rows: dict[str, list[str | None]] = {
        "commit": [run.source.commit for run in runs],
        "uncommitted changes": [run.source.changes for run in runs],
        "bundle": [run.source.bundle or None for run in runs],
        "backend": [run.row.backend for run in runs],
        **{name: [run.settings.get(name) for run in runs] for name in names},
    }
    all_settings = [Setting(name, tuple(values)) for name, values in rows.items()]
    present = [setting for setting in all_settings if set(setting.values) != {None}]
    different = tuple(setting for setting in present if setting.differs)
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    return Comparison(
        facts=tuple(runs),
        settings=different,
        same=len(present) - len(different),
        packages=_different_packages(runs),
        metrics=tuple(
            MetricRow(name, better(name), tuple(run.metrics.get(name) for run in runs))
            for name in metrics
        ),
    )


def _different_packages(runs: Sequence[RunFacts]) -> tuple[Setting, ...]:
    """Without runs whose packages are not known, which would differ in all of them."""
    known = [run.packages for run in runs if run.packages]
    names = sorted({name for packages in known for name in packages})
    return tuple(
        Setting(name, tuple(run.packages.get(name) for run in runs))
        for name in names
        if len({packages.get(name) for packages in known}) > 1
    )


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, in seconds since the epoch."""

    time: float
    text: str


@dataclass(frozen=True)
class Span:
    """A part of a run's time: it waited (attempt None), or an attempt ran."""

    begin: float
    end: float
    attempt: int | None


def _attempt_starts(run: RunFacts) -> dict[int, float]:
    """When each attempt began: by the launchers' own lines, else by the backend.

    A scheduler that starts a job again reports the last start only.
    """
    started, begun = run.row.started, dict[int, float]()
    for line in run.remarks:
        if line.time is not None and line.node is not None:
            again = _RESTART.match(line.text)
            begun.setdefault(int(again[1]) if again else 0, line.time.timestamp())
    if started is not None and run.restarts in {0, *begun}:
        begun[run.restarts] = started
    elif started is not None and len(begun) <= 1:
        begun = {0: started}
        for number, _, time in _restarts(run)[: run.restarts]:
            begun[number] = time
    return dict(sorted(begun.items()))


def _restarts(run: RunFacts) -> list[tuple[int, str, float]]:
    listed = exit_records.restart_times(Path(run.row.folder))
    return [(number, why, moment.timestamp()) for number, why, moment in listed]


def _events(run: RunFacts, starts: Mapping[int, float]) -> Iterator[Event]:
    row = run.row
    yield Event(row.created, "submitted")
    for attempt, time in starts.items():
        yield Event(time, f"attempt {attempt + 1} started" if len(starts) > 1 else "started")
    for number, why, time in _restarts(run):
        yield Event(time, f"restart {number}: {why.replace('_', ' ')}")
    for made in exit_records.decisions(Path(row.folder)):
        if made.error:
            yield Event(made.time.timestamp(), made.why)
    for line in run.remarks:
        repeated = line.text.startswith(_PREFLIGHT) and line.node  # each node says the same
        if line.rank is None and line.time and not repeated and _EVENT.match(line.text):
            yield Event(line.time.timestamp(), f"{line.origin}{line.text}")
    if row.finished is not None:
        yield Event(row.finished, f"{row.state}{f': {row.reason}' if row.reason else ''}")


def _spans(run: RunFacts, starts: Mapping[int, float]) -> Iterator[Span]:
    """How long it waited before each attempt, and how long each ran, as far as that is known.

    An attempt without a recorded restart lasts until the next one.
    """
    begin, end = run.row.created, run.row.finished or now()
    ends = {number - 1: time for number, _, time in _restarts(run)}
    begun = sorted((time, attempt) for attempt, time in starts.items() if time < end)
    for number, (time, attempt) in enumerate(begun, 1):
        start = max(begin, time)
        latest = begun[number][0] if number < len(begun) else end
        if start > begin:
            yield Span(begin, start, None)
        begin = max(start, min(ends.get(attempt, latest), latest))
        yield Span(start, begin, attempt)
    if end > begin:
        yield Span(begin, end, None)


def seconds(run: RunFacts, spans: Iterable[Span] | None = None) -> float | None:
    """How long it ran: for a run with restarts all attempts, of which a scheduler reports the last.

    `spans` are its spans if they are known.
    """
    if not run.restarts:
        return run.seconds
    spans = _spans(run, _attempt_starts(run)) if spans is None else spans
    return sum(span.end - span.begin for span in spans if span.attempt is not None)


@dataclass(frozen=True)
class RunReport:
    facts: RunFacts
    job: dict[str, Any]
    starts: list[float]
    events: list[Event]
    spans: list[Span]
    nodes: list[tuple[str, str]]
    """The number of each node, its host, its rendezvous; its network and the reason for it."""
    preflight: list[str]
    slow: list[str]
    causes: tuple[Cause, ...]
    raised_at: list[str]
    """The frame of a traceback that led to the first cause, and its line of code."""
    stacks: list[str]
    usage: list[Sample]
    profile: list[RankProfile]
    """Of the ranks whose steps were profiled, as far as they are read quickly."""
    software: list[tuple[str, str]]
    """Versions on node 0, and its GPUs."""
    files: list[Path]
    problems: list[str]


def of(row: Run) -> RunReport:
    """Everything that is known of a run. Asks its backend only if its logs are not here."""
    run, job, folder = facts(row), row.job_data(), Path(row.folder)
    starts = _attempt_starts(run)
    causes, problems = _causes(row)
    newest = stacks.newest(folder)
    return RunReport(
        facts=run,
        job=job,
        starts=list(starts.values()),
        events=sorted(_events(run, starts), key=lambda event: event.time)[:_MAX_EVENTS],
        spans=list(_spans(run, starts)),
        nodes=list(_nodes(run, job)),
        preflight=_preflight(run),
        slow=[line.text for line in run.remarks if line.rank is not None][-5:],
        causes=causes,
        raised_at=_raised_at(causes[0].evidence[0], folder) if causes else [],
        stacks=list(stacks.lines(stacks.read(newest)))[:_MAX_LINES] if newest else [],
        usage=usage.history(folder),
        profile=list(_profile(folder)),
        software=usage.software(folder),
        files=list(_files(folder)),
        problems=[*run.problems, *problems],
    )


def _causes(row: Run) -> tuple[tuple[Cause, ...], list[str]]:
    if State(row.state) not in {State.FAILED, State.BLOCKED}:
        return (), []
    try:
        diagnosis = run_diagnosis.of_run(row)
    except (DeploykitError, OSError) as error:
        return (), [f"the cause: {error}"]
    return diagnosis.causes, list(diagnosis.warnings)


def _raised_at(proof: Evidence, folder: Path) -> list[str]:
    """The last frames of the traceback that ends with a line of a log: the script's, and any other.

    Each with its line of code. Nothing if the line ends no traceback.
    """
    before: deque[str] = deque(maxlen=_MAX_LINES)
    with contextlib.suppress(OSError), Path(proof.file).open(errors="replace") as file:
        for text in itertools.islice(file, max(0, proof.line - 1)):
            line = logfiles.parse(text.rstrip("\n"), None)
            if line.rank == proof.rank:
                before.append(line.text)
    frames: list[tuple[str, str]] = []
    for text, after in itertools.pairwise([*before, ""]):
        if frame := _FRAME.match(text):
            path = frame[1].removeprefix(f"{folder}/source/")
            frames.append((f"{path}:{frame[2]}{frame[3] or ''}", f"  {after.strip()}"))
        elif not text.startswith(" "):
            frames = []
    own = [one for one in frames if not one[0].startswith(("/", "<"))]
    return [text for one in dict.fromkeys([*own[-1:], *frames[-1:]]) for text in one]


def _nodes(run: RunFacts, job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """For each node of the last attempt its name, and its network with the reason for it."""
    hosts: dict[int, str] = {}
    match job.get("resources"):
        case {"processes_per_node": int(ranks)} if ranks > 0:  # its ranks may have recorded it
            recorded = exit_records.hosts(Path(run.row.folder))
            hosts = {rank // ranks: host for rank, host in recorded.items()}
    networks: dict[int, str] = {}
    meetings: dict[int, tuple[str, str]] = {}
    for line in run.remarks:
        if line.node is None:
            continue
        if network := _NETWORK.match(line.text):
            networks[line.node] = network[1]
        elif met := _NODE.match(line.text):
            meetings[line.node] = f" of {met[2]}, {met[3]}", f"; rendezvous at {met[4]}"
    for node in sorted({*hosts, *meetings, *networks})[:_MAX_NODES]:
        of_how_many, meeting = meetings.get(node, ("", ""))
        host = f", on {hosts[node]}" if node in hosts else ""
        yield f"node {node}{of_how_many}{host}{meeting}", networks.get(node, "")


def _preflight(run: RunFacts) -> list[str]:
    """The lines of node 0 about the last preflight."""
    lines: list[str] = []
    for line in run.remarks:
        if line.node in {0, None}:
            if line.text.startswith("restart "):
                lines = []
            elif line.text.startswith(_PREFLIGHT):
                lines.append(line.text.removeprefix(_PREFLIGHT))
    return lines[-_MAX_LINES:]


def _profile(folder: Path) -> Iterator[RankProfile]:
    for path in traces.files(folder / traces.FOLDER)[:_MAX_PROFILES]:
        if path.stat().st_size <= _MAX_PROFILE_BYTES:
            with contextlib.suppress(DeploykitError, OSError):
                yield traces.read(path)


def _files(folder: Path) -> Iterator[Path]:
    """The plan and the like, the first logs, and the folders of results."""
    logs = sorted(folder.glob("logs/*.log"))[:_MAX_LOGS]
    named = [*(folder / name for name in _FILES), *logs]
    yield from (path for path in named if path.is_file() and path.stat().st_size)
    for name in (*backend.FOLDERS, stacks.FOLDER):
        path = folder / name
        if path.is_dir() and any(path.iterdir()):
            yield path
