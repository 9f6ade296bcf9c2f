"""The process group of the preflight test: bandwidth, and what helps where NCCL hangs."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from pathlib import Path

import pytest

from deploykit_node.preflight import coordinator, findings, group, speeds
from deploykit_node.preflight.peers import Peers
from tests.node.test_node_preflight import nodes

STUCK = Path(__file__).parent / "stuck_ranks.py"


def on_this_machine(count, processes, seconds, **env):
    """The test on nodes of this machine, on free ports."""
    port, hosts = random.randrange(12000, 28000), [f"127.0.0.{n + 1}" for n in range(count)]
    env |= {"PYTHONPATH": str(Path(group.__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    plans = (Peers(n, nodes(count).hosts, tuple(hosts), port, b"k") for n in range(count))
    return [coordinator._Test(plan, env, processes, seconds) for plan in plans]


async def together(tests):
    await asyncio.gather(*(test.run() for test in tests))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "variables", "says"),
    [
        ("exits", "NCCL_P2P_DISABLE", "works with NCCL_P2P_DISABLE=1: the fault is in direct"),
        ("exits", "NCCL_SHM_DISABLE", "works with NCCL_SHM_DISABLE=1: the fault is in shared"),
        (
            "exits",
            "NCCL_P2P_DISABLE,NCCL_SHM_DISABLE",
            "works with NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1: the fault",
        ),
        ("exits", "NCCL_NET", "works with NCCL_IB_DISABLE=1 NCCL_NET=Socket: the fault is in"),
        ("exits", "gloo", "plain sockets, but Gloo works"),
        ("exits", "never", "It fails with Gloo as well, so NCCL is not the cause"),
        pytest.param(
            "hangs", "NCCL_IB_DISABLE", "works with NCCL_IB_DISABLE=1", marks=pytest.mark.slow
        ),
    ],
)
def test_what_helps_is_found_where_nccl_comes_to_no_result(
    monkeypatch, tmp_path, how, variables, says
):
    server = [sys.executable, str(STUCK), how, variables]
    monkeypatch.setattr(coordinator, "Ranks", functools.partial(group.Ranks, server=server))
    monkeypatch.setattr(coordinator, "_TRIAL", 5.0)
    tests = on_this_machine(2, 2, 30 if how == "hangs" else 60, STARTED=str(tmp_path / "started"))
    asyncio.run(together(tests))
    assert len((tmp_path / "started").read_text().splitlines()) == 2  # one for each node
    for test in tests:
        first, *_, last = [finding.text for finding in test.findings if finding.fatal]
        assert "the process group" in first
        assert "NCCL WARN stuck" in first
        assert says in last, last


@pytest.mark.slow
def test_twenty_healthy_machines_have_no_finding(monkeypatch):
    """But for speeds where this machine is so busy that one of them seldom runs."""
    server = [sys.executable, str(STUCK), "exits", "PATH"]
    monkeypatch.setattr(coordinator, "Ranks", functools.partial(group.Ranks, server=server))
    tests = on_this_machine(20, 1, 250)
    asyncio.run(together(tests))
    for test in tests:
        assert not any(one.fatal for one in test.findings)
        assert [one.text for one in test.findings if "of the median" not in one.text] == []
    (line,) = [text for text in tests[0].lines(1.0) if text.startswith("bus bandwidth: ")]
    assert line == "bus bandwidth: 10.00 GB/s for 256 MiB, 10.0 MB/s for 8 KiB"


@pytest.mark.parametrize("count", range(2, 41))
def test_in_each_round_every_node_measures_with_one_other(count):
    rounds = [speeds.rounds(node, count) for node in range(count)]
    met = [{node, other} for node in range(count) for other in rounds[node] if other is not None]
    for turn in zip(*rounds, strict=True):
        assert all(turn[other] == node for node, other in enumerate(turn) if other is not None)
        assert sum(other is None for other in turn) == count % 2
    assert all(met.count(pair) == 2 for pair in met)


USUAL = 20e9


def measured(count, slow=None, pair=frozenset(), busy=()):
    """What healthy nodes measure, but for a slow node or pair, and nodes without a processor."""

    def rate(node, other):
        return USUAL * (0.7 if slow in (node, other) or {node, other} == pair else 1)

    return {
        node: {
            "small": 1e8,
            "large": USUAL,
            "size": 1 << 28,
            "busy": 0.5 if node in busy else 0,
            "pairs": {str(n): rate(node, n) for n in speeds.rounds(node, count) if n is not None},
        }
        for node in range(count)
    }


def named(reports):
    found = findings.judge("bandwidth", nodes(len(reports)), reports)
    assert not any(finding.fatal for finding in found)
    return [finding.text.partition(":")[0] for finding in found]


@pytest.mark.parametrize("count", [2, 3, 4, 20])
def test_healthy_nodes_have_no_slow_one(count):
    assert named(measured(count)) == []


@pytest.mark.parametrize("count", [3, 4, 20])
def test_a_node_below_the_median_is_named(count):
    assert named(measured(count, slow=1)) == ["node 1 (b, 10.0.0.1)"]
    assert named(measured(count, slow=1, busy=[1])) == []


@pytest.mark.parametrize("count", [4, 20])
def test_a_pair_below_the_median_is_named(count):
    pair = {0, speeds.rounds(0, count)[1]}
    label = nodes(count).label
    assert named(measured(count, pair=pair)) == [" with ".join(map(label, sorted(pair)))]


def test_bus_bandwidth_is_reported_beside_what_the_network_carries():
    rates = [50e9, None, 25e9, 50e9]
    (line,) = speeds.lines(measured(4), rates)
    end = ", 80% of the 25.00 GB/s that a node's network devices can carry"
    assert line == f"bus bandwidth: 20.00 GB/s for 256 MiB, 100.0 MB/s for 8 KiB{end}"
    for unknown in ([None] * 4, [50e9]):
        assert next(speeds.lines(measured(4), unknown)) == line.removesuffix(end)


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert speeds.bus(1 << 30, 0.5, 8) == (1 << 31) * 2 * 7 / 8


def test_a_pytorch_that_cannot_be_imported_is_named(monkeypatch):
    server = [sys.executable, "-c", "import sys; sys.exit('OSError: libcudart.so.12')"]
    monkeypatch.setattr(coordinator, "Ranks", functools.partial(group.Ranks, server=server))
    tests = on_this_machine(2, 2, 60)
    asyncio.run(together(tests))
    for test in tests:
        first, second = [finding.text for finding in test.findings if finding.fatal]
        assert (
            first == "PyTorch cannot be imported on node 0 (a, 127.0.0.1): OSError: libcudart.so.12"
        )
        assert "node 1 (b, 127.0.0.2): OSError: libcudart.so.12" in second
