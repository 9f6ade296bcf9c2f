"""Untrusted text on a terminal cannot control it or imitate deploykit's own output.

Each verb runs as a child whose terminal is a real one (pty); what reaches it is read at the other
side. Through a pipe the same words go byte for byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import terminal
from deploykit.run import deployments, registry

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
"""Writes the clipboard of many terminals."""
TRICKS = "\x1b[2J\x9b31m\x7f\u202eevil\u200b\u2066\ufeff\u2028"
MARKUP = "[rank0] [/opt/ml/code] [link=http://evil]x[/link] [bold]y :smile:"
HOSTILE = f"a{CLIPBOARD}{TRICKS} {MARKUP}"
FORGED = "\n  cause   all is well"
"""A line end, and a line that looks like one of ours."""
OBEYED = re.compile(
    "[^\t\n\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
ENDS = {0, 64, 65, 66, 69, 76, 77, 79, 80}
"""Exit codes of answers and of errors that a person can act on."""


def start(argv, env, **streams):
    command = [sys.executable, "-m", "deploykit", *argv]
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    own["NO_COLOR"] = "1"  # any escape sequence is then one too many
    return subprocess.Popen(command, env={**own, **env, "PYTHONPATH": str(ROOT)}, **streams)


def on_terminal(*argv, **env):
    """The exit code, and all that reaches the terminal of the child."""
    ours, its = pty.openpty()
    settings = termios.tcgetattr(its)
    settings[1] &= ~termios.OPOST  # or the kernel would write \r before each \n
    termios.tcsetattr(its, termios.TCSANOW, settings)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 400, 0, 0))
    child = start(argv, env, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    found = b""
    while piece := _read(ours):
        found += piece
    os.close(ours)
    return child.wait(), found.decode()


def _read(end):
    try:
        return os.read(end, 1 << 16)
    except OSError:  # the last process has closed the terminal
        return b""


def in_pipe(*argv, **env):
    with start(argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        out, err = child.communicate()
    return child.returncode, out, err


LOG = b"plain \xe9\xff\x00 [rank0] \x1b[31mred\x1b[0m " + HOSTILE.encode() + b"\r 10%\r 20%\r\nend"


@pytest.fixture
def place(project, tmp_path):
    """Runs, logs, facts and files, each with hostile words wherever words can be."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/node-0.log").write_bytes(LOG + b"\nRuntimeError: CUDA out of memory " + LOG)
    (folder / "logs" / f"x{FORGED}{CLIPBOARD}.log").write_bytes(LOG)
    words = HOSTILE + FORGED
    frame = {"name": words, "file": f"/{words}.py", "line": 1, "source": words}
    process = {
        "pid": 1,
        "name": words,
        "state": words,
        "threads": [{"name": words, "frames": [frame] * 2}] * 2,
    }
    one = {"rank": 0, "tool": words, "problem": words, "process": process, "children": [process]}
    (folder / "stacks/1").mkdir(parents=True)
    node = {"host": words, "time": words, "world_size": 2, "ranks": [one]}
    (folder / "stacks/1/n.json").write_text(json.dumps(node))
    row = registry.Run(
        "one", words, "local", words, str(folder), "a", "b", words, 1.0, words, words
    )
    registry.add(row)
    registry.update("one", Status(State.FAILED, words, words, 1))
    strings = dict.fromkeys(deployments.Deployment._fields[:10], words)
    texts = {"machines": json.dumps([[words, 1, 1, 0]]), "requests": "[]", "settings": "{}"}
    deployments._put(
        deployments.Deployment(**strings, **texts, created=1.0, activated=1.0, reason=words)
    )
    price = {"hourly": "2", "currency": words, "source": words}
    (folder / "price.json").write_text(json.dumps(price))
    registry.update("one", Status(State.FAILED, words, words, 1, billed=1800))
    (project / f"{HOSTILE}.yaml".replace("/", "_")).write_text("a: [")
    (project / "data").mkdir()
    (project / "data" / words.replace("/", "_")).touch()
    (project / "bad.yaml").write_text(json.dumps({words: words, "name": words}))
    machine = dict.fromkeys(("python", "torch", "cuda", "import_error", "host_address"), words)
    limits = ("max_open_files", "max_processes", "max_locked_memory")
    machine |= dict.fromkeys(("visible_gpus", "shm_free", *limits), 0)
    machine |= {"has_infiniband": True, "gpus": 1, "interfaces_up": [words]}
    (project / "facts").mkdir()
    (project / "facts/machine.json").write_text(json.dumps(machine))
    (project / "facts/get-caller-identity.json").write_text(
        json.dumps({"Error": {"Code": "AccessDenied", "Action": words}})
    )
    return project


