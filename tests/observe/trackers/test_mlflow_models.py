"""`deploykit register` with a real MLflow server: versions, lineage, artifacts, and kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deploykit.cli import main as cli
from deploykit.lib.errors import BackendUnavailable
from deploykit.observe.trackers import mlflow as trackers
from tests.live_run import ROOT
from tests.model_package import package
from tests.observe.trackers.mlflow_server import Server, mlflow  # noqa: F401 - a fixture
from tests.observe.trackers.tracked import attempt, python, tracked
from tests.programs import needs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mlflow")]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """A server that takes uploads, as most do."""
    folder = tmp_path_factory.mktemp("proxy")
    server = Server(folder, "--artifacts-destination", str(folder / "kept"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def down(tmp_path):
    """A server that is not started."""
    return Server(tmp_path)


@pytest.fixture
def trained(start, tmp_path):
    """A function: a finished run that sends its metrics to a server, and its package."""

    def make(name, server):
        live = tracked(
            start(name),
            {"mlflow": server.address},
            name="digits",
            data={"train": {"path": "s3://my-bucket/train", "stage": "node"}},
        )
        attempt(live, 0, range(10))
        live.end()
        return package(tmp_path / f"{name}-model", name)

    return make


def register(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(["register", *map(str, words), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def version(server, name, number):
    return server.get("model-versions/get", name=name, version=number)["model_version"]


@pytest.mark.parametrize("kind", ["mlflow", "proxy"])
def test_a_package_becomes_a_version_once(kind, trained, request, capsys, tmp_path):
    server = request.getfixturevalue(kind)
    folder = trained(f"{kind}-run", server)
    name = f"digits-{kind}"
    (made,) = register(capsys, folder, "--name", name)["versions"]
    assert (made["registry"], made["version"], made["approval"]) == ("mlflow", "1", "pending")
    assert made["is_new"]
    kept = version(server, name, "1")
    (run,) = server.runs(f"{kind}-run")
    assert run["info"]["run_id"] == kept["run_id"]
    metrics = {each["key"]: each["value"] for each in run["data"]["metrics"]}
    assert metrics["loss"] == pytest.approx(1 / 10)  # the last of ten steps
    tags = {tag["key"]: tag["value"] for tag in kept["tags"]}
    assert tags["deploykit.run"] == f"{kind}-run"
    assert tags["deploykit.commit"] == "0123456789abcdef0123456789abcdef01234567"
    assert tags["deploykit.data.train"] == "s3://my-bucket/train"
    assert tags["deploykit.version.torch"] == "2.6.0+cpu"
    (again,) = register(capsys, folder, "--name", name, "--approval", "approved")["versions"]
    assert (again["version"], again["approval"], again["is_new"]) == ("1", "approved", False)
    (third,) = register(capsys, folder, "--name", name)["versions"]
    assert (third["version"], third["approval"]) == ("1", "approved")  # as it was
    got = tmp_path / "downloaded"
    code = (
        "import mlflow, sys; mlflow.set_tracking_uri(sys.argv[1]); "
        f"mlflow.artifacts.download_artifacts('models:/{name}/1', dst_path=sys.argv[2])"
    )
    got.mkdir()
    python("-c", code, server.address, str(got))
    for path in folder.rglob("*"):
        if path.is_file():
            assert (got / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_another_package_is_the_next_version(trained, proxy, capsys, tmp_path):
    folder = trained("next-run", proxy)
    other = package(tmp_path / "other", "next-run", b"other weights")
    numbers = [
        register(capsys, each, "--name", "next")["versions"][0]["version"]
        for each in (folder, other, folder, other)
    ]
    assert numbers == ["1", "2", "1", "2"]


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@needs("unshare")
def test_nothing_is_copied_here_for_a_server_behind_a_tunnel(trained, capsys, tmp_path):
    """Its address is local, and its folder another one: here a mount that only it sees."""
    kept = tmp_path / "kept"
    kept.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(kept)]
    server = Server(tmp_path, "--default-artifact-root", f"file://{kept}", before=mount)
    server.start()
    try:
        error = register(capsys, trained("far-run", server), code=69)["error"]
    finally:
        server.stop()
    assert "where deploykit cannot write from this machine" in error["message"]
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("function", ["post", "put"])
def test_a_kill_between_two_requests_doubles_nothing(when, function, trained, proxy, capsys):
    """Killed at the first upload or request; then it is simply run again."""
    name = f"killed-{function}-{when}"
    folder = trained(name, proxy)
    where = f"deploykit.observe.trackers.mlflow:Client.{function}"
    words = ["register", str(folder), "--name", name]
    argv = [sys.executable, str(ROOT / "tests/kill_at.py"), when, where, "--", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -9
    (made,) = register(capsys, folder, "--name", name)["versions"]
    assert made["version"] == "1"
    found = proxy.get("model-versions/search", filter=f"name='{name}'")["model_versions"]
    assert len(found) == 1


def test_a_dry_run_asks_nothing(trained, down, capsys):
    folder = trained("dry-run", down)
    (shown,) = register(capsys, folder, "--name", "dry", "--dry-run")["registries"]
    assert shown["tracker"] == down.address
    create = shown["requests"]["model-versions/create"]
    assert {"key": "deploykit.run", "value": "dry-run"} in create["tags"]
    assert create["run_id"] is None


def test_a_server_that_is_down_is_a_sentence(trained, down, capsys):
    error = register(capsys, trained("down-run", down), code=69)["error"]
    assert "cannot be reached" in error["message"]


def test_artifacts_in_s3_that_cannot_be_written_are_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nothing listens
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    (tmp_path / "model").touch()
    with pytest.raises(BackendUnavailable, match=r"not uploaded to s3://my-bucket: .*127\.0\.0\.1"):
        trackers._upload_to_s3("my-bucket", {tmp_path / "model": "models/model"})
