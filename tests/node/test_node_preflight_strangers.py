"""The preflight test beside strangers: connections without the key, of any kind and number."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from deploykit_node.preflight import links
from deploykit_node.preflight.peers import Peers

KEY = b"what the nodes share"
REPORT = {"node": 1, "part": "pairs", "report": {}}


def plan(held=None, key=KEY, port=0):
    port = held.getsockname()[1] if held else port
    return Peers(1 if held is None else 0, ("a", "b"), ("127.0.0.1", "127.0.0.2"), port, key, held)


def exchange(port, *data):
    """Send to the server; the bytes that it sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.settimeout(60)
        answer = b""
        try:
            for part in data:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(1 << 16):
                answer += more
        except OSError:
            pass
        return answer


@pytest.fixture
def heard():
    """The reports that a server of node 0 hands on."""
    return []


@pytest.fixture
def serve(heard):
    """Runs a coroutine against a server of node 0; returns its result, and the server."""

    def run(attack):
        async def main():
            async def hear(request):
                heard.append(request)
                return {"findings": []}

            with socket.socket() as held:
                held.bind(("127.0.0.1", 0))
                server = links.Server(plan(held), hear)
                await server.start()
                try:
                    return await attack(held.getsockname()[1], server), server
                finally:
                    await server.stop(patience=5)

        return asyncio.run(main())

    return run


def ask(port, request, key=KEY):
    return links.ask(plan(key=key, port=port), 0, port, request, 60)


def test_a_node_is_answered(serve, heard):
    async def attack(port, _):
        return [await ask(port, {}), await ask(port, REPORT)]

    (greeting, verdict), server = serve(attack)
    assert (greeting["node"], greeting["bulk"]) == (0, server.bulk_port)
    assert (verdict, heard, server.ignored) == ({"findings": []}, [REPORT], 0)


@pytest.mark.parametrize(
    "data",
    [
        [json.dumps(REPORT).encode() + b"\n"],
        [b"\n", b" " * 70 + b"\n"],
        [b"\xff" * 200],
        [b"[" * 100_000 + b"\n"],
        [b"x" * (1 << 20)] * 64,
    ],
    ids=["a report", "short lines", "bytes", "deep", "endless"],
)
def test_what_a_stranger_sends_is_not_read(serve, heard, data):
    """One such line, of anyone who could connect, ended the job."""

    async def attack(port, server):
        return [await asyncio.to_thread(exchange, it, *data) for it in (port, server.bulk_port)]

    answers, _ = serve(attack)
    assert heard == []
    assert all(len(answer) <= 64 for answer in answers)  # a random number and a proof


@pytest.mark.parametrize("key", [b"guessed", b""])
def test_another_key_is_refused_by_both_sides_and_counted(serve, heard, key):
    """That of another attempt too."""

    async def attack(port, _):
        with pytest.raises((links.Stranger, EOFError, ConnectionError)):
            await ask(port, REPORT, key)

    _, server = serve(attack)
    assert (heard, server.ignored) == ([], 1)


def test_a_proof_cannot_be_sent_back(serve, heard):
    """A stranger that returns what it gets has the server's own proof, of the other side."""

    def mirror(port):
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.settimeout(60)
            for _ in range(2):
                connection.sendall(connection.recv(32))
            return connection.recv(1)

    async def attack(port, _):
        return await asyncio.to_thread(mirror, port)

    answer, server = serve(attack)
    assert (answer, heard, server.ignored) == (b"", [], 1)


def test_a_listener_without_the_key_is_not_believed():
    """Such as another user's program at a port where the node does not listen yet."""

    async def impostor(reader, writer):
        writer.write(await reader.read(32))
        writer.write(bytes(32) + b'{"node": 0, "time": 0, "bulk": 1}\n')
        writer.close()

    async def main():
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        async with server:
            await ask(server.sockets[0].getsockname()[1], {})

    with pytest.raises(links.Stranger):
        asyncio.run(main())


def test_idle_connections_keep_no_node_out(serve):
    """The oldest of too many is closed; one with a proof is answered the first time."""

    async def attack(port, _):
        answers = []
        with contextlib.ExitStack() as idle:
            for _ in range(5):
                for _ in range(80):
                    idle.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                answers.append(await ask(port, {}))
        return answers

    answers, server = serve(attack)
    assert [answer["node"] for answer in answers] == [0] * 5
    assert server.ignored >= 5 * 80 - 72
