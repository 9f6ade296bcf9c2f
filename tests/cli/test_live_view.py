"""What `logs -f` and `wait` show while a run goes on: on a real terminal (pty), and in a pipe."""

from __future__ import annotations

import io
import json
import sys

import pytest

from deploykit.cli import describe, output
from deploykit.cli import main as cli
from deploykit.job.model import LogLine, State, Status
from deploykit.run import metrics as run_metrics
from deploykit.run import registry
from deploykit.run.registry import Run
from tests.live_run import STAMP, OnTerminal


def test_a_bar_moves_on_a_terminal_and_its_last_state_stays(live):
    live.log("begin", "\r  1%|", "\r 10%|")
    (live.folder / "progress").write_text(" 37%|###   |\n")
    shown = OnTerminal("logs", "-f", "live-run")
    shown.until("\r\x1b[K[rank 0]  37%|###   |")
    (live.folder / "progress").write_text(" 38%|###   |\n")
    shown.until("\r\x1b[K[rank 0]  38%|###   |")
    (live.folder / "progress").unlink()
    live.log("100%|######|", "end")
    live.end()
    assert shown.end() == 0
    assert "\r\x1b[K[rank 0] 100%|######|\r\n" in shown.seen
    assert "\r\x1b[K[rank 0] 38%" not in shown.seen
    assert "  1%|\r\n" not in shown.seen  # overwritten: no line of its own


def test_a_terminal_without_such_lines_gets_a_bar_as_lines(live):
    live.log("\r 10%|", "100%|")
    live.end()
    shown = OnTerminal("logs", "-f", "live-run", TERM="dumb")
    assert shown.end() == 0
    assert "[rank 0]  10%|\r\n[rank 0] 100%|\r\n" in shown.seen
    assert "\x1b" not in shown.seen


def test_a_pipe_gets_a_bar_as_lines(live, capsys):
    live.log("\r 10%|", "100%|")
    live.end()
    for words in ([], ["-f"]):
        assert cli.main(["logs", *words]) == 0
        assert capsys.readouterr().out == "[rank 0]  10%|\n[rank 0] 100%|\n"
    assert cli.main(["logs", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["text"], line["bar"]) for line in lines] == [(" 10%|", True), ("100%|", False)]


def test_wait_shows_state_time_and_step_on_a_terminal(live):
    live.log("step 3/500 loss 0.1", "step 4/500 loss 0.1")
    shown = OnTerminal("wait", "live-run")
    shown.until("\r\x1b[Klive-run: running, ")
    shown.until("s, step 4/500")
    live.end(code=3)
    assert shown.end() == 3
    assert "live-run: failed, exit code 3" in shown.seen


def test_submit_shows_the_state_below_the_lines_until_there_is_a_bar(live):
    wait = "from deploykit.run import registry; from deploykit.cli import wait; "
    follow = "wait.follow(registry.get('live-run'), as_json=False, timeout=None)"
    shown = OnTerminal(program=["-c", wait + follow])
    shown.until("\r\x1b[Klive-run: running, ")
    live.log("step 4/500 loss 0.1")
    shown.until("[rank 0] step 4/500 loss 0.1\r\n")
    shown.until("s, step 4/500")
    (live.folder / "progress").write_text(" 37%|###   |\n")
    shown.until("\r\x1b[K[rank 0]  37%|###   |")
    live.end()
    shown.end()
    assert "live-run: succeeded" in shown.seen


def test_wait_is_plain_in_a_pipe(live, capsys):
    assert cli.main(["wait", "live-run", "--timeout", "0.1"]) == 124
    live.end()
    assert cli.main(["wait", "live-run"]) == 0
    out, err = capsys.readouterr()
    assert err == "live-run: running\n"
    assert "\x1b" not in out


def test_wait_for_several_runs_ends_with_the_code_of_the_first_that_failed(start, capsys):
    for name, code in (("one-a", 0), ("two-b", 7), ("three-c", 3)):
        start(name).end(code)
    assert cli.main(["wait", "one-a", "two-b", "three-c", "one-a"]) == 7
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")] == [
        *("one-a", "two-b", "three-c")
    ]
    assert cli.main(["wait", "three-c", "two-b", "--json"]) == 3
    assert [row["exit_code"] for row in json.loads(capsys.readouterr().out)] == [3, 7]
    start("four-d")
    assert cli.main(["wait", "one-a", "four-d", "--timeout", "0.1", "--json"]) == 124


