"""Receivers of messages on this machine: a web server that keeps what it gets, and a dead one."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time

import pytest

from deploykit.run import lifecycle, notify

PATIENCE = 120
HANGS = """\
import threading
print("begin", flush=True)
threading.Event().wait()
"""
SAVES = """\
import os, pathlib, signal, sys, time
def save(number, frame):
    folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
    (folder / "step-7.pt").write_text("weights")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("begin", flush=True)
while True:
    time.sleep(0.1)
"""
"""Saves when its cost cap is near."""


@contextlib.contextmanager
def unfollowed():
    """Within it, `submit` starts no follower, so that the launcher on the node sends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_follow", lambda *_: None)
        patch.setattr(notify, "announce", lambda _: None)
        yield


class Hook:
    """A web server; `messages` are the bodies of its POSTs, `status` what it answers."""

    def __init__(self):
        self.messages, self.status = [], 200
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hook.status < 300:
                    hook.messages.append(json.loads(body))
                self.send_response(hook.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/s3cret-token"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    @property
    def events(self):
        return [message["event"] for message in self.messages]

    def wait_for(self, count):
        deadline = time.monotonic() + PATIENCE
        while len(self.messages) < count:
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.05)

    def of(self, run):
        """The messages about a run."""
        return [message for message in self.messages if message["run"] == run]


@pytest.fixture
def hook():
    """Such a server, for as long as the test runs."""
    made = Hook()
    yield made
    made.close()


class Dead:
    """A server that accepts connections and never answers; they are held open."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.settimeout(PATIENCE)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/dead"

    def accept(self):
        return self.socket.accept()[0]

    def close(self):
        self.socket.close()
