"""`watch` and `metrics`: runs of this machine as they go on, in a pipe and on a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess

import pytest

from deploykit.backends import base as backend
from deploykit.cli import describe
from deploykit.cli import main as cli
from deploykit.cli.watch_live import wrapped
from deploykit.job.model import LogLine, State, Status
from deploykit.lib.errors import BackendUnavailable
from deploykit.observe import stacks
from deploykit.run import state as run_state
from deploykit.run import watch as run_watch
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import get
from deploykit.run.watch import Watch
from tests.backends.test_example_backend import installed  # noqa: F401 - a backend whose logs are elsewhere
from tests.live_run import STAMP, OnTerminal

ERROR = ["Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: bad batch"]


def trained(run, steps=range(1, 11), total=10):
    run.log(*(f"step {step}/{total} loss {1 / step:.4f}" for step in steps))


def once(capsys, *words):
    assert cli.main(["watch", "--once", *words]) == 0
    return capsys.readouterr().out


def test_one_run_in_a_pipe(live, capsys):
    trained(live)
    shown = once(capsys)
    assert shown.startswith("live-run: running for ")
    assert "  at      step 10/10 (log (text))\n" in shown
    assert f"  done    {'━' * 40} 100%\n" in shown
    assert "  loss    0.1 █▄▃▂▂▂▁▁▁▁ (log (text))\n" in shown
    assert "error" not in shown


def test_a_run_that_stalls_has_no_time_left(live, capsys, monkeypatch):
    bar = " 50%|#####     | 5/10 [00:05<00:05,  1.00s/it, loss=1]"
    live.log(bar)
    assert " left" in once(capsys)
    monkeypatch.setattr(stacks, "stall_reason", lambda _: f"{stacks.STALLED}4 min: rank 1 waits")
    for verb in (["watch", "--once"], ["status"]):
        assert cli.main(verb) == 0
        shown = capsys.readouterr().out
        assert "no progress for 4 min" in shown
        assert "5/10" in shown
        assert " left" not in shown


def test_a_run_that_has_ended_has_no_time_left(live, capsys):
    live.log(" 50%|#####     | 5/10 [00:05<00:05,  1.00s/it, loss=1]")
    assert cli.main(["metrics"]) == 0
    assert "  left    5s " in capsys.readouterr().out
    live.end(code=3)
    assert cli.main(["metrics"]) == 0
    assert "  left " not in capsys.readouterr().out
    assert cli.main(["metrics", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["progress"]
    assert (found["seconds_left"], "left" in found["sources"]) == (None, False)


def test_samples_a_second_are_shown_where_the_script_tells_them(live, capsys):
    live.log("step 1/9 loss 2 eval_samples_per_second=7 images_per_second=512.25")
    assert "  speed   512 images/s (log (text))\n" in once(capsys)
    assert cli.main(["watch", "--once", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["progress"]["throughput"] == {"name": "images_per_second", "value": 512.25}


def test_a_run_that_failed_shows_the_end_of_its_first_error(live, capsys):
    trained(live)
    live.log(*ERROR, "and more")
    live.end(code=3)
    shown = once(capsys, "live-run")
    assert shown.startswith("live-run: failed after ")
    assert "exit code 3\n" in shown
    assert "  error   [rank 0] Traceback (most recent call last):\n" in shown
    assert "          [rank 0] ValueError: bad batch\n" in shown
    assert "and more" not in shown


def test_restarts_are_counted_with_their_reasons(live, capsys):
    records = live.folder / "exit_records"
    records.mkdir()
    (records / "attempt.json").write_text('{"attempt": 2}')
    (records / "restart-1.json").write_text('{"restart": 1, "why": "time_limit", "time": ""}')
    (records / "restart-2.json").write_text('{"restart": 2, "why": "preemption", "time": ""}')
    trained(live)
    assert "  restart 2: time limit, preemption\n" in once(capsys)


def test_several_runs_are_a_table_with_errors_below(start, capsys):
    one, two = start("one-a"), start("two-b")
    trained(one, range(1, 4))
    two.log(*ERROR)
    two.end(code=1)
    lines = once(capsys, "one-a", "two-b", "one-a").splitlines()
    assert lines[0].split() == ["run", "state", "for", "at", "left", "loss"]
    assert lines[1].split()[:2] == ["one-a", "running"]
    assert "━━──── 3/10" in lines[1]
    assert lines[2].split()[:2] == ["two-b", "failed"]
    assert [line for line in lines if "one-a" in line] == [lines[1]]
    assert lines[-2:] == [
        '  [rank 0]   File "train.py", line 3',
        "  [rank 0] ValueError: bad batch",
    ]


def test_json_has_everything(live, capsys):
    trained(live)
    live.log(*ERROR)
    (seen,) = json.loads(once(capsys, "--json"))
    assert (seen["run"], seen["state"], seen["attempt"]) == ("live-run", "running", 0)
    assert seen["progress"]["step"] == seen["progress"]["total"] == 10
    assert seen["progress"]["sources"]["step"] == "log (text)"
    assert seen["loss_curve"] == [round(1 / step, 4) for step in range(1, 11)]
    assert [line["text"] for line in seen["error"]] == ERROR
    assert cli.main(["watch", "--json"]) == 0  # which never goes on


def test_a_live_page_goes_on_until_the_run_ends(live):
    trained(live, range(1, 5))
    page = OnTerminal("watch", "--interval", "0.5")
    page.until("step 4/10")
    trained(live, range(5, 8))
    page.until("step 7/10")
    live.end(code=0)
    assert page.end() == 0
    assert page.seen.rstrip().endswith("(log (text))")
    assert "live-run: succeeded" in page.seen.rpartition("\x1b[?1049l")[2]  # on the first screen


def test_the_live_page_has_a_title_with_a_clock_and_colored_states_and_bars(live):
    trained(live, range(1, 5))
    page = OnTerminal("watch", "--interval", "0.5", NO_COLOR="")
    page.until("live-run: \x1b[36mrunning\x1b[0m for ")
    page.until(f"\x1b[32m{'━' * 16}\x1b[0m\x1b[90m{'─' * 24}\x1b[0m 40%")
    page.until("\x1b[36mq\x1b[0m quit")
    live.end()
    assert page.end() == 0
    assert re.search(r"deploykit watch: live-run +\d\d:\d\d:\d\d UTC ", page.seen)


def test_a_bar_that_no_reader_knows_is_where_the_run_is(live, capsys):
    (live.folder / "progress").write_text("##### 3 of 9\n")
    assert "  at      ##### 3 of 9\n" in once(capsys)


def test_a_sentence_is_wrapped_to_the_screen_and_other_lines_are_not():
    cause = f"  cause   nan_loss, the loss became NaN: {'/a' * 20}/node-0.log:4, rank 0: bad batch"
    assert wrapped(cause, 80) == [
        "  cause   nan_loss, the loss became NaN:",
        f"          {'/a' * 20}/node-0.log:4, rank 0: bad",
        "          batch",
    ]
    assert wrapped(f"  [rank 0] {'x ' * 80}", 80) == [f"  [rank 0] {'x ' * 80}"]


def test_hostile_words_cannot_leave_the_live_page(live):
    live.log("step 1/2 loss 0.5", "Error: \x1b]52;c;x\x07\x1b[2J [bold]evil[/bold]")
    page = OnTerminal("watch", "--interval", "0.5")
    page.until("[bold]evil[/bold]")
    live.end()
    page.end()
    assert "\\x1b]52;c;x\\x07\\x1b[2J" in page.seen
    assert "\x1b]52" not in page.seen


def test_a_page_fits_its_screen(start):
    runs = [start(f"run-{number:02}") for number in range(30)]
    page = OnTerminal("watch", "--interval", "0.5")
    page.until("... 12 more lines")
    assert "run-29" in page.seen  # the newest ones are first
    assert "run-05" not in page.seen
    page.type("\x1b[B" * 29)
    page.until("run-00")  # the table scrolls to the chosen run
    page.type("l")
    page.until("run-00: log of rank 0")
    page.type("q")
    for run in runs:
        run.end()
    assert page.end() == 0


def uses(run, ranks, **values):
    records = run.folder / "exit_records"
    records.mkdir()
    every = {"cpu": 98.4, "rss": 1300 << 20, "gpu": None, "gpu_memory": None, "gpu_size": None}
    found = {str(rank): {**every, "cpu": 98.4 + rank, **values} for rank in range(ranks)}
    record = {"time": "", "attempt": 0, "ranks": found}
    (records / "usage-0.json").write_text(json.dumps(record))


def test_what_ranks_use_and_the_slowest(live, capsys):
    uses(live, 2, gpu=95, gpu_memory=40 << 30, gpu_size=80 << 30)
    live.log("step 3: rank 1 is slow: its own work takes 1.6 times the median")
    shown = once(capsys)
    gpu = "GPU ━━━━━━  95%  ━━━─── 40.0 of 80.0 GiB"
    assert f"  uses    rank 0   98% CPU  1.3 GiB  {gpu}\n" in shown
    assert "          rank 1   99% CPU" in shown
    assert "  slowest step 3: rank 1 is slow: its own work takes 1.6 times the median\n" in shown
    (data,) = json.loads(once(capsys, "--json"))
    assert [rank["cpu_percent"] for rank in data["ranks"]] == [98.4, 99.4]
    (live.folder / "exit_records/node-0.json").write_text("{}")  # that node has ended
    assert "  uses  " not in once(capsys)


def test_of_many_ranks_the_extremes_are_shown(live, capsys):
    uses(live, 64)
    shown = once(capsys)
    assert "  uses    64 ranks, minimum to maximum:\n" in shown
    assert "CPU 98% (rank 0) to 161% (rank 63), median 130%\n" in shown


def test_keys_show_the_log_of_a_rank_and_the_stacks(live):
    trained(live, range(1, 3))
    with (live.folder / "logs/node-0.log").open("a") as log:
        log.write(f"{STAMP} [rank 1] hello from one\n")
    page = OnTerminal("watch", "--interval", "600")
    page.until("q quit")
    page.type("l")
    page.until("log of rank 0")
    page.type("\x1b[C")
    page.until("hello from one")
    page.type("qd")
    page.until("q back")
    page.until("no rank of live-run is running")
    page.type("\x1bq")
    assert page.end() == 0


def test_a_run_is_cancelled_after_a_question(start):
    start("one-a")
    shell = subprocess.Popen(["sleep", "900"])
    (start("two-b").folder / "claim").write_text(str(shell.pid))
    page = OnTerminal("watch", "one-a", "two-b", "--interval", "0.5")
    page.until("up/down run")
    page.type("\x1b[Bc")
    page.until("Cancel two-b?")
    page.type("n")
    page.until("up/down run")
    page.type("cy")
    assert shell.wait() == -signal.SIGTERM
    page.type("q")
    page.end()


def test_each_look_asks_each_backend_once(start, monkeypatch):
    runs = [start(name) for name in ("one-a", "two-b", "three-c")]
    asked = []
    engine = backend.find("local")
    status = engine.status
    monkeypatch.setattr(engine, "status", lambda handles: asked.append(handles) or status(handles))
    watch = Watch([get(run.folder.name) for run in runs])
    watch.look()
    watch.look()
    assert [len(handles) for handles in asked] == [3, 3]


@pytest.fixture
def elsewhere(project, monkeypatch):
    """Three runs whose logs only their backend has; how often each was asked for."""
    engine, asked = backend.find("print"), []
    for name in ("aa-1", "bb-2", "cc-3"):
        assert cli.main(["submit", "--backend", "print", "--run", name]) == 0

    def logs(handle, *, follow):
        asked.append(handle.run)
        yield LogLine("step 3/9 loss 0.5", rank=0)

    monkeypatch.setattr(engine, "logs", logs)
    return asked


def test_a_look_asks_for_the_states_or_for_one_log_elsewhere(elsewhere, monkeypatch):
    def status(handles):
        elsewhere.append("states")
        return {handle: Status(State.RUNNING) for handle in handles}

    monkeypatch.setattr(backend.find("print"), "status", status)
    watch = Watch([get(name) for name in ("aa-1", "bb-2", "cc-3")])
    for _ in range(8):
        views = watch.look()
    logs = ("aa-1", "bb-2", "cc-3")
    between = [asked for log in logs for asked in ("states", log)]
    assert elsewhere == [*between, "states", "states"]  # each log was read a short while ago
    assert [view.progress.step for view in views] == [3, 3, 3]


def test_the_log_elsewhere_is_read_once_more_at_the_end(elsewhere, monkeypatch):
    engine, ended = backend.find("print"), []
    state = {True: State.SUCCEEDED, False: State.RUNNING}
    monkeypatch.setattr(
        engine, "status", lambda handles: {one: Status(state[bool(ended)]) for one in handles}
    )
    watch = Watch([get("aa-1")])
    watch.look()
    watch.look()
    ended.append(True)
    watch.look()
    assert (watch.final, len(elsewhere)) == (False, 1)
    watch.look()
    assert (watch.final, len(elsewhere)) == (True, 2)


def test_once_reads_the_logs_of_all_runs(elsewhere, capsys):
    capsys.readouterr()
    shown = once(capsys, "aa-1", "bb-2", "cc-3")
    assert shown.count("━━──── 3/9") == 3
    assert sorted(elsewhere) == ["aa-1", "bb-2", "cc-3"]


def test_a_backend_that_does_not_answer_is_said(live, capsys, monkeypatch):
    def fails(handles):
        raise BackendUnavailable("the cluster is away")

    monkeypatch.setattr(backend.find("local"), "status", fails)
    trained(live)
    shown = once(capsys, "live-run")
    assert "local cannot be reached: the cluster is away" in shown
    assert "step 10/10" in shown


def test_metrics_as_a_table(live, capsys):
    trained(live)
    assert cli.main(["metrics"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("live-run: running\n  step    10               log (text)\n")
    name, count, step, last, least, greatest, source = out.splitlines()[-1].split("\t")
    assert (name, count, step, source) == ("loss", "10", "10", "log (text)")
    assert (last, least, greatest) == ("0.1", "0.1", "1")


def test_metrics_as_csv_and_json(live, capsys):
    trained(live, range(1, 5))
    with (live.folder / "logs/node-0.log").open("a") as log:
        log.write(f"{STAMP} [node 0] restart 1: preempted\n")
    trained(live, range(3, 6))
    live.log("step 6/10 loss nan accuracy 0.5")
    assert cli.main(["metrics", "--csv", "--name", "lo*"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["attempt"], row["step"]) for row in rows] == [
        *(("0", "1"), ("0", "2"), ("1", "3"), ("1", "4"), ("1", "5"), ("1", "6"))
    ]
    assert {row["name"] for row in rows} == {"loss"}
    assert rows[0]["run"] == "live-run"
    assert rows[-1]["value"] == "nan"
    assert cli.main(["metrics", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [one["value"] for one in shown["points"]][-2:] == ["nan", 0.5]
    assert cli.main(["metrics", "--json", "--csv"]) == 64


def test_metrics_of_a_run_without_any(live, capsys):
    live.log("hello")
    assert cli.main(["metrics"]) == 0
    assert "no metrics found" in capsys.readouterr().err


def test_patterns_and_lengths_come_from_the_job(live, capsys):
    job = {"entrypoint": {"args": ["--epochs", "4"]}, "metrics": {"loss": "lost ([0-9.]+)"}}
    (live.folder / "job.json").write_text(json.dumps(job))
    live.log("epoch 1 done", "epoch 2: lost 0.25")
    assert cli.main(["metrics", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["progress"]
    assert (shown["epoch"], shown["epochs"], shown["loss"]) == (2, 4, 0.25)
    assert shown["sources"]["epochs"] == "argument --epochs"
    assert shown["sources"]["loss"] == "log (metrics in the job file)"


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_job_that_is_not_readable_is_no_obstacle(live, text):
    (live.folder / "job.json").write_text(text)
    trained(live)
    read = RunMetrics(get("live-run"))
    read.refresh()
    assert read.progress().step == 10


def test_wrong_patterns_are_problems_of_the_job_file(project, capsys):
    argv = ["check", "--set", "metrics={a: '(', b: 'loss', c: 'loss (.)'}"]
    assert cli.main([*argv, "--backend", "local"]) == 65
    err = capsys.readouterr().err
    assert "metrics.a: is not a valid regular expression" in err
    assert "metrics.b: has no group that captures the number" in err
    assert "metrics.c" not in err


def test_an_array_shows_its_first_task(live):
    for task in (1, 0):
        (live.folder / f"tasks/{task}/logs").mkdir(parents=True)
        path = live.folder / f"tasks/{task}/logs/node-0.log"
        path.write_text(f"{STAMP} [rank 0] step {task + 5} loss 1\n")
    for task, step in ((None, 5), (0, 5), (1, 6)):
        read = RunMetrics(get("live-run"), task=task)
        read.refresh()
        assert read.progress().step == step


def test_the_end_of_a_run_is_looked_at_once_more(live):
    watch = Watch(run_state.refresh([get("live-run")]))
    trained(live)
    (before,) = watch.look()
    assert not watch.final
    live.log("step 11/11 loss 0.01")
    live.end()
    (after,) = watch.look()
    assert watch.final
    assert (before.progress.step, after.progress.step) == (10, 11)


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([3.0, 1.0, 2.0], 5, "█▁▅"),
        ([float("nan"), 1.0, 2.0, float("inf")], 4, "!▁█!"),
        ([float("nan")] * 3, 2, "!!"),
        ([0.0] * 10 + [8.0] * 10, 2, "▁█"),
    ],
)
def test_a_curve_as_blocks(values, width, shown):
    assert describe.sparkline(values, width) == shown


def test_only_the_end_of_a_long_error_is_kept():
    lines = [LogLine(f"line {number}", rank=1) for number in range(9)]
    assert run_watch.last_lines([*lines, LogLine("  ", rank=1)], 2) == [
        *("[rank 1] line 7", "[rank 1] line 8")
    ]
