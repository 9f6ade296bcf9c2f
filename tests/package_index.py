"""A package index on this machine that asks for a password, and uv projects that use it."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

USER, PASSWORD = "reader", "never-shown-4711"
UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
PROJECT = """\
[project]
name = "mine"
version = "1"
requires-python = ">=3.10"
dependencies = {dependencies}

[[tool.uv.index]]
name = "team"
url = "{url}"
default = true
"""
SCRIPT = """\
# /// script
# requires-python = "{python}"
# dependencies = {dependencies}
#
# [[tool.uv.index]]
# name = "team"
# url = "{url}"
# default = true
# ///
"""


def add_wheel(index, name, version, requires=(), text=""):
    """Add a package with one module that knows its version, and has the `text`."""
    folder, info = index / name, f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n{text}")
        lines = [
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {it}" for it in requires),
        ]
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    links = [
        f'<a href="{file.name}#sha256={_sha256(file)}">{file.name}</a>'
        for file in sorted(folder.glob("*.whl"))
    ]
    (folder / "index.html").write_text("\n".join(links))


def _sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def add_program_wheel(folder, name, version, program):
    """Add a package to a folder whose program passes on to another one."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        script = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
        script.external_attr = 0o100755 << 16
        wheel.writestr(script, f'#!/bin/sh\nexec "{program}" "$@"\n')
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", text)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Answers 401 without the password."""

    wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    def do_GET(self):
        if self.headers.get("Authorization") == self.wanted:
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name of the base class

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(folder):
    """Serve the packages; yields the address."""
    handler = functools.partial(_Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


SETTINGS = {
    "UV_INDEX_TEAM_USERNAME": USER,
    "UV_INDEX_TEAM_PASSWORD": "secret:env:TEAM_TOKEN",
}
"""Variables of a job that may read the index; the node has TEAM_TOKEN."""
ACCESS = [f"env.{name}={value}" for name, value in SETTINGS.items()]
"""The same for `--set`."""


@pytest.fixture
def team_wheels(tmp_path):
    """The folder of an index with two versions of `tiny`."""
    folder = tmp_path / "packages"
    for version in ("1.0", "1.1"):
        add_wheel(folder, "tiny", version)
    return folder


@pytest.fixture
def team_index(team_wheels, tmp_path, monkeypatch):
    """The address of the index; uv's cache and the nodes' own disk are the test's."""
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(UV).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TEAM_TOKEN", PASSWORD)
    with serve(team_wheels) as address:
        yield address


def write_project(folder, url, *dependencies):
    """A uv project with its lock."""
    text = PROJECT.format(url=url, dependencies=json.dumps(dependencies))
    (folder / "pyproject.toml").write_text(text)
    lock(folder)


def write_script(file, url, *dependencies, python=">=3.10", then=""):
    """A script that declares its dependencies."""
    text = SCRIPT.format(url=url, python=python, dependencies=json.dumps(dependencies))
    file.write_text(text + then)


def lock(folder, *words):
    """Write the lock of a project, or with words that of a script."""
    access = {"UV_INDEX_TEAM_USERNAME": USER, "UV_INDEX_TEAM_PASSWORD": PASSWORD}
    env = {**os.environ, **access, "UV_PYTHON": sys.executable, "HOME": str(folder.parent)}
    subprocess.run([UV, "lock", "--quiet", *words], cwd=folder, env=env, check=True)
