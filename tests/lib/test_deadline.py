"""Work that takes too long is abandoned, and its programs end."""

from __future__ import annotations

import signal
import time

import pytest

from deploykit.lib import shell
from deploykit.lib.deadline import within


def test_the_program_of_abandoned_work_is_killed():
    codes = []

    def work():
        sleep = ["sleep", "900"]
        codes.append(shell.run(sleep, timeout=800).code)
        codes.append(shell.run(sleep, timeout=800).code)  # after the work was abandoned

    with pytest.raises(TimeoutError):
        within(0.1, work)
    end = time.monotonic() + 120
    while len(codes) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert codes == [-signal.SIGKILL] * 2


def test_a_program_in_time_is_not_killed():
    assert within(120, lambda: shell.run(["echo", "one"])).out == "one\n"
