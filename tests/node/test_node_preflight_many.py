"""The preflight test of a thousand nodes, of which each tests some others: what is found."""

from __future__ import annotations

import json

import pytest

from deploykit_node.preflight import findings, links
from deploykit_node.preflight.peers import Peers
from tests.node.test_node_preflight import FACTS, OK

MANY = 1000


def plan(node, count=MANY):
    hosts = tuple(f"n{number}" for number in range(count))
    places = tuple(f"10.0.{number // 250}.{number % 250}" for number in range(count))
    return Peers(node, hosts, places, 20000, b"k")


def reports(link, count=MANY, without=()):
    """What the nodes report where `link` gives what differs of a source's link to a node."""
    found = {}
    for node in set(range(count)) - set(without):
        this = plan(node, count)
        row = {str(n): {**OK, **link(node, n)} for n in this.tested}
        if this.only_greeted is not None:
            del row[str(this.only_greeted)]["rate"]
        found[node] = {**FACTS, "links": row}
    return found


def blocked(*when):
    return lambda source, node: {"state": "dropped"} if any(w(source, node) for w in when) else {}


def judged(rows, count=MANY):
    return findings.judge("pairs", plan(0, count), rows)


@pytest.mark.slow
def test_each_node_tests_about_log_n_others_and_every_link_both_ways():
    rows = reports(lambda *_: {})
    assert max(len(row["links"]) for row in rows.values()) == 19
    tested = {(source, int(node)) for source, row in rows.items() for node in row["links"]}
    assert all((node, source) in tested for source, node in tested if node)
    received = [sum(node == n for _, node in tested) for n in (1, 500, 999)]
    assert max(received) <= 19
    assert judged(rows) == []
    assert max(len(json.dumps(rows[node])) for node in (0, 333)) < 4000


def test_all_pairs_of_few_nodes_are_tested():
    assert all(len(plan(node, 32).tested) == 31 for node in range(32))
    assert plan(5, 32).only_greeted is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "without", "begins", "says"),
    [
        (blocked(lambda _, n: n == 77), [77], "node 77 (n77, 10.0.0.77) cannot be reached", "down"),
        (blocked(lambda _, n: n == 77), [], "node 77 (n77, 10.0.0.77) cannot be", "inbound rules"),
        (
            blocked(lambda s, _: s == 77),
            [],
            "node 77 (n77, 10.0.0.77) cannot con",
            "Check its outbound",
        ),
        (blocked(lambda s, n: (s, n) == (77, 78)), [], "node 77 (n77, 10.0.0.77) to node 78", ""),
        (blocked(lambda _, n: n == 0), [], "node 0 (n0, 10.0.0.0) cannot be reached", "1 to 999"),
    ],
    ids=["dead", "inbound", "outbound", "direction", "first"],
)
def test_one_fault_among_a_thousand_nodes_is_one_finding(link, without, begins, says):
    (found,) = judged(reports(link, without=without))
    assert found.fatal
    assert found.text.startswith(begins)
    assert says in found.text


def slow(rate, *when):
    return lambda s, n: {"state": "slow", "rate": rate} if any(w(s, n) for w in when) else {}


@pytest.mark.slow
def test_a_slow_node_is_found_by_its_median_and_a_busy_one_stops_nothing():
    rows = reports(slow(2e6, lambda s, n: 77 in (s, n)))
    (found,) = judged(rows)
    assert found.fatal
    assert found.text.startswith("node 77 (n77, 10.0.0.77) is slow: 2.0 MB/s on its best link")
    rows[77]["own"] = 6e6
    (found,) = judged(rows)
    assert not found.fatal
    assert "its loopback is slow too" in found.text


def test_under_cpu_pressure_everywhere_nothing_is_fatal():
    """All nodes on few processors: rates differ a hundredfold, and none is a network's."""
    rows = reports(lambda s, n: {"state": "slow", "rate": 1e5 if (s + n) % 3 == 0 else 1e7}, 40)
    for row in rows.values():
        row["own"] = 3e5
    assert [finding for finding in judged(rows, 40) if finding.fatal] == []


def test_a_slow_link_between_two_good_nodes():
    (found,) = judged(reports(slow(2e6, lambda s, n: (s, n) == (77, 79))))
    assert found.fatal
    assert found.text.startswith("node 77 (n77, 10.0.0.77) to node 79 (n79, 10.0.0.79) is slow")


def test_clocks_are_known_of_nodes_that_the_first_one_does_not_test():
    rows = reports(
        lambda s, n: {"clock": -60.0} if s == 777 else {"clock": 60.0} if n == 777 else {}
    )
    (found,) = judged(rows)
    assert found.text.startswith("the clock of node 777 (n777, 10.0.3.27) is 60.0 s ahead")


@pytest.mark.parametrize(
    ("seconds", "waited", "rate"),
    [(0.003, 0.002, 1e6 / 0.003), (1.0, 0.9, 1e7), (1.0, 2.0, 5e7)],
    ids=["fast-enough", "slow-for-want-of-a-processor", "both-ends-waited"],
)
def test_waits_for_a_processor_are_taken_off_where_a_link_looks_slow(seconds, waited, rate):
    """Otherwise one link of a busy machine seems fifty times as fast, and sets what is usual."""
    assert links.rate_of(1_000_000, seconds, waited) == pytest.approx(rate)
