"""The preflight test under attack: forged, malformed and endless messages."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deploykit_node.preflight import findings, messages, report
from deploykit_node.preflight.messages import REQUEST, Foreign, Seal
from deploykit_node.preflight.peers import Peers
from deploykit_node.preflight.server import Server

SEAL = Seal(b"what the nodes share")
PLAN = Peers("run.0", 0, ("a", "b"), ("127.0.0.1", "127.0.0.2"), 20000, SEAL)
FORGED = {"run": "run.0", "kind": "report", "node": 1, "nonce": "0", "part": "pairs", "report": {}}
LINK = {"state": "ok", "rate": 1e9, "clock": 0.0, "seconds": 0.001, "port": 20000, "bulk": 40000}
REPORT = {
    "links": {"0": LINK},
    "hostname": "b",
    "address": "127.0.0.2",
    "interface": "lo",
    "mtu": 65536,
    "line_rate": 1.25e9,
    "versions": {"driver": None, "torch": "2.13.0", "NCCL": None},
    "shm": [1 << 34, 1 << 34],
    "disks": {"/tmp": [1 << 34, 1 << 34]},
    "own": 1e9,
    "health": {
        "faults": [["GPU 0 is hot", False]],
        "speeds": {"memory": 1e10},
        "counts": {"GPUs": 1},
        "skipped": ["kernel log"],
    },
}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def exchange(port, *data, wait=True):
    """Send to the server; what it answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        for part in data:
            try:
                connection.sendall(part)
            except OSError:
                break
        if not wait:
            return b""
        connection.settimeout(60)
        answer = b""
        try:
            while more := connection.recv(1 << 16):
                answer += more
        except ConnectionResetError:
            pass
        return answer


@pytest.fixture
def heard():
    """The records that a server of node 0 hands on."""
    return []


@pytest.fixture
def serve(heard):
    """Runs a function in a thread, against a server; returns what it returns, and the server."""

    def run(attack):
        async def main():
            async def hear(question):
                heard.append(question)
                return {"findings": [], "port": None}

            held = socket.socket()
            held.bind(("127.0.0.1", 0))
            plan = Peers(
                *(PLAN.name, 0, PLAN.hosts, PLAN.addresses), held.getsockname()[1], SEAL, held
            )
            server = Server(plan, hear)
            await server.start()
            try:
                return await asyncio.to_thread(attack, plan), server
            finally:
                await server.stop(patience=5)
                held.close()

        return asyncio.run(main())

    return run


def test_a_forged_message_is_ignored_and_counted(serve, heard):
    """One such line, of anyone who could connect, ended the job."""
    unsigned = json.dumps(FORGED).encode() + b"\n"
    other_key = Seal(b"guessed").write(FORGED, REQUEST)
    own_answer = SEAL.write(FORGED, messages.reply_to(FORGED))
    lines = [unsigned, other_key, own_answer, b"\n", b" " * 70 + b"\n", b"\xff" * 200 + b"\n"]
    answers, server = serve(lambda plan: [exchange(plan.port, line) for line in lines])
    assert answers == [b""] * len(lines)
    assert heard == []
    assert server.ignored == len(lines)


def test_a_signed_question_is_answered_for_itself_alone(serve, heard):
    question = PLAN.request("report", part="pairs", report=REPORT) | {"node": 1}
    (answer, server) = serve(lambda plan: exchange(plan.port, SEAL.write(question, REQUEST)))
    assert SEAL.read(answer, messages.reply_to(question))["findings"] == []
    with pytest.raises(Foreign):
        SEAL.read(answer, messages.reply_to(PLAN.request("tell")))
    assert (heard, server.ignored) == ([question], 0)


