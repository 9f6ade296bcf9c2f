"""NCCL's report on communicators, in the formats of its releases, as sentences."""

from __future__ import annotations

import pytest

from deploykit.diagnose import ras
from tests.ras_server import REPORTS

FOUR = "communicator #0-0 (aa11bb22cc33dd44) of 4 ranks"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("healthy", []),
        (
            "2.24",
            [
                "process 811 on node 10.0.0.3 (GPU 5) does not respond",
                "communicator #0-0 (aa11bb22cc33dd44) of 32 ranks: no data from rank 21",
            ],
        ),
        (
            "dead",
            [
                "process 811 on node 10.0.0.3 (GPU 5) is dead",
                "communicator #0-0 (aa11bb22cc33dd44) of 8 ranks: no data from ranks 3,5",
            ],
        ),
        (
            "counts",
            [
                f"{FOUR}: AllReduce: 3 ranks at 120; rank 2 at 119",
                f"{FOUR}: Broadcast: ranks 0-1 at 0; 2 ranks at 4",
                "communicator #1-0 (ee55) of 2 ranks: status: rank 0 FINALIZE; rank 1 RUNNING",
            ],
        ),
    ],
)
def test_a_report_is_told_in_sentences(name, told):
    assert ras.sentences(REPORTS[name]) == told


@pytest.mark.parametrize(
    "text", ["", "HTTP/1.1 400 Bad Request\r\n\r\n", "#0-0 (zz) MISMATCH\n  x"]
)
def test_what_is_no_report_tells_nothing(text):
    assert ras.sentences(text) == []
