"""`list` and `status`: times, filters and colors."""

from __future__ import annotations

import io
import json
import threading

import pytest

from deploykit.backends import slurm
from deploykit.cli import describe, output
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import units
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run


@pytest.fixture
def three(monkeypatch):
    """Three runs that ended, an hour ago, and what one of them took."""
    monkeypatch.setattr(registry, "now", lambda: 7200.0)
    monkeypatch.setattr(describe, "now", lambda: 7200.0)
    for number, (name, state) in enumerate(
        [("exp-a", State.SUCCEEDED), ("exp-b", State.FAILED), ("other-c", State.CANCELLED)]
    ):
        registry.add(
            Run(name, "j", "local", "here", "/", "", "", None, 3600.0 + number, "", id=name)
        )
        registry.update(name, Status(state, "", "why", 1))
    start, end = (output.datetime.fromtimestamp(at, output.UTC) for at in (3610.5, 7190.0))
    registry.update("exp-b", Status(State.FAILED, "", "why", 1, start, end))


def listed(capsys, *words, code=0):
    assert cli.main(["list", *words]) == code
    out, err = capsys.readouterr()
    return [line.split("\t")[0] for line in out.splitlines()], err


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--state", "failed"], ["exp-b"]),
        (["--state", "failed", "--state", "cancelled"], ["other-c", "exp-b"]),
        (["--name", "exp-*"], ["exp-b", "exp-a"]),
        (["--name", "xp-"], ["exp-b", "exp-a"]),
        (["--name", "x*"], []),
        (["--name", "exp-*", "-n", "1"], ["exp-b"]),
        (["--name", "exp", "--state", "succeeded"], ["exp-a"]),
    ],
)
def test_filters_choose_runs(capsys, words, names):
    assert listed(capsys, *words)[0] == names


@pytest.mark.usefixtures("three")
def test_what_is_left_out_is_said(capsys):
    assert "the newest 1 of 2 runs; -n 2 shows all" in listed(capsys, "--name", "exp", "-n", "1")[1]
    assert "no matches among 3 runs" in listed(capsys, "--state", "running")[1]


@pytest.mark.usefixtures("three")
def test_a_word_that_is_no_state_is_answered_with_the_nearest(capsys):
    err = listed(capsys, "--state", "faild", code=64)[1]
    assert "unknown state 'faild'" in err
    assert "did you mean 'failed'?" in err


@pytest.mark.usefixtures("three")
def test_times_are_told_in_utc_and_in_seconds(capsys):
    assert cli.main(["list", "--json", "--name", "exp-b"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["created"] == "1970-01-01T01:00:01Z"
    assert row["started"] == "1970-01-01T01:00:10Z"
    assert row["finished"] == "1970-01-01T01:59:50Z"
    assert (row["queue_seconds"], row["duration_seconds"]) == (9.5, 3579.5)
    assert cli.main(["list", "--name", "exp-b"]) == 0
    assert capsys.readouterr().out.split("\t")[3:6] == ["1970-01-01 01:00", "59m 39s", "59m 59s"]
    assert cli.main(["status", "exp-b"]) == 0
    shown = capsys.readouterr().out
    assert "sent    1970-01-01T01:00:01Z, 59m 59s ago\n" in shown
    assert "ended   1970-01-01T01:59:50Z, after 59m 39s\n" in shown
    assert cli.main(["status", "exp-a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [row[name] for name in ("started", "finished", "duration_seconds")] == [None] * 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0s"), (59, "59s"), (60, "1m 0s"), (3700, "1h 1m"), (90061, "1d 1h")],
)
def test_durations_have_two_units(seconds, text):
    assert units.span(seconds) == text


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


with_colors = pytest.mark.parametrize(
    ("settings", "colored"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),  # as no-color.org says
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)


def set_terminal(monkeypatch, settings):
    for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@with_colors
def test_errors_and_warnings_are_colored_where_the_terminal_has_colors(
    project, monkeypatch, settings, colored
):
    set_terminal(monkeypatch, settings)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert cli.main(["check", "--set", "names=a"]) == 65
    output.note("warning: disk almost full", "no error: at the start only")
    shown = output.sys.stderr.getvalue()
    assert ("\x1b[31merror:\x1b[0m arguments: 1 problem\n" in shown) is colored
    assert ("\x1b[33mwarning:\x1b[0m disk almost full\nno error: at" in shown) is colored
    assert ("\x1b" in shown) is colored


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (200, ["run", "backend", "state", "started", "(UTC)", "duration", "age", "reason"]),
        (80, ["run", "backend", "state", "duration", "age", "reason"]),
        (60, ["run", "state", "duration", "age", "reason"]),
    ],
)
@pytest.mark.usefixtures("three")
def test_a_run_is_one_line_on_any_terminal(monkeypatch, columns, shown):
    long = "rank 7 exited with code 1: " + "the reason is long " * 12
    registry.update("exp-b", Status(State.FAILED, "", long, 1))
    set_terminal(monkeypatch, {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)})
    monkeypatch.setattr("sys.stdout", Terminal())
    assert cli.main(["list"]) == 0
    headings, *rows = output.sys.stdout.getvalue().splitlines()
    assert headings.split() == shown
    assert [row.split()[0] for row in rows] == ["other-c", "exp-b", "exp-a"]
    assert "rank 7 exited" in rows[1]
    assert rows[1].rstrip().endswith("…")
    assert all(len(row) <= columns for row in rows)


@with_colors
@pytest.mark.usefixtures("three")
def test_states_are_colored_where_the_terminal_has_colors(monkeypatch, settings, colored):
    set_terminal(monkeypatch, settings)
    for verb in (["list"], ["status", "exp-b"]):
        monkeypatch.setattr("sys.stdout", Terminal())
        assert cli.main(verb) == 0
        shown = output.sys.stdout.getvalue()
        assert ("\x1b[31mfailed\x1b[0m" in shown) is colored
        assert ("\x1b" in shown) is colored


@pytest.mark.usefixtures("three")
def test_a_pipe_gets_no_colors(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["list"]) == cli.main(["status"]) == 0
    assert cli.main(["list", "--state", "faild"]) == 64
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert err.startswith("error: ")


@pytest.mark.usefixtures("three")
def test_a_backend_that_does_not_answer_hides_no_run(monkeypatch, capsys):
    """Its runs keep their last known state; one of them is a job array, which is not asked for."""
    monkeypatch.setattr(run_state, "PATIENCE", 0.1)
    answered = threading.Event()

    threads = []

    def wait(handles):
        """What the backend finds when the programs of an abandoned query have been killed."""
        threads.append(threading.current_thread())
        assert answered.wait(60)
        return dict.fromkeys(handles, Status(State.UNKNOWN, "", "squeue was killed"))

    monkeypatch.setattr(slurm, "status", wait)
    monkeypatch.setattr(slurm, "task_status", wait)
    row = Run("stuck", "j", "slurm", "here", "/", "", "", None, 3600.0, "", id="7")
    registry.add(row)
    registry.update("stuck", Status(State.RUNNING, "", "on node 1"))
    try:
        reason = "last known; slurm did not answer within 0.1 s"
        assert cli.main(["list"]) == cli.main(["status", "stuck"]) == 0
        listing, status = capsys.readouterr().out.split("stuck: running\n")
        assert "stuck\tslurm\trunning\t" in listing
        assert reason in listing
        assert reason in status
        assert cli.main(["list", "--state", "running", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["run"], found["state"], found["reason"]) == ("stuck", "running", reason)
    finally:
        answered.set()
    for thread in threads:
        thread.join()
    assert (registry.get("stuck").state, len(threads)) == ("running", 3)