@pytest.mark.parametrize(
    "odd",
    [
        {"node": 2},
        {"node": -1},
        {"node": True},
        {"node": "1"},
        {"run": "run.1"},
        {"kind": "shell"},
        {"part": "other"},
        {"part": ["pairs"]},
        {"report": {}},
        {"report": {**REPORT, "links": {"0": {"state": "slow"}}}},
        {"report": {**REPORT, "links": {"٣": LINK}}},
        {"report": {**REPORT, "links": {"0": {**LINK, "rate": float("nan")}}}},
        {"report": {**REPORT, "shm": [1]}},
        {"nonce": None},
    ],
    ids=str,
)
def test_unknown_nodes_and_odd_shapes_are_ignored_although_signed(serve, heard, odd):
    question = PLAN.request("report", part="pairs", report=REPORT) | {"node": 1} | odd
    answer, server = serve(lambda plan: exchange(plan.port, SEAL.write(question, REQUEST)))
    assert (answer, heard, server.ignored) == (b"", [], 1)


def test_a_line_without_end_takes_no_memory(serve):
    answer, server = serve(lambda plan: exchange(plan.port, *([b"x" * (1 << 20)] * 64)))
    assert (answer, server.ignored) == (b"", 1)


def test_idle_connections_keep_no_node_out(serve):
    """The oldest of too many is closed; one that asks is answered the first time."""
    questions = [PLAN.request("hello") | {"node": 1} for _ in range(5)]

    def attack(plan):
        idle = []
        answers = []
        for question in questions:
            idle += [socket.create_connection(("127.0.0.1", plan.port), 60) for _ in range(80)]
            answers.append(exchange(plan.port, SEAL.write(question, REQUEST)))
        for one in idle:
            one.close()
        return answers

    answers, server = serve(attack)
    for question, answer in zip(questions, answers, strict=True):
        assert SEAL.read(answer, messages.reply_to(question))["node"] == 0
    assert server.ignored >= 5 * 80 - 72


def test_a_forged_transfer_is_not_begun(serve):
    def attack(plan):
        question = plan.request("hello") | {"node": 1}
        answer = exchange(plan.port, SEAL.write(question, REQUEST))
        bulk = SEAL.read(answer, messages.reply_to(question))["bulk"]
        return exchange(bulk, b'{"bytes": 1048576}\n', bytes(1 << 20))

    answer, server = serve(attack)
    assert (answer, server.ignored) == (b"", 1)


@given(line=st.binary(max_size=300))
@example(line=b"0" * 64 + b" " + b"[" * 100_000 + b"\n")
def test_any_bytes_are_a_record_or_foreign(line):
    with pytest.raises(Foreign):
        SEAL.read(line, REQUEST)


@given(record=ANY)
def test_any_signed_value_is_a_record_or_foreign(record):
    line = SEAL.write(record, REQUEST)
    try:
        found = SEAL.read(line, REQUEST)
    except Foreign:
        assert not isinstance(record, dict)
    else:
        assert json.dumps(found) == json.dumps(record)


@given(
    part=st.sampled_from(["pairs", "versions", "group", "bandwidth", "trial 0"]),
    changes=st.dictionaries(
        st.sampled_from(
            [
                *REPORT,
                *("torch", "NCCL", "backend", "port", "correct", "rank", "output", "ended"),
                *("small", "large", "size", "busy"),
            ]
        ),
        ANY | st.fixed_dictionaries({"0": ANY, "1": st.just(LINK) | st.floats()}),
        max_size=8,
    ),
)
def test_what_passes_the_check_can_be_judged_and_printed(part, changes):
    """Node 0 has a verdict for every valid report, and can print it."""
    request = PLAN.request("report", part=part, report={**REPORT, **changes}) | {"node": 1}
    try:
        messages.check_request(request, 2)
    except Foreign:
        return
    reports = {0: REPORT if part == "pairs" else request["report"], 1: request["report"]}
    judged = findings.judge(part, PLAN, reports)
    findings.without_verdict(PLAN, part, reports)
    parts = {"pairs": {}, "group": {}} | {part: reports}
    assert report.lines(PLAN, parts, judged, 1.0, 3)[-2].startswith("ignored 3")


@given(verdict=ANY | st.fixed_dictionaries({"findings": ANY, "port": ANY}))
def test_any_verdict_is_one_or_foreign(verdict):
    if not isinstance(verdict, dict):
        return
    try:
        messages.check_verdict(verdict)
    except Foreign:
        return
    assert all(findings.Finding(*found).text is not None for found in verdict["findings"])
