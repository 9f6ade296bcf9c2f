"""A package index on this machine that asks for a password, and uv projects that use it."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

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


def add_wheel(index, name, version, requires=()):
    """Add a package with one module that knows its version."""
    folder, info = index / name, f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        lines = [
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {it}" for it in requires),
        ]
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    names = sorted(file.name for file in folder.glob("*.whl"))
    (folder / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))


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


def lock(folder, *words):
    """Write the lock of a project, or with words that of a script."""
    access = {"UV_INDEX_TEAM_USERNAME": USER, "UV_INDEX_TEAM_PASSWORD": PASSWORD}
    env = {**os.environ, **access, "UV_PYTHON": sys.executable, "HOME": str(folder.parent)}
    subprocess.run([UV, "lock", "--quiet", *words], cwd=folder, env=env, check=True)
