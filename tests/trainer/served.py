"""``serve.py`` in a process of its own, and a client that can send it anything."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.trainer.ranks import ENTRYPOINTS, PATIENCE, free_port
from trainer import models
from trainer.checkpoint import safetensors_io

MODEL_SETTINGS = {"layers": 1, "width": 16, "heads": 2, "sequence": 8}
IMAGE = [[0] * 8] * 8


def write_model(folder, task):
    """Write what export.py writes, with untrained weights."""
    folder.mkdir()
    model = models.cnn() if task == "digits" else models.gpt(*MODEL_SETTINGS.values())
    safetensors_io.write(model.state_dict(), folder / "model.safetensors")
    description = {"task": task, "step": 1, "model": MODEL_SETTINGS}
    (folder / "model.json").write_text(json.dumps(description))
    return folder


class Served:
    """A running serve.py and what the kernel says about its process."""

    def __init__(self, folder, log, *options):
        self.port = free_port()
        self.log = log
        command = [sys.executable, ENTRYPOINTS / "serve.py", folder, "--port", str(self.port)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        first_line = self.process.stdout.readline()
        assert first_line.startswith("serving "), log.read_text()

    def connect(self, timeout=PATIENCE):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def send(self, data, *, end=False):
        """Send bytes; status and content of the first response."""
        with self.connect() as client:
            with contextlib.suppress(ConnectionError):  # the server need not read all of it
                client.sendall(data)
            if end:
                client.shutdown(socket.SHUT_WR)
            return read_response(client.makefile("rb"))

    def post(self, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.send(post_request(body, **headers))

    def is_alive(self):
        return self.send(b"GET /ping HTTP/1.1\r\n\r\n") == (200, {})

    def cpu_seconds(self):
        """CPU time that the process has used."""
        fields = self.read_proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self):
        return int(self.read_proc("status").split("VmHWM:")[1].split()[0]) * 1024

    def read_proc(self, name):
        return Path(f"/proc/{self.process.pid}/{name}").read_text()

    def close(self):
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        self.process.stdout.close()
        assert code == 0
        assert "Traceback" not in self.log.read_text()


def post_request(body, path="/invocations", **headers):
    fields = {"Content-Type": "application/json", "Content-Length": len(body)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value is not None)
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def read_response(stream):
    """Status and content of one response: complete JSON, and an error unless it is 200."""
    status = int(stream.readline().decode().split()[1])
    if status == 100:
        stream.readline()
        return read_response(stream)
    headers = {}
    while (header := stream.readline().decode()) != "\r\n":
        name, _, value = header.partition(": ")
        headers[name.lower()] = value.strip()
    assert headers["content-type"] == "application/json"
    content = json.loads(stream.read(int(headers["content-length"])))
    assert status == 200 or list(content) == ["error"]
    return status, content
