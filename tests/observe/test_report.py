"""`report`: one HTML file, read by a parser and, where there is one, by a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from deploykit.backends import base as backend
from deploykit.cli import main as cli
from deploykit.cli import report_page, report_sections
from deploykit.job.model import State, Status
from deploykit.lib import render
from deploykit.observe import charts, evaluation, usage
from deploykit.observe.charts import Chart, Curve
from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.series import Collection
from deploykit.run import registry
from tests.browser import AXE, BROWSER, findings, opened
from tests.cli.test_profile import event, write
from tests.live_run import STAMP

EVIL = (
    "</title></pre></style><script>alert(1)</script><img src=x onerror='alert(2)'>\"`&\x1b[2J\u202e"
)
ALONE = {"meta", "img"}
"""Elements without an end."""


class Page(HTMLParser):
    """What a page has: its elements, its texts, whether they are well nested."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(Path(path).read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join("\n".join(self.texts).split())


def checked(path):
    """The page, after what every page must be: safe, nested, described, within its size."""
    shown = Page(path)
    assert shown.open == []
    assert Path(path).stat().st_size <= report_page.MAX_BYTES
    assert {tag for tag, _ in shown.tags}.isdisjoint({"script", "iframe", "object", "link", "form"})
    (policy,) = [one["content"] for one in shown.all("meta") if "http-equiv" in one]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    for tag, attrs in shown.tags:
        assert not any(name.startswith("on") for name in attrs), tag
        assert attrs.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        if tag == "svg":
            assert "role" in attrs or attrs["aria-hidden"] == "true"
    ids = [attrs["id"] for _, attrs in shown.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for link in shown.all("a"):
        parts = urlsplit(link["href"])
        assert (parts.scheme, Path(unquote(parts.path)).exists()) == ("file", True)
    return shown


def report(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(["report", *words]) == code
    return capsys.readouterr()


def trained(run, losses, **job):
    """The job and the log of a run that prints a loss for each step."""
    content = {
        "entrypoint": {"script": "train.py", "module": None, "args": ["--lr", "0.1"]},
        "resources": {"nodes": 2, "processes_per_node": 4},
        "env": {"OMP_NUM_THREADS": "1", "TOKEN": "secret:env:TOKEN"},
        **job,
    }
    (run.folder / backend.JOB).write_text(json.dumps(content))
    run.log(*(f"step {step}/99 loss {loss} lr 0.1" for step, loss in enumerate(losses, 1)))
    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_succeeded(live, here, capsys):
    trained(live, [2, 1, 0.5])
    live.end()
    shown = report(capsys, "live-run")
    assert shown.out.startswith("report-live-run.html: ")
    found = checked("report-live-run.html")
    assert "live-run succeeded" in found.text
    assert re.search(r"live-run (succeeded|is).* 2 nodes, 8 ranks", found.text)
    assert "It reached step 3/99, loss 0.5." in found.text
    assert "command train.py --lr 0.1 handle" in found.text
    assert "secret:env:TOKEN" in found.text  # the reference; no report has the secret
    charts = [one["aria-labelledby"] for one in found.all("svg") if "aria-labelledby" in one]
    assert charts == ["chart-0", "chart-1"]  # loss, lr
    assert "logs/node-0.log" in found.text


def test_versions_and_gpus_of_the_run(live, here, capsys):
    trained(live, [2, 1])
    (live.folder / "exit_records").mkdir()
    data = {"versions": {"Python": "3.11.7", "torch": EVIL}, "gpus": ["H100"] * 8, "driver": "550"}
    (live.folder / "exit_records/software.json").write_text(json.dumps(data))
    report(capsys, "live-run")
    assert "Python 3.11.7" in (text := checked("report-live-run.html").text)
    assert "GPUs 8 x H100 driver 550" in text


def test_the_nodes_of_the_last_attempt_with_their_hosts(live, here, capsys):
    trained(live, [2, 1])
    (live.folder / "exit_records").mkdir()
    (live.folder / "exit_records/attempt.json").write_text('{"attempt": 1}')
    for rank, host, attempt in ((0, "n7", 1), (3, "n7", 1), (4, "n<9>", 1), (5, "n8", 0)):
        record = {"host": host, "python": "/p", "libraries": "", "attempt": attempt}
        (live.folder / f"exit_records/process-{rank}.json").write_text(json.dumps(record))
    with (live.folder / "logs/node-0.log").open("a") as file:
        file.write(f"{STAMP} [node 0] node 0 of 2 (slurm): rendezvous at 10.0.0.1 port 1234\n")
        file.write(f"{STAMP} [node 0] network: eth0 is the route\n")
    report(capsys, "live-run")
    text = checked("report-live-run.html").text
    assert "node 0 of 2, slurm, on n7; rendezvous at 10.0.0.1 port 1234 eth0 is the route" in text
    assert "node 1, on n<9>" in text
    assert "n8" not in text


@pytest.mark.parametrize("text", ["", "[]", '{"versions": [], "gpus": 3}'])
def test_a_record_of_software_that_is_none(tmp_path, text):
    (tmp_path / "exit_records").mkdir()
    (tmp_path / "exit_records/software.json").write_text(text)
    assert usage.software(tmp_path) == []


def test_a_run_that_failed_says_why_and_what_to_do(live, here, capsys):
    trained(live, [2, 1])
    live.log("Traceback (most recent call last):", '  File "train.py", line 3, in <module>')
    live.log(f"ValueError: bad batch {EVIL}".replace("\x1b[2J\u202e", ""))
    live.end(code=1)
    report(capsys, "live-run")
    found = checked("report-live-run.html")
    assert "failed" in found.text
    assert "Why it failed" in found.text
    assert "user_code_error" in found.text
    assert "<script>alert(1)</script>" in found.text  # as text


@pytest.mark.parametrize("frame", [", in forward", ""])
def test_the_cause_is_said_once_with_the_line_that_raised(live, here, capsys, frame):
    trained(live, [2, 1.5])
    source = live.folder / "source/train.py"
    live.log(
        "Traceback (most recent call last):",
        f'  File "{source}", line 3, in <module>',
        "    main()",
        f'  File "{source}", line 17{frame}',
        "    raise_it(<b>)",
        '  File "/nowhere/torch/nn/modules.py", line 8, in raise_it',
        "    raise ValueError(text)",
        "    ^^^^^^^^^^^^^^^^^^^^^^",
        "ValueError: bad batch",
    )
    live.end(code=1)
    report(capsys)
    found = checked("report-live-run.html").text
    lines = f"train.py:17{frame} raise_it(<b>) /nowhere/torch/nn/modules.py:8, in raise_it"
    assert f"{lines} raise ValueError(text) ValueError: bad batch" in found
    assert "<module>" not in found
    assert found.count("the program raised an exception") == 1
    assert found.count("bad batch") == 1
    assert "found in logs/node-0.log:" in found
    cli.main(["diagnose", "live-run"])
    assert f"proof      {live.folder}/logs/node-0.log:" in capsys.readouterr().out


def test_the_numbers_that_people_look_for_come_first(live, here, capsys):
    trained(live, [2, 0.5, 1])
    live.log("epoch 1/2 accuracy 0.75")
    live.end()
    report(capsys)
    text = checked("report-live-run.html").text
    numbers = "best loss 0.5 best accuracy 0.75 step 3/99"
    assert re.search(rf"duration [\w ]+ {numbers} (pace [\w. /]+ )?ranks 8 on 2 nodes Curves", text)


def test_a_run_that_was_preempted_thrice(live, here, capsys):
    records = live.folder / "exit_records"
    records.mkdir()
    (records / "attempt.json").write_text('{"attempt": 3}')
    live.log(*(f"step {step}/99 loss {9 - step}" for step in (1, 2, 3)))
    for number, minute in ((1, 10), (2, 20), (3, 30)):
        time = f"2026-11-21T01:{minute}:00Z"
        record = {"restart": number, "why": "preemption", "time": time}
        (records / f"restart-{number}.json").write_text(json.dumps(record))
        with (live.folder / "logs/node-0.log").open("a") as file:
            file.write(f"{STAMP} [node 0] restart {number} (preemption)\n")
            file.write(f"{STAMP} [rank 0] step {number + 3}/99 loss {6 - number}\n")
    live.close()
    registry.update("live-run", Status(State.FAILED, "", "stopped", 75))
    report(capsys, "live-run", "--json")
    found = checked("report-live-run.html")
    assert "after 3 restarts" in found.text
    for number in (1, 2, 3):
        assert f"restart {number}: preemption" in found.text
    marks = [one for one in found.all("path") if one.get("class") == "mark"]
    assert len(marks) == 3
    labels = [float(one["x"]) for one in found.all("text") if one.get("class") == "mid small"]
    assert max(labels) <= 420 - 20  # the last one is not cut off


def test_the_time_of_a_job_that_slurm_started_again(here, start, capsys):
    """Slurm tells when the last attempt began; when the others did is in the log."""
    started, finished = (
        datetime(2026, 11, 21, 1, 40, tzinfo=UTC),
        datetime(2026, 11, 21, 2, tzinfo=UTC),
    )
    created = datetime(2026, 11, 21, 1, tzinfo=UTC).timestamp()
    place = ("slurm", "prod", str(here), "", "", None, created, "")
    registry.add(registry.Run("re-run", "re-run", *place))
    registry.confirm("re-run", "42")
    registry.update("re-run", Status(State.SUCCEEDED, "", "", 0, started, finished))
    records = here / "exit_records"
    records.mkdir()
    (records / "attempt.json").write_text('{"attempt": 3}')
    for number, minute in ((1, 10), (2, 15), (3, 30)):  # the third attempt never began
        record = {"restart": number, "why": "preemption", "time": f"2026-11-21T01:{minute}:00Z"}
        (records / f"restart-{number}.json").write_text(json.dumps(record))
    begun = {"01:02": "interfaces: lo", "01:14": "restart 1 (preemption 1)"}
    begun |= {"01:40": "restart 3 (preemption 3)"}
    (here / "logs").mkdir()
    for node in (0, 1):
        with (here / f"logs/node-{node}.log").open("w") as file:
            for time, text in begun.items():
                file.write(f"2026-11-21T{time}:00.000Z [node {node}] {text}\n")
                file.write(f"2026-11-21T{time}:01.000Z [node {node}] preflight: passed at {time}\n")
    report(capsys, "re-run")
    found = checked("report-re-run.html")
    assert (
        "waited 2m 0s; attempt 1 ran 8m 0s; waited 4m 0s; attempt 2 ran 1m 0s; waited 25m 0s; "
        "attempt 4 ran 20m 0s."
    ) in found.text
    assert "re-run succeeded after 29m 0s" in found.text
    phases = [one["class"] for one in found.all("span") if "style" in one]
    assert phases == ["waited", "ended", "waited", "ended", "waited", "succeeded"]
    assert "waited 31m 0s ran for 29m 0s" in found.text
    assert found.text.count("passed at 01:40") == 2  # as an event, and as the preflight
    assert found.text.count("passed at 01:14") == 1
    start("two-b").end()
    capsys.readouterr()
    assert cli.main(["compare", "re-run", "two-b"]) == 0
    assert "duration\t29m 0s\t" in capsys.readouterr().out


def test_what_ranks_used_over_time(live, here, capsys):
    (live.folder / "exit_records").mkdir()
    for node in (0, 1):
        lines = ["{", "[]", '{"time": 3, "ranks": {}}', '{"time": "x", "ranks": {"0": {}}}']
        for minute in range(3):
            usage = {"cpu": 50.0 * minute, "rss": (node + 1 + minute) << 30, "gpu": None}
            ranks = {str(5 * node + local): usage for local in range(5)}
            record = {"time": f"2026-11-21T01:0{minute}:00Z", "attempt": 0, "ranks": ranks}
            lines.append(json.dumps(record))
        (live.folder / f"exit_records/history-{node}.jsonl").write_text("\n".join(lines))
    report(capsys)
    found = checked("report-live-run.html")
    assert "Memory per rank , GiB" in found.text
    assert "CPU usage per rank , % of a core" in found.text
    assert "GPU utilization per rank" not in found.text
    assert "rank 9 4 2 4" in found.text
    assert "rank 4 " not in found.text  # of ten ranks, the eight that use least and most


def test_what_a_step_consists_of(live, here, capsys):
    lines = [
        {"step": 1, "step_seconds": 0.1, "data_seconds": 0.01, "forward_seconds": 0.05},
        {"step": 2, "step_seconds": 0.3, "data_seconds": 0.03, "forward_seconds": 0.15},
    ]
    (live.folder / "output").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (live.folder / "output/metrics.jsonl").write_text(text)
    (live.folder / "profile").mkdir()
    write(live.folder / "profile", 1, [event("aten::mm", 0, 60), event("gloo:all_reduce", 60, 40)])
    report(capsys)
    found = checked("report-live-run.html")
    assert "200 ms on average, of which:" in found.text
    assert "data 20 ms 10% forward 100 ms 50% other 80 ms 40%" in found.text
    assert "rank 1 60% 40% 40% 0%" in found.text


def test_several_runs_lie_over_each_other(start, here, capsys):
    for name, lr in (("one-a", "0.1"), ("two-b", "0.2")):
        entry = {"script": "train.py", "module": None, "args": ["--lr", lr]}
        trained(start(name), [2, float(lr)], entrypoint=entry).end()
    shown = json.loads(report(capsys, "one-a", "two-b", "--output", "both.html", "--json").out)
    assert shown["runs"] == ["one-a", "two-b"]
    assert shown["bytes"] == (here / "both.html").stat().st_size
    assert shown["uri"] == (here / "both.html").as_uri()
    found = checked("both.html")
    assert "2 runs compared" in found.text
    assert "--lr 0.1 0.2" in found.text
    lines = [one["class"] for one in found.all("path") if one.get("class", "").startswith("line")]
    assert lines.count("line c1") == 4  # in the charts of loss and lr, and in their legends
    assert [attrs for tag, attrs in found.tags if attrs.get("class") == "best"]


def test_nothing_that_a_run_says_becomes_markup(start, here, capsys):
    run = start("evil-run")
    trained(
        run,
        [1, 2],
        name=EVIL,
        entrypoint={"script": EVIL, "args": [EVIL, f"--{EVIL}"]},
        env={EVIL: EVIL},
        local={EVIL: EVIL},
    )
    (run.folder / "output").mkdir()
    for step in (1, 2):
        with (run.folder / "output/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, f"{EVIL}loss": step, EVIL: step}) + "\n")
    log = f"network: {EVIL}\n", f"preflight: {EVIL}\n", f"no progress for {EVIL}\n"
    with (run.folder / "logs/node-0.log").open("a") as file:
        file.writelines(f"{STAMP} [node 0] {line}" for line in log)
    with (run.folder / "logs/node-0.log").open("ab") as file:
        file.write(f"{STAMP} [node 0] network: ".encode() + b"\xff\xfe\x00\xed\xa0\x80\n")
    (run.folder / "output" / "x<script>.png").write_bytes(b"\x89PNG")
    run.end(code=1)
    registry.update("evil-run", Status(State.FAILED, EVIL, EVIL, 1))
    report(capsys, "evil-run")
    found = checked("report-evil-run.html")
    assert "<script>alert(1)</script>" in found.text
    assert "\x1b" not in found.text
    assert "\u202e" not in found.text
    other = trained(start("two-b"), [1], entrypoint={"script": EVIL, "args": [EVIL]})
    other.end()
    report(capsys, "evil-run", "two-b", "--output", "two.html")
    checked("two.html")


@pytest.mark.slow
def test_a_report_of_a_huge_run_stays_small(start, here, capsys):
    names = []
    for number in range(2):
        run = start(f"run-{number}x")
        names.append(f"run-{number}x")
        (run.folder / "output").mkdir()
        with (run.folder / "output/metrics.jsonl").open("w") as file:
            for step in range(1, 1500):
                values = {f"metric_{'n' * 60}_{at}": math.sin(step * at) for at in range(60)}
                file.write(json.dumps({"step": step, **values}) + "\n")
        settings = {f"KEY_{at}": "x" * 5000 for at in range(300)}
        trained(run, range(1, 50), env=settings)
        run.log(*("y" * 3000 for _ in range(50)))
    report(capsys, names[0])
    assert (here / f"report-{names[0]}.html").stat().st_size > 200_000
    checked(f"report-{names[0]}.html")
    report(capsys, *names, "--output", "all.html")
    checked("all.html")


@pytest.mark.parametrize("state", [State.UNSENT, State.QUEUED, State.CANCELLED, State.BLOCKED])
def test_a_run_without_anything(live, here, capsys, state):
    shutil.rmtree(live.folder)
    live.close()
    registry.update("live-run", Status(state, "", "why"))
    report(capsys)
    assert "live-run" in checked("report-live-run.html").text


def test_what_exists_is_replaced_only_by_force(live, here, capsys):
    live.end()
    Path("mine.html").write_text("mine")
    shown = report(capsys, "--output", "mine.html", code=64)
    assert "mine.html already exists\n  choose another file with --output" in shown.err
    assert Path("mine.html").read_text() == "mine"
    report(capsys, "--output", "mine.html", "--force")
    checked("mine.html")
    assert "cannot write no/file.html" in report(capsys, "-o", "no/file.html", code=64).err


def test_too_many_runs_are_refused(start, here, capsys):
    names = [start(f"many-{letter}x").folder.name for letter in "abcdefghi"]
    assert "a report shows at most 8 runs, but 9 were given" in report(capsys, *names, code=64).err


def test_pictures_of_an_evaluation_are_within_the_page(here, capsys):
    (here / "output/deep").mkdir(parents=True)
    (here / "output/deep/confusion.png").write_bytes(b"\x89PNG\r\n")
    (here / "output/large.png").write_bytes(bytes(100_000))
    place = ("a", str(here), "", "", None, registry.now(), str(here / "output"))
    registry.add(registry.Run("live-run", "live-run", "local", *place))
    report(capsys, "live-run")
    (image,) = checked("report-live-run.html").all("img")
    assert image == {"src": "data:image/png;base64,iVBORw0K", "alt": "deep/confusion.png"}


@pytest.mark.parametrize(
    ("points", "drawn"),
    [
        ([(1, 1.0)], False),
        ([(1, 1.0), (2, 1.0)], True),
        ([(1, math.nan), (2, 1.0), (3, math.inf)], False),
        ([(1, 1e-320), (2, 1e308), (3, -1e308)], False),
        ([(1, 1e-300), (2, 1e299), (3, 1e308)], True),
        ([(5, 2.0), (5, 3.0)], True),
        ([(1e15, 2.0), (1e15 + 1, math.nan), (1e15 + 2, 0.0), (1e15 + 3, 1.0)], True),
    ],
)
def test_a_chart_of_any_numbers(points, drawn):
    shown = charts.draw([Chart("t", "step", [Curve("c", points), Curve("d", points, "dots")])])
    assert shown  # a single dot can be drawn
    only_lines = charts.draw([Chart("t", "step", [Curve("c", points)])])
    assert bool(only_lines) == drawn
    for path in re.findall(r' d="([^"]*)"', "".join([*shown, *only_lines])):
        assert re.fullmatch(r"(?:[MLHV]-?[\d.]+(?: -?[\d.]+)?)+", path), path


def test_a_chart_has_values_for_the_pointer_and_markers_if_points_are_few():
    lines = [Curve("a<b", [(1, 0.5), (2, 0.25)]), Curve("c", [(1, 9.0), (3, math.nan), (4, 7.0)])]
    (few,) = charts.draw([Chart("t", "step", lines)])
    assert "<title>step 1: a&lt;b 0.5, c 9</title>" in few
    assert "<title>step 2: a&lt;b 0.25, c 9</title>" in few  # the last value so far
    assert "<title>step 4: a&lt;b 0.25, c 7</title>" in few
    assert few.count('class="markers') == 2
    many = [(x, float(x)) for x in range(1000)]
    (shown,) = charts.draw([Chart("t", "step", [Curve("c", many)])])
    assert 'class="markers' not in shown
    assert 40 < shown.count("<title>step ") <= 60


def test_charts_with_the_same_axis_have_the_same_range():
    def labels(page):
        return re.findall(r'class="mid"[^>]*>([^<]*)<', page)

    short, long = Curve("a", [(1, 1.0), (3, 2.0)]), Curve("b", [(1, 1.0), (100, 2.0)])
    first, second = charts.draw([Chart("a", "step", [short]), Chart("b", "step", [long])])
    assert labels(first) == labels(second) == ["20", "40", "60", "80", "100", "step"]
    (by_epoch,) = charts.draw([Chart("a", "epoch", [short])])
    assert labels(by_epoch) == ["1", "2", "3", "epoch"]  # no half epochs


def test_names_on_an_axis_are_cut_to_their_room():
    dots = Curve("c", [(0, 1.0), (1, 2.0)], "dots", ["trial 0", "trial 1"])
    (shown,) = charts.draw([Chart("t", "p", [dots], names=["short", "n" * 90])])
    assert ">short<" in shown
    assert re.search(">n{10,30}…<", shown)
    assert "<title>trial 1</title>" in shown
    assert ">last<" not in shown  # dots have no last value


@pytest.mark.parametrize(
    ("name", "values", "unit", "expected"),
    [
        ("step_seconds", [0.02, 0.01], "ms", [20, 10]),
        ("step_seconds", [20, 10], "s", [20, 10]),
        ("memory_bytes", [2**30, 2**31], "GiB", [1, 2]),
        ("memory_bytes", [2**20, 2**21], "MiB", [1, 2]),
        ("loss", [0.02, 0.01], "", [0.02, 0.01]),
    ],
)
def test_units_are_those_that_people_read(name, values, unit, expected):
    (chart,) = charts.charts_of([charts.RunCurves("run", series(name, values), [])])
    assert chart.unit == unit
    assert [y for _, y in chart.curves[0].points] == pytest.approx(expected)


def series(name, values):
    collection = Collection()
    collection.add(Point(name, value, step) for step, value in enumerate(values))
    return {one.name: one for one in collection.series.values()}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.1, 0.3, [0.1, 0.15, 0.2, 0.25, 0.3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, [3]),
    ],
)
def test_round_numbers_on_an_axis(low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_a_logarithmic_axis_has_powers_of_ten():
    assert charts.ticks(0.002, 30, logarithmic=True) == pytest.approx([0.01, 0.1, 1, 10])
    assert charts.ticks(0.3, 9, logarithmic=True) == pytest.approx([0.5, 1, 2, 5])
    wide = [0.0003, 0.001, 0.003, 0.01, 0.03]  # labels of more would overlap
    assert charts.ticks(0.00013, 0.068, logarithmic=True) == pytest.approx(wide)


def test_a_thinned_curve_keeps_its_extremes():
    points = [(x, float(x % 7)) for x in range(10_000)]
    points[5000] = (5000, 99.0)
    points[7000] = (7000, -99.0)
    thinned = charts.thin(points, 100)
    assert len(thinned) <= 103
    assert {(5000, 99.0), (7000, -99.0), points[-1]} <= set(thinned)
    assert thinned == sorted(thinned)
    assert charts.thin(points[:50], 100) == points[:50]


def test_charts_of_one_run_put_what_belongs_together_in_one():
    names = ["loss", "val_loss", "a_seconds", "b_seconds", "lr", "images_per_second", "other"]
    collection = Collection()
    collection.add(Point(name, 1.0, step) for name in names for step in (1, 2))
    collection.add(Point("epoch_loss", 1.0, None, epoch) for epoch in (1, 2))
    made = {one.name: one for one in collection.series.values()}
    drawn = charts.charts_of([charts.RunCurves("run", made, [(2, "restart 1")])])
    assert [(one.title, len(one.curves)) for one in drawn] == [
        ("Loss", 2),
        ("epoch_loss by epoch", 1),
        ("lr", 1),
        ("images_per_second", 1),
        ("Step time", 2),
        ("other", 1),
    ]
    assert [bool(one.marks) for one in drawn] == [True, False, True, True, True, True]


def test_a_bar_without_time_is_none(live, here, capsys):
    strip = render.macros("report/charts.html.j2").strip
    assert not strip([]).strip()
    live.close()
    created = datetime.fromtimestamp(registry.get("live-run").created, UTC)
    started, finished = created - timedelta(seconds=9), created - timedelta(seconds=5)
    registry.update("live-run", Status(State.CANCELLED, "", "", 0, started, finished))
    report(capsys)  # the clock was set back: no time at all
    found = checked("report-live-run.html")
    assert "attempt 1 ran 0s" in found.text
    assert not [one for one in found.all("div") if one.get("class") == "strip"]


def test_a_table_has_no_empty_column():
    table = render.macros("report/parts.html.j2").table
    shown = table(
        ["trial", "cost", "loss", "reason"], [["0", "", ("1", True), ""], ["1"] + [""] * 3]
    )
    assert re.findall('scope="col">([^<]*)<', shown) == ["trial", "loss"]
    assert shown.count("<td") == 2


def test_long_texts_are_cut():
    parts = render.macros("report/parts.html.j2")
    assert len(parts.remark("x" * 10**6)) < 3000
    shown = parts.block("<" * 10**6)
    assert "characters ..." in shown
    assert len(shown) < 10**5


@pytest.mark.skipif(BROWSER is None, reason="optional: no Chromium")
@pytest.mark.parametrize("width", [375, 1200])
def test_a_browser_has_nothing_to_complain_about(live, here, capsys, width):
    trained(live, [2, 1, 0.5], name=EVIL)
    live.end(code=1)
    report(capsys, "live-run")
    dom, printed = opened(here / "report-live-run.html", width=width)
    assert "CONSOLE" not in printed
    assert 'aria-labelledby="chart-0"' in dom
    assert "<script" not in dom


def inside(folder):
    """What a run leaves that was preempted three times: restarts, nodes, usage, parts of a step."""
    for number in (1, 2, 3):
        record = {"restart": number, "why": "preemption", "time": f"2026-11-21T01:5{number}:00Z"}
        (folder / f"exit_records/restart-{number}.json").write_text(json.dumps(record))
        usage = {"cpu": 50.0, "rss": number << 30, "gpu": 90, "gpu_memory": 1 << 30}
        line = {"time": record["time"], "attempt": number, "ranks": {"0": usage, "1": usage}}
        with (folder / "exit_records/history-0.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with (folder / "logs/node-0.log").open("a") as file:
            file.write(f"{record['time']} [node 0] restart {number} (preemption {number})\n")
            file.write(f"{record['time']} [node 0] network: eth0 is the route\n")
            file.write(f"{record['time']} [node 0] preflight: passed, 2 nodes in 3 s\n")
            text = f"step {10 * number}/99 loss 0.1 step_seconds=0.2 data_seconds=0.1"
            file.write(f"{record['time']} [rank 0] {text}\n")
    (folder / "exit_records/attempt.json").write_text('{"attempt": 3}')


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None or not AXE.exists(), reason="optional: `make axe`, Chromium")
@pytest.mark.parametrize(
    "shape",
    [{"width": 1200}, {"width": 1200, "scheme": "dark"}, {"width": 390}],
    ids=["wide", "dark", "phone"],
)
@pytest.mark.parametrize("kind", ["healthy", "preempted", "failed", "compared"])
def test_axe_has_no_serious_finding(kind, shape, start, here, capsys):
    names = ["one-a", "two-b"] if kind == "compared" else ["one-a"]
    for name in names:
        live = trained(start(name), [2, 1, 0.5])
        live.log("Traceback (most recent call last):", "ValueError: bad batch")
        live.end(code=int(kind == "failed"))
        if kind == "preempted":
            inside(live.folder)
    report(capsys, *names, "--output", "page.html")
    found = findings(here / "page.html", **shape)
    assert found["passed"] > 10
    assert (found["lines"], found["wider"]) == ([], 0)


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            {"evaluated": 3, "split": "test", "step": 5},
            "3 samples of the test data, with the model after step 5.",
        ),
        ({"split": "test"}, "Run judged: the test data."),
        ({}, "Run judged."),
    ],
)
def test_the_sentence_of_an_evaluation_has_what_its_file_says(facts, sentence):
    known = SimpleNamespace(evaluation=("judged", evaluation.of(facts)))
    assert sentence in report_sections._evaluation(known)["sentence"]
