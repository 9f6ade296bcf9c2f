"""What the node does around uv: folders, records, and access to CodeArtifact."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from urllib.parse import parse_qs, urlsplit

import pytest

from deploykit_node import packages, records
from deploykit_node.cluster import BadEnvironment

INDEX = "https://vision-123456789012.d.codeartifact.eu-west-3.amazonaws.com/pypi/wheels/simple/"


@pytest.fixture
def codeartifact(monkeypatch):
    """Answers the request for a token; yields the queries."""
    queries = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert urlsplit(self.path).path == "/v1/authorization-token"
            queries.append(parse_qs(urlsplit(self.path).query))
            body = json.dumps({"authorizationToken": "token-of-the-role"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_CODEARTIFACT", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        yield queries
        server.shutdown()


def test_the_role_of_the_node_opens_codeartifact(codeartifact, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(f'[[tool.uv.index]]\nurl = "{INDEX}"\n')
    own = tmp_path / "own"
    own.write_text("machine other.example.com login me password mine\n")
    hosts = packages._codeartifact_hosts(tmp_path, None, {"UV_INDEX": INDEX})
    file = packages._netrc(hosts, tmp_path / "netrc", {"NETRC": str(own)})
    assert codeartifact == [{"domain": ["vision"], "domain-owner": ["123456789012"]}]
    host = urlsplit(INDEX).hostname
    lines = file.read_text().split("\n")
    assert f"machine {host} login aws password token-of-the-role" in lines
    assert "machine other.example.com login me password mine" in lines
    assert file.stat().st_mode & 0o077 == 0


def test_other_indexes_need_no_token(tmp_path):
    (tmp_path / "pyproject.toml").write_text('url = "https://pypi.org/simple"\n')
    assert packages._codeartifact_hosts(tmp_path, None, {}) == {}


def test_a_folder_that_others_can_change_is_refused(tmp_path):
    folder = records.own_folder(tmp_path, "set TMPDIR.")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(BadEnvironment, match="other users can change it"):
        records.own_folder(tmp_path, "set TMPDIR.")
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadEnvironment, match="other users can change it"):
        records.own_folder(tmp_path, "set TMPDIR.")


def test_versions_are_those_that_python_imports():
    from importlib.metadata import version

    known = packages.versions()
    for name in ("torch", "numpy", "pytest"):
        assert known[name] == version(name)


def test_the_image_s_packages_leave_the_python_path(tmp_path):
    """SageMaker's toolkit names them there, and they would hide those of the environment."""
    image = next(path for path in sys.path if path.endswith("site-packages"))
    env = {"PYTHONPATH": os.pathsep.join(["/opt/ml/code", image]), "PATH": "/bin"}
    packages._activate(env, tmp_path, {"script": "train.py"})
    assert env["PYTHONPATH"] == "/opt/ml/code"
    assert env["PATH"] == f"{tmp_path}/bin:/bin"
