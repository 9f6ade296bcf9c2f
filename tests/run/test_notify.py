"""Messages about runs: what they say, to whom, and that each arrives once."""

from __future__ import annotations

import email
import json
import os
import shutil
import signal
import sys
import threading

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.observe import receivers
from deploykit.run import lifecycle, registry
from deploykit.run import notify as run_notify
from tests.ports import free_port
from tests.receivers import Dead

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    loss = model(x)
RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"""


@pytest.fixture
def dead():
    made = Dead()
    yield made
    made.close()


def notifying(live, **notify):
    (live.folder / "job.json").write_text(json.dumps({"name": "one", "notify": notify}))
    return live


def config(text):
    path = paths.config()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run(capsys, *words):
    code = cli.main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_message_of_a_failure_says_why_and_what_to_do_and_arrives_once(live, hook, capsys):
    notifying(live, to=[hook.url])
    live.log(*TRACEBACK.split("\n"))
    (live.folder / "price.json").write_text(
        '{"hourly": "3600", "currency": "USD", "source": "test"}'
    )
    live.end(1)
    assert run(capsys, "wait", "live-run")[0] == 1
    run(capsys, "wait", "live-run", "--notify")
    assert run(capsys, "notify", "live-run") == (0, "", "")
    (message,) = hook.messages
    assert {key: message[key] for key in ("run", "state", "event", "where", "next")} == {
        "run": "live-run",
        "state": "failed",
        "event": "failed",
        "where": "train.py:9: loss = model(x)",
        "next": "deploykit diagnose live-run",
    }
    assert message["cause"].startswith("cuda_oom: a GPU ran out of memory: RuntimeError: CUDA out")
    assert "micro-batch" in message["fix"]
    first, *rest = message["text"].split("\n")
    assert first.startswith("live-run failed")
    assert [line.partition(":")[0] for line in rest] == ["Cause", "At", "Fix", "Next"]


def test_only_the_events_that_are_wanted(live, hook, capsys):
    notifying(live, to=[hook.url], events=["started", "preempted", "cap"])
    run(capsys, "notify", "live-run")
    folder = live.folder / "exit_records"
    live.end(75)
    record = {"restart": 1, "why": "preemption", "time": "2026-11-21T01:46:08.123Z"}
    (folder / "restart-1.json").write_text(json.dumps(record))
    node = json.loads((folder / "node-0.json").read_text())
    node["reason"] = "stopped at its cost cap (50.00 USD, at 14.18 USD an hour): it saved"
    (folder / "node-0.json").write_text(json.dumps(node))
    run(capsys, "notify", "live-run")
    assert hook.events == ["started", "preempted", "cap"]
    assert hook.messages[-1]["cause"].startswith("stopped at its cost cap (50.00 USD")


def test_a_run_that_its_budget_refused(live, hook, capsys):
    notifying(live, to=[hook.url])
    reason = "the job may cost 90 USD, more than is left in its budget: budget 100 USD: 10 USD left"
    row = registry.known("live-run")._replace(run="dear", id=None, created=1.0)
    registry.add(row)
    registry.update("dear", Status(State.UNSENT, "", reason))
    run(capsys, "notify", "dear")
    assert (hook.events, hook.messages[0]["cause"]) == (["budget"], reason)


def test_two_at_once_send_one_message(live, hook):
    message = {"text": "x", "event": "failed"}
    threads = [
        threading.Thread(
            target=receivers.send_once, args=(live.folder, "ended-0", [hook.url], message)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hook.events == ["failed"]


def test_what_a_receiver_refused_is_sent_again(live, hook, capsys):
    notifying(live, to=[hook.url, f"http://127.0.0.1:{free_port()}/x"], command=["false"])
    live.end(0)
    hook.status = 503
    code, out, _ = run(capsys, "notify", "live-run")
    assert code == 69
    assert out.splitlines() == [
        "live-run: http://127.0.0.1: HTTP 503 Service Unavailable",
        "live-run: http://127.0.0.1: Connection refused",
        "live-run: command false: false exited with code 1: ",
    ]
    hook.status = 302
    assert "HTTP 302" in run(capsys, "notify", "live-run")[1]
    hook.status = 200
    assert "http://127.0.0.1: delivered\n" in run(capsys, "notify", "live-run")[1]
    assert hook.events == ["succeeded"]
    out = run(capsys, "wait", "live-run")[2]
    assert "live-run: command false did not receive the message: false exited with code 1" in out


def test_a_receiver_that_does_not_answer_gets_no_second_message(live, dead, monkeypatch, capsys):
    from deploykit_node import notify

    notifying(live, to=[dead.url])
    live.end(0)
    monkeypatch.setattr(notify, "TIMEOUT", 0.2)
    code, out, _ = run(capsys, "notify", "live-run")
    assert (code, "no response within 0.2 s; the message may have arrived" in out) == (69, True)
    assert run(capsys, "notify", "live-run") == (0, "", "")


def test_receivers_that_hang_have_one_deadline_and_keep_their_claims(live, monkeypatch):
    release = threading.Event()

    def hang(receiver, _):
        release.wait()
        return receivers.Sent(receiver)

    monkeypatch.setattr(receivers, "_deliver", hang)
    monkeypatch.setattr(receivers, "_PATIENCE", 0.1)
    message = {"text": "x", "event": "failed"}
    both = ["https://a.example", "https://b.example"]
    sent = receivers.send_once(live.folder, "failed-0", both, message)
    assert [one.error for one in sent] == ["timed out waiting for a response"] * 2
    assert not any(receivers.is_in_flight(live.folder, "failed-0", one) for one in both)
    assert not any(receivers.is_due(live.folder, "failed-0", one) for one in both)
    release.set()


def test_only_the_commands_own_exit_counts(live, tmp_path, monkeypatch, capsys):
    """Its child keeps stderr open; and a command that is killed may have sent the message."""
    from deploykit_node import notify

    child = tmp_path / "child"
    notifying(live, command=["sh", "-c", f"sleep 600 & echo $! > '{child}'"])
    live.end(0)
    try:
        assert run(capsys, "notify", "live-run")[1] == "live-run: command sh: delivered\n"
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)
    notifying(live, command=["sleep", "600"])
    monkeypatch.setattr(notify, "COMMAND_TIMEOUT", 0.2)
    code, out, _ = run(capsys, "notify", "live-run")
    assert (code, "sleep timed out after 0.2 s" in out) == (69, True)
    assert run(capsys, "notify", "live-run") == (0, "", "")


@pytest.mark.parametrize("words", [("wait", "live-run"), ("notify", "live-run", "--follow")])
def test_a_message_that_another_process_fails_to_send(words, live, hook, monkeypatch, capsys):
    from deploykit_node import notify

    notifying(live, to=[hook.url])
    live.end(1)
    claim = notify.claim(live.folder, "failed-0", hook.url)
    is_in_flight = receivers.is_in_flight

    def fail(*message):
        held = is_in_flight(*message)
        if held:
            notify.settle(claim, sent=False)
        return held

    monkeypatch.setattr(receivers, "is_in_flight", fail)
    monkeypatch.setattr(run_notify, "_END_PAUSE", 0.01)
    run(capsys, *words)
    assert hook.events == ["failed"]


def test_the_follower_tries_again_and_exits_with_69_in_the_end(live, hook, monkeypatch, capsys):
    notifying(live, to=[hook.url])
    live.end(0)
    hook.status = 503
    monkeypatch.setattr(run_notify, "_END_PAUSE", 0.01)
    monkeypatch.setattr(run_notify, "_MAX_ROUNDS", 3)
    code, out, _ = run(capsys, "notify", "live-run", "--follow")
    assert (code, out.count("HTTP 503")) == (69, 3)
    hook.status = 200
    assert run(capsys, "notify", "live-run", "--follow")[0] == 0
    assert hook.events == ["succeeded"]


def test_a_claim_that_cannot_be_written_does_not_end_the_wait(live, hook, capsys):
    notifying(live, to=[hook.url])
    live.end(3)
    (live.folder / "notified").write_text("")
    code, _, err = run(capsys, "wait", "live-run")
    assert code == 3
    assert "live-run: http://127.0.0.1 did not receive the message: cannot write to " in err


def test_wait_notify_reports_cancelled_and_lost_runs(live, hook):
    notifying(live, to=[hook.url])
    row = registry.known("live-run")
    cancelled = row._replace(state="cancelled")
    assert not run_notify.Notices().see([cancelled])
    run_notify.Notices(ends=True).see([cancelled])
    lost = row._replace(state="unknown", native="no job")
    for _ in range(2):
        run_notify.Notices(ends=True).finish([lost])
    assert hook.events == ["cancelled", "lost"]


def test_a_command_is_relative_to_the_job_file(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for program, expected in (("./page.sh", str(project / "page.sh")), ("page", "page")):
        notify = {"command": [program, "./x"]}
        job = lifecycle.load(project / "job.yaml", [("notify", notify)], ()).job
        assert job.notify.command == (expected, "./x")
    config('[notify]\ncommand = ["./page.sh"]\n')
    code, _, err = run(capsys, "notify", "--test")
    assert (code, "notify.command: expected an absolute path" in err) == (78, True)


def test_a_command_gets_the_message(live, tmp_path, capsys):
    notifying(live, command=["sh", "-c", f"cat > '{tmp_path}/message'"])
    live.end(0)
    run(capsys, "notify", "live-run")
    assert json.loads((tmp_path / "message").read_text())["state"] == "succeeded"


@pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")  # Apprise's
def test_a_mail_by_a_real_server(live, capsys):
    pytest.importorskip("apprise", reason="optional: deploykit[notify]")
    controller = pytest.importorskip("aiosmtpd.controller", reason="optional: aiosmtpd")
    mails = []

    class Keep:
        async def handle_DATA(self, server, session, envelope):  # noqa: N802 - aiosmtpd's
            mails.append(email.message_from_bytes(envelope.content))
            return "250 OK"

    server = controller.Controller(Keep(), hostname="127.0.0.1", port=free_port())
    server.start()
    try:
        address = f"mailto://127.0.0.1:{server.port}?from=me@a.example&to=you@b.example&format=text"
        notifying(live, to=[address])
        live.end(3)
        assert run(capsys, "notify", "live-run")[:2] == (
            0,
            "live-run: mailto://127.0.0.1: delivered\n",
        )
    finally:
        server.stop()
    (mail,) = mails
    assert mail["Subject"].startswith("live-run failed")
    parts = [part.get_payload(decode=True) for part in mail.walk() if not part.is_multipart()]
    assert b"Next: deploykit diagnose live-run" in b"".join(parts)
    run(capsys, "wait", "live-run", "--notify")
    assert len(mails) == 1


def test_a_job_file_in_the_place_of_a_run_is_not_ignored(project, capsys):
    code, _, err = run(capsys, "notify", "--test", "job.yaml")
    assert (code, "deploykit notify --test --file job.yaml" in err) == (64, True)


def test_the_config_file_names_receivers_for_every_run(live, hook, project, capsys):
    live.end(0)
    code, _, err = run(capsys, "wait", "live-run", "--notify")
    assert (code, "no receivers" in err) == (66, True)
    config('[notify]\nto = ["secret:env:HOOK"]\nevents = ["failed"]\n')
    code, out, err = run(capsys, "notify", "--test")
    assert (code, "secret:env:HOOK: the variable HOOK is not set" in out) == (69, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOK", hook.url)
        assert run(capsys, "notify", "--test")[1] == "test: secret:env:HOOK: delivered\n"
        (answer,) = json.loads(run(capsys, "notify", "--test", "--json")[1])
        assert (answer["receiver"], answer["error"]) == ("secret:env:HOOK", None)
        assert run(capsys, "wait", "live-run", "--notify")[0] == 0
    assert hook.events == ["test", "test", "succeeded"]
    config('[notify]\nto = ["https://hooks.slack.com/services/s3cret"]\n')
    _, _, err = run(capsys, "check")
    assert "notify.to[0]: contains a token" in err
    assert f"set in {paths.config()}, line 2" in err
    config('[notify]\nto = ["https://x"]\nevents = ["fail"]\n')
    code, _, err = run(capsys, "wait", "live-run", "--notify")
    assert (code, "notify.events[0]" in err, "line 3" in err) == (78, True, True)
    config('[notify]\nto = "https://x"\n')
    code, _, err = run(capsys, "check")
    assert 'notify.to: expected a list of strings (to = ["secret:env:SLACK_WEBHOOK"])' in err


def test_a_token_is_refused_in_plain_text_and_no_message_shows_it(project, capsys):
    addresses = [
        "https://hooks.slack.com/services/T0/B0/s3cret",
        "slack://s3cret/T0/B0",
        "https://me:s3cret@example.com/x",
        "mailto://me:s3cret@mail.example.com",
        "https://example.com/fine",
        "secret:env:FINE",
    ]
    code, _, err = run(capsys, "check", "--set", f"notify.to={json.dumps(addresses)}")
    assert code == 65
    assert [number for number in range(6) if f"notify.to[{number}]: contains a token" in err] == [
        *range(4)
    ]
    assert "s3cret" not in err
    addresses = ["https://[x", "https://example.com/?key=s3cret"]
    code, _, err = run(capsys, "check", "--set", f"notify.to={json.dumps(addresses)}")
    assert code == 65
    assert "notify.to[0]: is not a valid address: Invalid IPv6 URL" in err
    assert "notify.to[1]: has a query string" in err
    assert "s3cret" not in err
    assert receivers.name("https://[x") == "..."
    code, _, err = run(capsys, "check", "--set", "notify={events: [failed]}")
    assert "notify: at least one receiver is required" in err


@pytest.mark.slow
def test_the_token_is_in_no_file_and_the_receiver_is_no_setting(project, hook, monkeypatch, capsys):
    """A real run, which `submit` has followed in the background."""
    monkeypatch.setenv("HOOK", hook.url)
    with (project / "job.yaml").open("a") as file:
        file.write("notify: {to: [secret:env:HOOK], events: [started, succeeded]}\n")
    assert "secret:env:HOOK" in run(capsys, "submit", "--dry-run")[1]
    assert run(capsys, "submit", "--run", "one", "--wait")[0] == 0
    hook.wait_for(1 + ("started" in hook.events))
    run(capsys, "notify", "one")
    assert hook.events.count("succeeded") == 1
    for path in paths.state().rglob("*"):
        assert not path.is_file() or b"s3cret-token" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_dead_receiver_delays_and_fails_no_run(project, dead, capsys):
    """The run has ended when the first message about its end is sent."""
    refused = f"http://127.0.0.1:{free_port()}/x"
    notify = {"to": [dead.url, refused], "events": ["succeeded"]}
    run(capsys, "submit", "--run", "one", "--set", f"notify={json.dumps(notify)}")
    with dead.accept():
        row = registry.known("one")
        assert (row.state, row.exit_code) == ("succeeded", 0)
    shutil.rmtree(row.folder, ignore_errors=True)  # ends the follower


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://hooks.slack.com/services/x", {"text": "a &lt;!channel&gt; &amp;"}),
        (
            "https://discord.com/api/webhooks/x",
            {"content": "a <!channel> &", "allowed_mentions": {"parse": []}},
        ),
        ("https://example.com/x", {"text": "a <!channel> &", "event": "failed"}),
    ],
)
def test_the_forms_of_chat_services(address, expected):
    from deploykit_node import notify

    assert notify.body(address, {"text": "a <!channel> &", "event": "failed"}) == expected


def test_the_form_of_teams():
    from deploykit_node import notify

    body = notify.body("https://a.webhook.office.com/x", {"text": "a\nb"})
    (card,) = body["attachments"]
    assert card["content"]["body"][0]["text"] == "a\n\nb"


def test_the_trials_of_a_sweep_send_none(project):
    prepared = lifecycle.prepare(
        project / "job.yaml", [("notify", {"to": ["https://a.example"]})], "local", "one"
    )
    from deploykit.sweep import trial_job
    from deploykit.sweep.space import Passed

    trial = trial_job.plan(trial_job.Base.of(prepared.plan), "two", Passed([], {}), "two")
    assert "DEPLOYKIT_NOTIFY" in prepared.plan.text
    assert "DEPLOYKIT_NOTIFY" not in trial.text


def test_without_apprise_check_says_what_to_install(project, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "apprise", None)
    code, _, err = run(capsys, "check", "--set", "notify={to: ['mailto://me@mail.example.com']}")
    assert code == 65
    assert "mailto:// requires the package apprise, which is not installed" in err
    assert "pip install 'deploykit[notify]'" in err


def test_a_sweep_sends_one_message_with_its_best_trial(project, hook, capsys):
    (project / "train.py").write_text(
        "import sys\nprint('step 1/1 loss', sys.argv[2], flush=True)\n"
    )
    with (project / "job.yaml").open("a") as file:
        file.write(f"notify: {{to: ['{hook.url}']}}\n")
    words = ("--grid", "lr=0.5,0.1", "--metric", "loss", "--set", "entrypoint.args=[]")
    assert run(capsys, "sweep", *words, "--set", "entrypoint.launcher=python")[0] == 0
    (message,) = hook.messages
    assert (message["event"], message["state"]) == ("succeeded", "finished")
    assert message["cause"] == "2 succeeded of 2 trials; best loss 0.1 in trial 1 (lr=0.1)"
    assert message["next"].startswith("deploykit sweep status hello-")