def test_several_runs_are_cancelled_or_none(start, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("deploykit.backends.local.cancel", lambda handle: asked.append(handle.run))
    for name in ("one-a", "two-b"):
        start(name)
    assert cli.main(["cancel", "one-a", "nothing"]) == 66
    assert asked == []
    assert cli.main(["cancel", "one-a", "two-b", "one-a"]) == 0
    assert asked == ["one-a", "two-b"]
    registry.add(Run("never-sent", "n", "local", "h", "/", "", "", None, 1.0, ""))
    registry.update("never-sent", Status(State.UNSENT, "", "refused"))
    capsys.readouterr()
    assert cli.main(["cancel", "never-sent", "two-b"]) == 66
    out, err = capsys.readouterr()
    assert asked == ["one-a", "two-b", "two-b"]
    assert "two-b: running" in out
    assert "never-sent was never sent" in err


@pytest.mark.parametrize(("words", "first"), [(["-n", "2"], 8), (["--tail=3"], 7), (["-n99"], 0)])
def test_the_last_lines_of_a_log(live, capsys, words, first):
    live.log(*map(str, range(10)))
    assert cli.main(["logs", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank 0] {number}" for number in range(first, 10)]


def test_the_last_lines_of_a_log_and_those_that_follow(live):
    live.log(*map(str, range(10)))
    shown = OnTerminal("logs", "-f", "-n", "1", TERM="dumb")
    shown.until("[rank 0] 9\r\n")
    live.log("10")
    live.end()
    assert shown.end() == 0
    assert shown.seen == "[rank 0] 9\r\n[rank 0] 10\r\n"


@pytest.mark.parametrize("text", ["0", "-1", "x", "²", "9" * 30])
def test_a_number_of_lines_is_at_least_one(text, capsys):
    assert cli.main(["logs", f"--tail={text}"]) == 64
    assert "is not a positive whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 12 loss 1", "step 12, loss 1"),
        ("Step: 3/10\n{STAMP} [rank 0] step: 4/10\nend", "step 4/10"),
        ("Epoch [2/5] done", "epoch 2/5"),
        ("global step=7", "step 7"),
        ("footstep 12; 12 steps", ""),
    ],
)
def test_how_far_a_run_is_that_runs(live, capsys, text, shown):
    (live.folder / "logs/node-0.log").write_text(f"{'x' * 100_000}\n")
    live.log(text.format(STAMP=STAMP))
    (row,) = registry.selected(["live-run"])
    row = row._replace(state="running")
    assert describe.line_or_bar(run_metrics.brief(row), row.folder) == shown
    assert cli.main(["status", "live-run"]) == 0
    assert (f"  at      {shown}\n" in capsys.readouterr().out) == bool(shown)


def test_a_bar_that_no_reader_knows_is_shown_as_it_is(live):
    (live.folder / "progress").write_text("##### 3 of 9\n")
    row = registry.get("live-run")
    assert describe.line_or_bar(run_metrics.brief(row), row.folder) == "##### 3 of 9"
    (live.folder / "progress").write_text(" 37%|###   | 37/100 [00:10<00:17,  3.70it/s]\n")
    assert describe.line_or_bar(run_metrics.brief(row), row.folder) == "step 37/100, 17s left"


def test_words_of_a_bar_cannot_control_the_terminal(monkeypatch, live):
    (live.folder / "progress").write_text(" 1%\x1b]52;c;x\x07\x1b[2J\n")
    shown = OnTerminal("logs", "-f", "live-run")
    shown.until("1%")
    live.end()
    shown.end()
    assert "\\x1b]52;c;x\\x07\\x1b[2J" in shown.seen
    assert "\x1b" not in shown.seen.replace("\r\x1b[K", "")


def test_a_log_line_of_an_older_version_keeps_its_states():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", Terminal())
        output.log([LogLine("10%\r20%", rank=0)])
        assert sys.stdout.getvalue() == "[rank 0] 10%\n[rank 0] 20%\n"
