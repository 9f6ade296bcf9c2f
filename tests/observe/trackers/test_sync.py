"""`deploykit sync` to TensorBoard's files, and what every tracker has in common."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import deploykit
from deploykit.cli import main as cli
from deploykit.job import job
from deploykit.job.model import State, Status
from deploykit.lib.errors import NotFound
from deploykit.observe.metrics import tensorboard as events
from deploykit.observe.trackers import mlflow, tensorboard
from deploykit.run import lifecycle, registry
from tests.observe.trackers.tracked import attempt, history, loss, sent, sync, tracked
from tests.ports import free_port


def near(values):
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


def test_event_files_of_a_run_that_was_preempted_thrice(live, tmp_path, capsys):
    tracked(live, {"tensorboard": str(tmp_path / "board")})
    for number, first in enumerate((0, 20, 40, 60)):
        attempt(live, number, range(first, first + 30))
        assert sent(capsys) == (58 if number == 0 else 40)
    live.end()
    assert (deploykit.get("live-run").sync(), sent(capsys)) == (2, 0)
    assert history(tmp_path / "board/live-run", "loss") == near(
        (step, loss(step)) for step in range(90)
    )


@pytest.mark.torch
def test_tensorboard_reads_them(live, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked(live, {"tensorboard": str(tmp_path / "board")})
    attempt(live, 0, range(300))
    live.end()
    assert (
        sync(capsys).out == f"live-run: 600 values sent to tensorboard: {tmp_path}/board/live-run\n"
    )
    board = EventAccumulator(str(tmp_path / "board/live-run"))
    board.Reload()
    assert board.Tags()["scalars"] == ["loss", "lr"]
    found = [(one.step, one.value) for one in board.Scalars("loss")]
    assert found == near((step, loss(step)) for step in range(300))


def test_a_sending_that_was_interrupted_is_completed(live, tmp_path, capsys, monkeypatch):
    """It ends between the write of the values and that of what is remembered."""
    tracked(live, {"tensorboard": str(tmp_path / "board")})
    attempt(live, 0, range(10))
    sent(capsys)
    kept = (live.folder / "tracking.json").read_bytes()
    attempt(live, 0, range(10, 20))
    live.end()
    sent(capsys)
    (live.folder / "tracking.json").write_bytes(kept)
    assert sent(capsys) == 22
    steps = [step for step, _ in history(tmp_path / "board/live-run", "loss")]
    assert steps == list(range(20))
    (live.folder / "tracking.json").write_text("[not what it was")
    assert sent(capsys) == 40
    assert len(history(tmp_path / "board/live-run", "loss")) == 20


@pytest.mark.aws
def test_event_files_in_s3(live, aws, capsys, monkeypatch):
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="my-board")
    monkeypatch.setattr(tensorboard, "_MAX_FILE_BYTES", 1000)
    tracked(live, {"tensorboard": "s3://my-board/all"})
    for first in (0, 20, 40):
        attempt(live, 0, range(first, first + 20))
        sent(capsys)
    live.end()
    sent(capsys)
    folder = live.folder.parent / "copy"
    folder.mkdir()
    for one in client.list_objects_v2(Bucket="my-board", Prefix="all/live-run/")["Contents"]:
        client.download_file("my-board", one["Key"], folder / Path(one["Key"]).name)
    assert len(list(folder.iterdir())) == 4
    assert [step for step, _ in history(folder, "loss")] == list(range(60))
    tracked(live, {"tensorboard": "s3://my-other/all"})
    (live.folder / "tracking.json").unlink()
    assert "cannot write s3://my-other/all/live-run: " in sync(capsys, code=69).err
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    aws.respond = lambda *_: None  # the connection closes
    assert "cannot write s3://my-other/all/live-run: Conn" in sync(capsys, code=69).err


def test_its_own_event_files_are_no_metrics_of_the_run(live, capsys):
    tracked(live, {"tensorboard": str(live.folder / "output/board")})
    attempt(live, 0, range(10))
    assert (sent(capsys), sent(capsys)) == (18, 0)
    attempt(live, 0, range(10, 12))
    live.end()
    assert sent(capsys) == 6
    files = list((live.folder / "output/board/live-run").iterdir())
    assert [path.name.endswith(".deploykit") for path in files] == [True]


def test_long_numbers_in_event_files(tmp_path):
    from deploykit.observe.metrics.points import Value

    given = [Value("a", value, 2**40, 1.5) for value in (1e300, -1e300, float("inf"), 0.5)]
    path = tmp_path / events.file_name(0, 0)
    path.write_bytes(events.heading(0) + events.records(given, 0))
    values = [value for _, value in history(tmp_path, "a")]
    assert values == [float("inf"), float("-inf"), float("inf"), 0.5]


def test_a_run_of_which_nothing_can_be_sent(live, capsys):
    said = sync(capsys, code=66).err
    assert said.startswith("error: the job of live-run has no `track`\n")
    with pytest.raises(NotFound, match="has no `track`"):
        deploykit.get("live-run").sync()
    tracked(live, {"mlflow": "ftp://host"})
    assert "has no `track`" in sync(capsys, code=66).err  # not what any job file may have
    row = registry.Run("unsent", "a", "local", "b", str(live.folder), "", "", None, 1.0, "")
    registry.add(row)
    registry.update("unsent", Status(State.UNSENT, "", "refused"))
    assert sync(capsys, "unsent", code=66).err.startswith("error: unsent was never sent\n  refused")


def test_one_tracker_that_fails_does_not_stop_the_others(live, tmp_path, capsys):
    address = f"http://127.0.0.1:{free_port()}"
    tracked(live, {"mlflow": address, "tensorboard": str(tmp_path / "board")})
    attempt(live, 0, range(10))
    live.end()
    shown = sync(capsys, code=69)
    assert "20 values sent to tensorboard" in shown.out
    assert f"error: {address} cannot be reached: " in shown.err
    (tmp_path / "board/live-run").chmod(0)
    if os.getuid():
        assert "cannot write" in sync(capsys, code=69).err


ANSWERS = {
    "html": (200, {}, "<html>", 69, "sent a response that is not JSON"),
    "moved": (
        302,
        {"Location": "https://other/"},
        "",
        69,
        "redirects to https://other/; use that address",
    ),
    "denied": (401, {}, "{}", 77, "returned status 401"),
    "busy": (503, {}, "no", 75, "returned status 503"),
    "refused": (400, {}, '{"error_code": "BAD", "message": "no"}', 69, "returned status 400: no"),
}


@contextlib.contextmanager
def serving(answer):
    """A server of `answer(path, data)`: status, headers and body; yields its address and headers.

    Where that is None, the connection is closed. The headers are those of the requests so far.
    """
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            received.append(dict(self.headers))
            size = int(self.headers.get("Content-Length", 0))
            data = json.loads(self.rfile.read(size) or "{}")
            if (response := answer(self.path.partition("?")[0], data)) is None:
                return
            status, headers, body = response
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET  # noqa: N815 - as the standard library calls it

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_a_server_may_answer(kind, live, capsys):
    status, headers, body, code, said = ANSWERS[kind]
    with serving(lambda *_: (status, headers, body)) as (address, _):
        tracked(live, {"mlflow": address})
        assert said in sync(capsys, code=code).err


@contextlib.contextmanager
def dripping():
    """A server that sends a byte of its answer again and again, and never all; yields its address.

    Each byte comes within the time that one read may take.
    """
    closed = threading.Event()

    def drip(connection):
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not closed.wait(0.05):
                connection.sendall(b" ")

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=drip, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        closed.set()


def test_a_server_that_never_finishes_its_answer(live, capsys, monkeypatch):
    monkeypatch.setattr("deploykit.observe.trackers.mlflow._MAX_SECONDS", 1.0)
    with dripping() as address:
        tracked(live, {"mlflow": address})
        attempt(live, 0, range(10))
        err = sync(capsys, code=75).err
    assert f"error: {address} did not complete its response within 1 s" in err


class MLflowServer:
    """What MLflow's server keeps of runs, behind its paths; it refuses the first parameters."""

    def __init__(self):
        self.runs, self.lost = [], 1

    def answer(self, path, data):
        content = self.content(path.rpartition("mlflow/")[2], data)
        return None if content is None else (200, {}, json.dumps(content))

    def content(self, path, data):
        if path == "runs/create":
            info = {"run_id": "r", "experiment_id": "0", "status": "RUNNING"}
            self.runs.append({"info": info, "data": {"params": [], "metrics": []}})
        if path == "runs/log-batch" and "params" in data:
            self.lost -= 1
            if self.lost >= 0:
                return None
            self.runs[0]["data"]["params"] += data["params"]
        return {"experiment": {"experiment_id": "0"}, "runs": self.runs, "run": [*self.runs, {}][0]}


