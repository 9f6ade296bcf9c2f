"""The test of the network before the trainer: on every node at once, in at most half a minute.

Each node tests its way to every other and looks at itself; then all join a small process group.
After each part the nodes tell node 0, which judges for all and answers. A node with no way to
node 0 tells it through another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import network
import preflight_messages
import preflight_node
import preflight_pairs
import preflight_report
import preflight_words
import rendezvous
from cluster import BadEnvironment, Cluster
from preflight_messages import Record, Seal
from preflight_pairs import Course
from preflight_ranks import Ranks
from preflight_words import Finding
from rendezvous import Rendezvous

VARIABLE = "DEPLOYKIT_PREFLIGHT"
"""Seconds that the whole test may take."""

_PARTS = {"pairs": (0.4, 0.5), "versions": (0.75, 0.8), "group": (0.92, 0.96)}
"""Shares of the budget: when a node must have done its part, and when node 0 judges without it."""


def budget(env: Mapping[str, str]) -> float:
    """Seconds for the whole test. Raises BadEnvironment where the variable holds no such number."""
    text = env.get(VARIABLE, "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 1 <= seconds < 3600:  # noqa: PLR2004 - an hour
        raise BadEnvironment(f"{VARIABLE} is {text!r}; it must be a number of seconds from 1.")
    return seconds


def course(here: Cluster, meeting: Rendezvous) -> Course:
    """The test of the nodes of `here`, which meet at `meeting`."""
    addresses = _addresses(here)
    addresses[0] = meeting.host or addresses[0]
    seal, held = Seal(meeting.key), meeting.held
    return Course(meeting.name, here.node, here.hosts, tuple(addresses), meeting.port, seal, held)


def _addresses(here: Cluster) -> list[str]:
    """An address for each node; where all are this machine, a loopback address for each."""
    if here.launcher in {"emulated", "alone"}:
        return [f"127.0.{number // 254}.{number % 254 + 1}" for number in range(len(here.hosts))]
    return [_address(host) for host in here.hosts]


def _address(host: str) -> str:
    try:
        way = network.route_to_any(rendezvous.addresses(host))
        return way.peer if way else rendezvous.address(host)
    except BadEnvironment:
        return ""


def run(plan: Course, env: Mapping[str, str], processes: int, say: Callable[[str], None]) -> None:
    """Test, and print what was found. Raises BadEnvironment where the job would fail or hang."""
    test = _Test(plan, env, processes, budget(env))
    asyncio.run(test.run())
    took = time.monotonic() - test.begun
    for line in test.lines(took):
        say(f"preflight: {line}")
    fatal = [finding.text for finding in test.findings if finding.fatal]
    if fatal:
        raise BadEnvironment(f"preflight stopped the job after {took:.1f} s: " + " | ".join(fatal))


@dataclass
class _Round:
    """One part, as node 0 keeps it: what each node told, and what is answered to all."""

    told: dict[int, Record] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Record = field(default_factory=dict)


class _Test:
    """The test on one node."""

    def __init__(
        self, plan: Course, env: Mapping[str, str], processes: int, seconds: float
    ) -> None:
        self._plan, self._env, self._processes = plan, env, processes
        self._seconds = seconds
        self.begun = time.monotonic()
        self._rounds: dict[str, _Round] = {}
        self._links: dict[int, Record] = {}
        self._server = preflight_pairs.Server(plan, self._hear)
        self.findings: list[Finding] = []

    async def run(self) -> None:
        self._rounds = {part: _Round() for part in _PARTS}
        try:
            await self._server.start()
        except OSError as error:
            raise BadEnvironment(f"preflight cannot listen on this node: {error}") from None
        try:
            await self._parts()
        finally:
            await self._server.stop(patience=1)

    async def _parts(self) -> None:
        if not await self._pairs():
            return
        address = self._plan.addresses[0]
        ranks = Ranks(self._plan.node, self._processes, address, self._env)
        try:
            await ranks.start()
            store = await self._versions(ranks)
            if store is not None:
                await self._group(ranks, store)
        finally:
            await ranks.stop()

    async def _pairs(self) -> bool:
        """Whether every pair of nodes can talk, and all are alike."""
        self._links = await preflight_pairs.test(self._plan, self._until("pairs"))
        others = (self._plan.addresses[node] for node in self._plan.others)
        way = network.route_to_any(address for address in others if address)
        links = {str(node): link for node, link in self._links.items()}
        told = {"links": links, **preflight_node.facts(self._env, way)}
        answer = await self._agree("pairs", told)
        return answer is not None and self._well()

    async def _versions(self, ranks: Ranks) -> int | None:
        """The port of the group's store, once the ranks everywhere have the same PyTorch."""
        told = await ranks.versions(self._left("versions"))
        answer = await self._agree("versions", told)
        return answer["port"] if answer and self._well() else None

    async def _group(self, ranks: Ranks, port: int) -> None:
        world = self._processes * len(self._plan.hosts)
        order = {"address": self._plan.addresses[0], "port": port, "world": world}
        await self._agree("group", await ranks.reduce(order, self._left("group")))

    def _well(self) -> bool:
        return not any(finding.fatal for finding in self.findings)

    def _until(self, part: str, end: int = 0) -> float:
        return self.begun + self._seconds * _PARTS[part][end]

    def _left(self, part: str, end: int = 0) -> float:
        return max(0.1, self._until(part, end) - time.monotonic())

    async def _agree(self, part: str, told: Record) -> Record | None:
        """Tell node 0, and take its verdict for ours; None where it cannot be had."""
        if self._plan.node == 0:
            answer: Record | None = await self._judge(part, told)
        else:
            answer = await self._tell(part, told)
        if answer is None:
            alone = {self._plan.node: told}
            self.findings += preflight_words.alone(self._plan, part, alone)
        else:
            self.findings += [Finding(*found) for found in answer["findings"]]
        return answer

    async def _judge(self, part: str, told: Record) -> Record:
        """Node 0's part: wait for what the others tell, judge, and let all have the answer."""
        now = self._rounds[part]
        self._store(part, 0, told)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(now.full.wait(), self._left(part, 1))
        findings = preflight_words.judge(part, self._plan, now.told)
        complete = len(now.told) == len(self._plan.hosts) and not findings
        now.answer = {"findings": findings, "port": told.get("port") if complete else None}
        now.verdict.set()
        return now.answer

    def _store(self, part: str, node: int, told: Record) -> None:
        now = self._rounds[part]
        now.told[node] = told
        if len(now.told) == len(self._plan.hosts):
            now.full.set()

    async def _hear(self, question: Record) -> Record:
        """Answer another node's word: as node 0 with the verdict, else with what node 0 says."""
        if self._plan.node:
            return await self._ask(0, question)
        part = question["part"]
        self._store(part, question["node"], question["told"])
        await self._rounds[part].verdict.wait()
        return self._rounds[part].answer

    async def _tell(self, part: str, told: Record) -> Record | None:
        """Tell node 0 directly, or through the first node that can."""
        question = self._plan.question("tell", part=part, told=told)
        greeted = [node for node in self._plan.others if "clock" in self._links[node]]
        for node in sorted(greeted, key=bool):
            with contextlib.suppress(OSError, EOFError, ValueError):
                answer = await self._ask(node, question)
                preflight_messages.check_verdict(answer)
                return answer
        return None

    async def _ask(self, node: int, question: Record) -> Record:
        """Put a question to a node, with patience until it must have an answer."""
        known = self._links.get(node, {"port": self._plan.port})  # one that hands on may still test
        patience = self._left(question["part"], 1) + self._seconds * 0.02
        return await preflight_pairs.ask(self._plan, node, known["port"], question, patience)

    def lines(self, seconds: float) -> Sequence[str]:
        """The report: on node 0 of all nodes, elsewhere of what was found."""
        rounds: dict[str, Any] = {part: now.told for part, now in self._rounds.items()}
        ignored = self._server.ignored
        return preflight_report.lines(self._plan, rounds, self.findings, seconds, ignored)