SAGEMAKER = (
    "sagemaker={region: us-east-1, bucket: my-bucket, instance_type: ml.g5.xlarge, "
    "role: 'arn:aws:iam::123456789012:role/r', "
    "image_uri: '763104351884.dkr.ecr.us-east-1.amazonaws.com/p:1'}"
)
VERBS = {
    "list": ["list"],
    "status": ["status", "one"],
    "logs": ["logs", "one"],
    "wait": ["wait", "one"],
    "cancel": ["cancel", "one"],
    "watch": ["watch", "one"],
    "watch-once": ["watch", "--once"],
    "metrics": ["metrics", "one"],
    "compare": ["compare", "one", HOSTILE],
    "report": ["report", "one"],
    "exec": ["exec", HOSTILE, "--", HOSTILE],
    "shell": ["shell", "one"],
    "metrics-csv": ["metrics", "one", "--csv", "--name", f"*{HOSTILE}*"],
    "sync": ["sync", "one"],
    "fetch": ["fetch", "one"],
    "evaluate": ["evaluate", "one", "--dry-run"],
    "evaluate-script": ["evaluate", "one", "--script", HOSTILE],
    "export": ["export", "one", "--to", "there"],
    "export-to": ["export", "one", "--to", HOSTILE, "--checkpoint", HOSTILE],
    "deploy": ["deploy", "one"],
    "deploy-nothing": ["deploy", HOSTILE],
    "deploy-endpoint": ["deploy", "one", "-b", "sagemaker", "--set", SAGEMAKER],
    "endpoint": ["endpoint", "rm"],
    "endpoint-nothing": ["endpoint", "status", HOSTILE],
    "endpoint-action": ["endpoint", HOSTILE],
    "register": ["register", "one", "--name", HOSTILE],
    "register-nothing": ["register", HOSTILE],
    "list-endpoints": ["list", "--endpoints"],
    "fetch-nothing": ["fetch", "one", "-p", HOSTILE, "--to", "there"],
    "open": ["open", "one", "--only", HOSTILE],
    "disk": ["disk"],
    "profile": ["profile", "one"],
    "profile-from": ["profile", "--from", HOSTILE],
    "nodes": ["nodes"],
    "nodes-report": ["nodes", "--report", HOSTILE],
    "nodes-clear": ["nodes", "--clear", HOSTILE],
    "prune": ["prune", "--state", "failed", "--dry-run"],
    "rm": ["rm", HOSTILE],
    "rm-force": ["rm", "one", "--force"],
    "diagnose": ["diagnose", "one"],
    "dump": ["dump", "one", "--threads"],
    "diagnose-file": ["diagnose", HOSTILE],
    "guide": ["guide", "nccl", "one"],
    "guide-name": ["guide", HOSTILE],
    "explain": ["explain", HOSTILE],
    "guide-job": ["guide", "security-groups", "--job", HOSTILE],
    "check": ["check", "bad.yaml"],
    "check-file": ["check", f"{HOSTILE}.yaml".replace("/", "_")],
    "check-set": ["check", "--set", f"env.A=[{HOSTILE}"],
    "submit": ["submit", "--backend", "local", "--dry-run", "--set", f"env.A='{HOSTILE}'"],
    "submit-data": [
        *("submit", "--backend", "sagemaker", "--dry-run"),
        *("--set", SAGEMAKER, "--set", "data.train=data"),
    ],
    "submit-backend": ["submit", "--backend", HOSTILE],
    "sweep": ["sweep", HOSTILE],
    "sweep-status": ["sweep", "status", HOSTILE],
    "sweep-grid": ["sweep", "start", "--grid", f"{HOSTILE}=1", "--metric", HOSTILE],
    "sweep-list": ["sweep", "list"],
    "submit-from": ["submit", "--backend", "local", "--init-from", HOSTILE],
    "submit-run": ["submit", "--backend", "local", "--run", HOSTILE],
    "rerun": ["rerun", "one"],
    "reproduce": ["reproduce", "one"],
    "doctor": ["doctor", "--backend", "local", "--from", "facts"],
    "doctor-aws": ["doctor", "--backend", "sagemaker", "--from", "facts", "--set", SAGEMAKER],
    "doctor-nothing": ["doctor", "--backend", "local", "--from", HOSTILE],
    "advise": ["advise", "--gpu", HOSTILE, "--batch-size", "1", "--sequence", "8"],
    "infra": ["infra", "check", HOSTILE],
    "init": ["init", f"{HOSTILE}/{FORGED}"],
    "when": ["when", "--backend", "local", "--set", f"local.python={HOSTILE}"],
    "cost": ["cost", "--backend", "local", "--set", f"local.price={HOSTILE}"],
    "cost-cap": ["cost", "--backend", "local", "--max-cost", HOSTILE],
    "config": ["config", f"{HOSTILE}.yaml".replace("/", "_")],
    "config-set": ["config", "--set", f"slurm.account={HOSTILE}"],
    "attach": ["attach", HOSTILE, "--backend", "sagemaker", "--target", "us-east-1"],
    "backends": ["backends", HOSTILE],
    "schema": ["schema", HOSTILE],
    "completion": ["completion", HOSTILE],
    "mcp": ["mcp", HOSTILE],
    "notify": ["notify", HOSTILE],
    "notify-one": ["notify", "one"],
    "no-verb": [HOSTILE],
    "no-option": ["list", f"--{HOSTILE}"],
}


