"""A real MLflow server, with what it keeps in SQLite."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tests.observe.trackers.tracked import PYTHON
from tests.ports import free_port


class Server:
    """Starts and stops, and answers what a person would look up."""

    def __init__(self, folder, *artifacts, before=()):
        """`artifacts` are options that say where artifacts are kept, by default a folder here.

        `before` is a command that starts it.
        """
        self._before = before
        self._folder, self._port = folder, free_port()
        self._artifacts = artifacts or ("--default-artifact-root", str(folder / "artifacts"))
        self._process = None
        self.address = f"http://127.0.0.1:{self._port}"

    def start(self):
        if not PYTHON.exists():
            pytest.skip("MLflow is not installed: make .venv-trackers/.ready")
        store = f"sqlite:///{self._folder}/mlflow.db"
        log = (self._folder / "mlflow.log").open("a")
        self._process = subprocess.Popen(
            [
                *(*self._before, PYTHON, "-m", "mlflow", "server", "--workers", "1"),
                *("--host", "127.0.0.1", "--port", str(self._port)),
                *("--backend-store-uri", store),
                *self._artifacts,
            ],
            cwd=self._folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "mlflow.log").read_text()
            time.sleep(0.1)

    def stop(self):
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self):
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def get(self, path, **values):
        url = f"{self.address}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(values)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    def post(self, path, **data):
        url, body = f"{self.address}/api/2.0/mlflow/{path}", json.dumps(data).encode()
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    def runs(self, experiment):
        found = self.get("experiments/get-by-name", experiment_name=experiment)["experiment"]
        listed = self.post("runs/search", experiment_ids=[found["experiment_id"]])
        return listed.get("runs", [])

    def history(self, run, metric):
        """Steps and values, as they came."""
        found = self.get("metrics/get-history", run_id=run["info"]["run_id"], metric_key=metric)
        return [(one["step"], one["value"]) for one in found["metrics"]]


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.stop()
