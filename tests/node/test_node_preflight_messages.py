"""The test of the network against whoever reaches its ports: forged, odd and endless messages."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import preflight
import preflight_messages
import preflight_pairs
import preflight_report
import preflight_words
from preflight_messages import QUESTION, Foreign, Seal
from preflight_pairs import Course

SEAL = Seal(b"what the nodes share")
PLAN = Course("run.0", 0, ("a", "b"), ("127.0.0.1", "127.0.0.2"), 20000, SEAL)
FORGED = {"run": "run.0", "ask": "tell", "node": 1, "nonce": "0", "part": "pairs", "told": {}}
LINK = {"state": "ok", "rate": 1e9, "clock": 0.0, "seconds": 0.001, "port": 20000, "bulk": 40000}
TOLD = {
    "links": {"0": LINK},
    "hostname": "b",
    "address": "127.0.0.2",
    "interface": "lo",
    "mtu": 65536,
    "versions": {"driver": None, "torch": "2.13.0", "NCCL": None},
    "shm": [1 << 34, 1 << 34],
    "disks": {"/tmp": [1 << 34, 1 << 34]},
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
            plan = Course(
                *(PLAN.name, 0, PLAN.hosts, PLAN.addresses), held.getsockname()[1], SEAL, held
            )
            server = preflight_pairs.Server(plan, hear)
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
    other_key = Seal(b"guessed").write(FORGED, QUESTION)
    own_answer = SEAL.write(FORGED, preflight_messages.answers(FORGED))
    lines = [unsigned, other_key, own_answer, b"\n", b" " * 70 + b"\n", b"\xff" * 200 + b"\n"]
    answers, server = serve(lambda plan: [exchange(plan.port, line) for line in lines])
    assert answers == [b""] * len(lines)
    assert heard == []
    assert server.ignored == len(lines)


def test_a_signed_question_is_answered_for_itself_alone(serve, heard):
    question = PLAN.question("tell", part="pairs", told=TOLD) | {"node": 1}
    (answer, server) = serve(lambda plan: exchange(plan.port, SEAL.write(question, QUESTION)))
    assert SEAL.read(answer, preflight_messages.answers(question))["findings"] == []
    with pytest.raises(Foreign):
        SEAL.read(answer, preflight_messages.answers(PLAN.question("tell")))
    assert (heard, server.ignored) == ([question], 0)


@pytest.mark.parametrize(
    "odd",
    [
        {"node": 2},
        {"node": -1},
        {"node": True},
        {"node": "1"},
        {"run": "run.1"},
        {"ask": "shell"},
        {"part": "other"},
        {"part": ["pairs"]},
        {"told": {}},
        {"told": {**TOLD, "links": {"0": {"state": "slow"}}}},
        {"told": {**TOLD, "links": {"٣": LINK}}},
        {"told": {**TOLD, "links": {"0": {**LINK, "rate": float("nan")}}}},
        {"told": {**TOLD, "shm": [1]}},
        {"nonce": None},
    ],
    ids=str,
)
def test_unknown_nodes_and_odd_shapes_are_ignored_although_signed(serve, heard, odd):
    question = PLAN.question("tell", part="pairs", told=TOLD) | {"node": 1} | odd
    answer, server = serve(lambda plan: exchange(plan.port, SEAL.write(question, QUESTION)))
    assert (answer, heard, server.ignored) == (b"", [], 1)


def test_a_line_without_end_takes_no_memory(serve):
    answer, server = serve(lambda plan: exchange(plan.port, *([b"x" * (1 << 20)] * 64)))
    assert (answer, server.ignored) == (b"", 1)


def test_many_who_say_nothing_keep_no_node_out(serve):
    """Above the limit a connection is closed at once; the others within seconds."""
    question = PLAN.question("hello") | {"node": 1}

    def attack(plan):
        idle = [socket.create_connection(("127.0.0.1", plan.port), 60) for _ in range(100)]
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if answer := exchange(plan.port, SEAL.write(question, QUESTION)):
                break
        for one in idle:
            one.close()
        return answer

    answer, server = serve(attack)
    assert SEAL.read(answer, preflight_messages.answers(question))["node"] == 0
    assert server.ignored >= 100 - 72


def test_a_forged_transfer_is_not_begun(serve):
    def attack(plan):
        question = plan.question("hello") | {"node": 1}
        answer = exchange(plan.port, SEAL.write(question, QUESTION))
        bulk = SEAL.read(answer, preflight_messages.answers(question))["bulk"]
        return exchange(bulk, b'{"bytes": 1048576}\n', bytes(1 << 20))

    answer, server = serve(attack)
    assert (answer, server.ignored) == (b"", 1)


@given(line=st.binary(max_size=300))
@example(line=b"0" * 64 + b" " + b"[" * 100_000 + b"\n")
def test_any_bytes_are_a_record_or_foreign(line):
    with pytest.raises(Foreign):
        SEAL.read(line, QUESTION)


@given(record=ANY)
def test_any_signed_value_is_a_record_or_foreign(record):
    line = SEAL.write(record, QUESTION)
    try:
        found = SEAL.read(line, QUESTION)
    except Foreign:
        assert not isinstance(record, dict)
    else:
        assert json.dumps(found) == json.dumps(record)


@given(
    part=st.sampled_from(["pairs", "versions", "group"]),
    changes=st.dictionaries(
        st.sampled_from(
            [*TOLD, "torch", "NCCL", "backend", "port", "right", "rank", "said", "ended"]
        ),
        ANY | st.fixed_dictionaries({"0": ANY, "1": st.just(LINK)}),
        max_size=8,
    ),
)
def test_what_passes_the_check_can_be_judged_and_printed(part, changes):
    """Whatever a node tells, node 0 has a verdict and the report has its lines."""
    question = PLAN.question("tell", part=part, told={**TOLD, **changes}) | {"node": 1}
    try:
        preflight_messages.check_question(question, 2)
    except Foreign:
        return
    told = {0: TOLD if part == "pairs" else question["told"], 1: question["told"]}
    findings = preflight_words.judge(part, PLAN, told)
    preflight_words.alone(PLAN, part, told)
    rounds = {"pairs": {}, "group": {}} | {part: told}
    assert preflight_report.lines(PLAN, rounds, findings, 1.0, 3)[-2].startswith("ignored 3")


@given(verdict=ANY | st.fixed_dictionaries({"findings": ANY, "port": ANY}))
def test_any_verdict_is_one_or_foreign(verdict):
    if not isinstance(verdict, dict):
        return
    try:
        preflight_messages.check_verdict(verdict)
    except Foreign:
        return
    assert all(preflight.Finding(*found).text is not None for found in verdict["findings"])
