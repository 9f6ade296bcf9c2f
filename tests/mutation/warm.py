"""A pytest that is loaded once: for each connection a fork of it runs the tests.

    python -m tests.mutation.warm SOCKET SECONDS TESTS...
    python tests/mutation/warm.py SOCKET      # exits as those tests would

Starting Python and importing torch or the SDKs takes most of the time of a short test. Here
everything is imported beforehand except deploykit and the tests, which each fork reads anew.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys

OURS = ("deploykit", "tests", "trainer", "launch", "train", "conftest", "__m")
ARGUMENTS = ("-x", "-q", "-n0", "-p", "no:cacheprovider")
# pytest would warn that it cannot rewrite the asserts of its plugins, because they are imported
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
_CPU_SECONDS = 30
"""After which a mutant is in an endless loop. Unlike time, it does not depend on the load."""


def ask(path: str) -> int:
    """The exit code of one run of the tests. Needs nothing that is slow to import."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        return client.recv(1)[0]


def serve(path: str, seconds: int, tests: list[str]) -> None:
    """Answer every connection with the exit code of the tests; 1 if they take `seconds`."""
    for name in _imported_by(tests):
        _import(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            with client:
                client.send(bytes([_forked(seconds, tests)]))


def _imported_by(tests: list[str]) -> list[str]:
    """The modules that the tests import when they are collected, in order, without our own."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _pytest([*tests, "--collect-only"])
        os.write(writer, "\n".join(sys.modules).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as names:
        listed = names.read().split("\n")
    os.waitpid(child, 0)
    return [name for name in listed if not name.startswith(OURS)]


def _import(name: str) -> None:
    try:
        __import__(name)
    except Exception as error:  # noqa: BLE001 - a fork imports it itself where it needs it
        print(f"not imported before: {name}: {error}", file=sys.stderr)


def _forked(seconds: int, tests: list[str]) -> int:
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        os._exit(_pytest(tests))
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(seconds)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that a failed test left
    return min(os.waitstatus_to_exitcode(status), 1) if os.WIFEXITED(status) else 1


def _pytest(arguments: list[str]) -> int:
    import pytest

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    return int(pytest.main([*ARGUMENTS, *QUIET, *arguments]))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(ask(sys.argv[1]))
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