def test_parameters_that_were_not_sent_with_the_run_are_sent_later(live, capsys):
    """As after a kill between the two requests."""
    kept = MLflowServer()
    with serving(kept.answer) as (address, _):
        tracked(live, {"mlflow": address})
        sync(capsys, code=69)
        assert (len(kept.runs), kept.runs[0]["data"]["params"]) == (1, [])
        (live.folder / "tracking.json").unlink()
        sync(capsys)
        sync(capsys)
    (run,) = kept.runs
    params = [(one["key"], one["value"]) for one in run["data"]["params"]]
    assert sorted(params) == [
        *(("--_odd name", "x"), ("--lr", "0.1"), ("entrypoint.script", "train.py"))
    ]


@pytest.mark.parametrize(
    ("variables", "header"),
    [
        ({"MLFLOW_TRACKING_TOKEN": "abc"}, "Bearer abc"),
        ({"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "é"}, "Basic bWU6w6k="),
        ({}, None),
    ],
)
def test_credentials_are_those_of_mlflows_own_variables(
    variables, header, live, capsys, monkeypatch
):
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with serving(lambda *_: (401, {}, "{}")) as (address, received):
        tracked(live, {"mlflow": address})
        sync(capsys, code=77)
    assert received[0].get("Authorization") == header


@pytest.mark.parametrize(
    ("resource", "address", "header", "service"),
    [
        (
            "mlflow-tracking-server/team",
            "https://eu-west-1.experiments.sagemaker.aws",
            "x-mlflow-sm-tracking-server-arn",
            "sagemaker-mlflow",
        ),
        (
            "mlflow-app/app-ABC123",
            "https://mlflow.sagemaker.eu-west-1.app.aws",
            "x-sm-mlflow-app-arn",
            "sagemaker",
        ),
    ],
)
def test_requests_to_sagemakers_servers_are_signed(resource, address, header, service, monkeypatch):
    """As AWS's plug-in signs them: the same header for the same request and time."""
    arn = f"arn:aws:sagemaker:eu-west-1:123456789012:{resource}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    assert mlflow.sagemaker_address(arn) == address
    sign = mlflow.SageMakerSigner(arn)
    headers = sign("POST", f"{address}/api/2.0/mlflow/runs/create", b"{}")
    assert headers[header] == arn
    words = headers["Authorization"]
    assert words.startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
    assert f"/eu-west-1/{service}/aws4_request, SignedHeaders=content-type;host;" in words
    assert header in words.partition("SignedHeaders=")[2].partition(",")[0]


TRACK = {
    "{mlflow: 'sqlite:///a.db'}": "track.mlflow: expected an address such as",
    "{mlflow: 'https://me:secret@host'}": "track.mlflow: expected an address such as",
    "{mlflow: 'arn:aws:iam::123456789012:role/r'}": "track.mlflow: expected an address such as",
    "{tensorboard: 'gs://bucket'}": "track.tensorboard: expected a folder without a colon",
    "{}": "track: at least one tracker is required (set one of mlflow, tensor",
    "{mflow: 'http://host'}": "track.mflow: unknown key (did you mean 'mlflow'?)",
}


def add(project, line):
    with (project / "job.yaml").open("a") as file:
        file.write(f"{line}\n")


@pytest.mark.parametrize("text", TRACK)
def test_what_is_wrong_with_the_section(text, project, capsys):
    add(project, f"track: {text}")
    assert cli.main(["check"]) == 65
    err = capsys.readouterr().err
    assert TRACK[text] in err
    assert "secret" not in err


def test_a_tracker_whose_package_is_not_installed(project, capsys, monkeypatch):
    (project / "wandb").mkdir()  # what it leaves is no package
    monkeypatch.syspath_prepend(project)
    assert cli.main(["check", "--set", "track.wandb=team/digits"]) == 65
    said = "track.wandb: the package wandb is not installed for the Python that runs deploykit"
    assert f"{said} (pip install wandb)" in capsys.readouterr().err


def test_a_folder_is_relative_to_the_job_file(project):
    add(project, "track: {tensorboard: board}")
    file = lifecycle.load(project / "job.yaml", [], ["local"])
    assert file.job.track.tensorboard == str(project / "board")
    built = job.Job(
        name="x", entrypoint={"script": "train.py"}, track={"tensorboard": project / "board"}
    )
    assert lifecycle.load(built, [], ["local"]).job.track == file.job.track


@pytest.mark.torch
def test_a_submitted_job_is_followed_to_its_end(project, tmp_path, capsys):
    """By a process of the machine that submits, of which the script knows nothing."""
    text = "for step in range(50): print(f'step {step}/50 loss {1 / (1 + step)}', flush=True)\n"
    (project / "train.py").write_text(text)
    add(project, f"track: {{tensorboard: {tmp_path}/board}}")
    plain = ("--set", "entrypoint.launcher=python")
    assert cli.main(["submit", "--run", "one", *plain, "--wait"]) == 0
    folder = Path(registry.known("one").folder)
    while (folder / "tracking.json").exists() is False or len(
        history(tmp_path / "board/one", "loss")
    ) < 50:
        time.sleep(0.1)
    assert [step for step, _ in history(tmp_path / "board/one", "loss")] == list(range(50))
    capsys.readouterr()
    assert cli.main(["sync", "one", "--follow"]) in {0, 75}  # the follower may still be there
    assert "sent" not in capsys.readouterr().out
    plan = (folder / "plan.sh").read_text()
    assert "board" not in plan