@pytest.mark.parametrize("argv", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("how", [[], ["--json"]], ids=["text", "json"])
def test_nothing_that_a_terminal_obeys_reaches_it(place, argv, how):
    code, shown = on_terminal(*argv, *how)
    assert OBEYED.findall(shown) == []
    assert code in ENDS | {1}, shown
    assert "Traceback" not in shown
    assert "\n  cause   all is well" not in shown


def test_every_verb_is_looked_at():
    assert {argv[0] for argv in VERBS.values()} >= set(cli.VERBS)


def test_words_are_shown_and_not_taken_for_markup(place):
    shown = on_terminal("list")[1]
    assert "\\x1b]52;c;ZXZpbA==\\x07" in shown
    for word in ("[rank0]", "[/opt/ml/code]", "[link=http://evil]x[/link]", "[bold]y :smile:"):
        assert word in shown
    assert "\\u202e" in shown
    assert "\\n  cause" in shown


@pytest.mark.parametrize(
    "argv", [["list"], ["status", "one"], ["doctor", "--backend", "local", "--from", "facts"]]
)
def test_a_pipe_has_the_words_as_they_are(place, argv):
    assert HOSTILE.encode() in in_pipe(*argv)[1]


def test_logs_in_a_pipe_are_exact(place):
    code, out, _ = in_pipe("logs", "one", "--node", "0")
    whole = LOG + b"\nRuntimeError: CUDA out of memory " + LOG
    assert out == b"".join(b"[node 0] " + line + b"\n" for line in whole.split(b"\n"))
    assert code == 0


def test_json_means_the_same_on_a_terminal_and_in_a_pipe(place):
    for argv in (["list", "--json"], ["status", "one", "--json"]):
        shown, piped = on_terminal(*argv)[1], in_pipe(*argv)[1]
        assert json.loads(shown) == json.loads(piped)
        assert json.loads(piped)[0]["reason"] == HOSTILE + FORGED


def test_colors_of_a_log_stay_when_they_are_asked_for_and_nothing_else(place):
    without = on_terminal("logs", "one", "--node", "0")[1]
    assert "red" in without
    assert "\x1b" not in without
    shown = on_terminal("logs", "one", "--node", "0", "--color")[1]
    assert "\x1b[31mred\x1b[0m" in shown
    assert OBEYED.findall(re.sub(r"\x1b\[[0-9;]*m", "", shown)) == []


def test_each_state_of_a_progress_bar_is_a_line(place):
    shown = on_terminal("logs", "one", "--node", "0")[1].split("\n")
    assert {"[node 0]  10%", "[node 0]  20%"} <= set(shown)


def test_a_file_name_that_is_no_text(project):
    name = os.fsdecode(b"caf\xe9\x1b]52;c;x\x07.yaml")
    assert b"caf\xe9\x1b]52;c;x\x07.yaml" in in_pipe("check", name)[2]
    assert "caf\\xe9\\x1b]52;c;x\\x07.yaml" in on_terminal("check", name)[1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_words_that_the_encoding_does_not_have(place, encoding):
    code, out, _ = in_pipe("list", "--json", PYTHONIOENCODING=encoding)
    assert json.loads(out.decode(encoding))[0]["reason"] == HOSTILE + FORGED
    code, out, _ = in_pipe("list", PYTHONIOENCODING=encoding)
    assert (code, b"\\u202e" in out) == (0, True)


@given(st.text())
def test_a_line_is_one_plain_line(text):
    shown = terminal.line(text)
    assert OBEYED.search(shown) is None
    assert "\n" not in shown
    shown.encode()
    assert terminal.line(shown) == shown


@given(st.text(), st.booleans())
def test_a_log_line_holds_colors_at_most(text, colors):
    for shown in terminal.log(text, colors=colors):
        assert OBEYED.search(re.sub(r"\x1b\[[0-9;:]*m", "", shown)) is None


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_keeps_its_meaning(data):
    shown = terminal.data(json.dumps(data, indent=2, ensure_ascii=False))
    assert OBEYED.search(shown) is None
    assert json.loads(shown) == data


@pytest.mark.parametrize("text", ["Grüße, 日本語, 😀, ½ · “x” é\u0301", "a\tb", "\xa0\u3000x"])
def test_plain_words_of_any_language_stay(text):
    assert terminal.line(text) == text


LOST = {
    "list": ["list", "--json"],
    "backends": ["backends"],
    "submit": ["submit", "--backend", "local", "--dry-run"],
    "completion": ["completion", "bash"],
    "error": ["check", "none.yaml", "--json"],
}


@pytest.mark.parametrize("argv", LOST.values(), ids=LOST)
def test_a_reader_that_has_gone_ends_it_quietly(project, argv):
    end, own = os.pipe()
    os.close(end)
    with start(argv, {}, stdout=own, stderr=subprocess.PIPE) as child:
        os.close(own)
        said = child.stderr.read()
    assert (child.returncode, said) == (141, b"")


@pytest.mark.parametrize("argv", LOST.values(), ids=LOST)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_like_dev_null(project, argv, closed):
    command = [sys.executable, "-m", "deploykit", *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command], env=env, capture_output=True, check=False
    )
    assert done.returncode == (66 if argv[0] == "check" else 0)
    assert b"Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("argv", LOST.values(), ids=LOST)
def test_a_full_disk_behind_the_output_is_said(project, argv):
    with (
        Path("/dev/full").open("w") as full,
        start(argv, {}, stdout=full, stderr=subprocess.PIPE) as child,
    ):
        said = child.stderr.read()
    assert child.returncode == 73
    assert said == b"error: cannot write the output: No space left on device\n"
