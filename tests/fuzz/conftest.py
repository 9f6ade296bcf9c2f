"""What holds for every reader: it takes limited memory, whatever it reads."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

_MOST = 2 << 30
"""Bytes of address space that a reader may take beyond what the process has."""


@pytest.fixture(autouse=True)
def _limited_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
