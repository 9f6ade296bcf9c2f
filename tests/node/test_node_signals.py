"""Signals that a launcher waits for, with real processes that are stopped and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

WAITS = """\
import signal
from deploykit_node import signals
HELD = (*signals.STOPS, *signals.NOTICES, signal.SIGCHLD)
signals.hold(HELD)
print("ready", flush=True)
while True:
    received = signals.wait(HELD, 0.05)
    if received:
        print(received.number, received.sender, flush=True)
        if received.number == 15:
            break
"""


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_a_process_that_was_stopped_and_continued_receives_only_what_was_sent(waiting):
    for _ in range(5):
        waiting.send_signal(signal.SIGSTOP)
        time.sleep(0.2)  # longer than it waits at once
        waiting.send_signal(signal.SIGCONT)
    waiting.send_signal(signal.SIGUSR1)
    assert waiting.stdout.readline() == b"%d %d\n" % (signal.SIGUSR1, os.getpid())
    waiting.terminate()
    assert waiting.stdout.read() == b"%d %d\n" % (signal.SIGTERM, os.getpid())
    assert waiting.wait() == 0


def test_a_wait_ends_after_its_time_or_with_a_signal_that_came_before():
    """In a process of its own, since it blocks signals."""
    program = """\
import os, signal, time
from deploykit_node import signals
signals.hold([signal.SIGTERM])
began = time.monotonic()
assert signals.wait([signal.SIGTERM], 0.2) is None and time.monotonic() - began >= 0.2
assert signals.wait([signal.SIGTERM], 0.0) is None
os.kill(os.getpid(), signal.SIGTERM)
assert signals.wait([signal.SIGTERM], 900).number == signal.SIGTERM
assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and not signals.is_pending([signal.SIGALRM])
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=250)
