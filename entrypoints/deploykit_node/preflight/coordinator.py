"""Run the preflight test: on all nodes at once, within a budget of seconds.

Each node tests its links to the others and collects its own facts; then all join a small process
group. After each part the nodes send their reports to node 0, which judges all of them and replies
with a verdict. A node that cannot reach node 0 sends its report through another node.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from deploykit_node import log, records
from deploykit_node.cluster import BadEnvironment, Cluster, Environ
from deploykit_node.network import interfaces
from deploykit_node.network.rendezvous import Rendezvous
from deploykit_node.preflight import findings, gpus, group, health, links, peers, speeds
from deploykit_node.preflight.group import Ranks
from deploykit_node.preflight.peers import Finding, Peers, Record

VARIABLE = "DEPLOYKIT_PREFLIGHT"
"""Seconds for the whole test."""

_FILES = 512
"""Files that the test opens beside two for each node."""
_PARTS = {
    "pairs": (0.4, 0.5),
    "versions": (0.72, 0.76),
    "group": (0.84, 0.88),
    "bandwidth": (0.94, 0.97),
}
"""Shares of the budget at which a node ends a part, and at which node 0 judges what it has."""
_TRIAL = 10.0
"""Seconds for each trial of a group that does not form, beyond the budget; or its part of that."""


def budget(env: Environ) -> float:
    """Seconds for the whole test. Raises BadEnvironment if the variable is not such a number."""
    text = env.get(VARIABLE, "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 1 <= seconds < 3600:  # noqa: PLR2004 - an hour
        raise BadEnvironment(f"{VARIABLE} is {text!r}; it must be a number of seconds, at least 1.")
    return seconds


def run(here: Cluster, meeting: Rendezvous, env: Environ, processes: int) -> None:
    """Test the nodes of `here`, with `processes` ranks each, and log the report.

    Raises BadEnvironment if the job would fail or hang.
    """
    test(peers.of_cluster(here, meeting), env, processes, partial(log.say, here.number))


def test(nodes: Peers, env: Environ, processes: int, say: Callable[[str], None]) -> None:
    """As `run`, for nodes that are known already; `say` takes each line of the report."""
    running = _Test(nodes, env, processes, budget(env))
    with _files(len(nodes.hosts)):
        asyncio.run(running.run())
    took = time.monotonic() - running.begun
    for line in running.lines(took):
        say(f"preflight: {line}")
    if nodes.node == 0:
        blamed = findings.blamed(nodes, running.findings)
        records.record_unhealthy(env, blamed, failed_check=True)
    if fatal := [finding.text for finding in running.findings if finding.fatal]:
        raise BadEnvironment(f"preflight stopped the job after {took:.1f} s: " + " | ".join(fatal))


@contextlib.contextmanager
def _files(count: int) -> Iterator[None]:
    """Let this process open enough files for `count` nodes, as far as the system allows."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = before if before == resource.RLIM_INFINITY else max(before, _FILES + 2 * count)
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@dataclass
class _Part:
    """One part on node 0: the report of each node, and the verdict for all."""

    reports: dict[int, Record] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: Record = field(default_factory=dict)


class _Test:
    """The test on one node."""

    def __init__(self, nodes: Peers, env: Environ, processes: int, seconds: float) -> None:
        self._peers, self._env, self._processes = nodes, env, processes
        self._seconds = seconds
        self.begun = time.monotonic()
        self._ends = {
            part: (self.begun + seconds * own, self.begun + seconds * judged)
            for part, (own, judged) in _PARTS.items()
        }
        """When a node ends a part, and when node 0 judges what it has."""
        self._parts: dict[str, _Part] = {}
        self._links: dict[int, Record] = {}
        self._server = links.Server(nodes, self._reply)
        self._bisection, self._kept = group.Bisection(), list[Finding]()
        self.findings: list[Finding] = []

    async def run(self) -> None:
        """Test. Raises BadEnvironment if this node cannot listen."""
        trials = map(group.part, range(len(group.TRIALS)))
        self._parts = {part: _Part() for part in (*_PARTS, *trials)}
        try:
            await self._server.start()
        except OSError as error:
            raise BadEnvironment(f"preflight cannot listen on this node: {error}") from None
        try:
            if await self._pairs():
                await self._groups()
        finally:
            await self._server.stop(patience=1)

    async def _pairs(self) -> bool:
        """Whether every pair of nodes can connect, and all have the same software."""
        checks: dict[str, Callable[[health.Health], None]] = {
            "GPUs": gpus.check,
            "network devices": health.check_devices,
            "kernel log": health.check_kernel_log,
            "processors": health.check_processors,
            "disks": partial(health.check_disks, env=self._env),
            "GPUs with DCGM": health.check_dcgm,
        }
        checking, end = health.Running(checks), self._until("pairs")
        own = await links.own_rate(self._peers, self._server.bulk_port, end)
        self._links = await links.test(self._peers, end)
        others = (self._peers.addresses[node] for node in self._peers.tested)
        route = interfaces.route_to_any(address for address in others if address)
        own_report = {
            **health.facts(self._env, route),
            "links": {str(node): link for node, link in self._links.items()},
            "own": own,
            "health": await asyncio.to_thread(checking.record, end),
        }
        return await self._agree("pairs", own_report) is not None and self._passed()

    async def _groups(self) -> None:
        """Compare what PyTorch is on each node, form the group, and measure what it reaches."""
        ranks = Ranks(self._peers.node, self._processes, self._peers.addresses[0], self._env)
        try:
            await ranks.start()
            verdict = await self._agree("versions", await ranks.versions(self._left("versions")))
            if verdict and self._passed() and verdict["port"] is not None:
                await self._group(ranks, verdict["port"])
        finally:
            await ranks.stop()

    async def _group(self, ranks: Ranks, port: int) -> None:
        """Form the group; if that fails with NCCL, find out which part of it is to blame."""
        count, address = len(self._peers.hosts), self._peers.addresses[0]
        order = {"address": address, "port": port, "world": self._processes * count}
        order |= {"name": "group", "backend": None}
        verdict = await self._agree("group", await ranks.order(order, self._left("group")))
        while verdict and verdict["trial"] is not None:
            part, trial = group.part(verdict["trial"]), group.TRIALS[verdict["trial"]]
            await ranks.again(trial.env, self._left(part) / 2)
            order |= {"name": part, "backend": trial.backend}
            verdict = await self._agree(part, await ranks.order(order, self._left(part)))
        if verdict and self._passed():  # too little bandwidth, or too late, stops nothing
            rounds = speeds.rounds(self._peers.node, count)
            order = {"rounds": rounds, "processes": self._processes}
            await self._agree("bandwidth", await ranks.order(order, self._left("bandwidth")))

    def _passed(self) -> bool:
        return not any(finding.fatal for finding in self.findings)

    def _until(self, part: str, end: int = 0) -> float:
        if part not in self._ends:  # a trial, which begins now
            now = time.monotonic()
            seconds = max(_TRIAL, self._seconds * (_PARTS["group"][0] - _PARTS["versions"][1]))
            self._ends[part] = now + seconds, now + seconds + _TRIAL / 2
        return self._ends[part][end]

    def _left(self, part: str, end: int = 0) -> float:
        return max(0.1, self._until(part, end) - time.monotonic())

    async def _agree(self, part: str, own_report: Record) -> Record | None:
        """Send the report to node 0 and adopt its verdict; None if there is none."""
        if self._peers.node == 0:
            verdict: Record | None = await self._judge(part, own_report)
        else:
            verdict = await self._send_report(part, own_report)
        if verdict is None:
            known = {self._peers.node: own_report}
            self.findings += findings.without_verdict(self._peers, part, known)
        else:
            self.findings += [Finding(*finding) for finding in verdict["findings"]]
        return verdict

    async def _judge(self, part: str, own_report: Record) -> Record:
        """Node 0's side: wait for the others' reports, and judge for all."""
        current = self._parts[part]
        self._store(part, 0, own_report)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(current.complete.wait(), self._left(part, 1))
        judged = findings.judge(part, self._peers, current.reports)
        ready = current.complete.is_set() and all("torch" in it for it in current.reports.values())
        port, trial = own_report.get("port") if ready else None, None
        if part not in _PARTS or (part == "group" and self._may_bisect(current)):
            trial, answer = self._bisection.after(not judged)
            self._kept = self._kept or judged
            judged = [*self._kept, Finding(answer, fatal=True)] if answer else []
        current.verdict = {"findings": judged, "port": port, "trial": trial}
        current.judged.set()
        return current.verdict

    def _may_bisect(self, current: _Part) -> bool:
        """Whether the ranks of all nodes have tried NCCL, and it did not come to a result."""
        versions = self._parts["versions"].reports.values()
        with_nccl = all(report.get("backend") == "nccl" for report in versions)
        failed = any("rank" in report for report in current.reports.values())
        return with_nccl and current.complete.is_set() and failed

    def _store(self, part: str, node: int, record: Record) -> None:
        current = self._parts[part]
        current.reports[node] = record
        if len(current.reports) == len(self._peers.hosts):
            current.complete.set()

    async def _reply(self, request: Record) -> Record:
        """The reply to another node's report: the verdict, which other nodes get from node 0."""
        if self._peers.node:
            return await self._ask(0, request)
        self._store(request["part"], request["node"], request["report"])
        await self._parts[request["part"]].judged.wait()
        return self._parts[request["part"]].verdict

    async def _send_report(self, part: str, own_report: Record) -> Record | None:
        """Send the report to node 0, directly or through the first node that can reach it."""
        request = {"node": self._peers.node, "part": part, "report": own_report}
        greeted = [node for node in self._peers.tested if "clock" in self._links[node]]
        for node in sorted(greeted, key=bool):
            with contextlib.suppress(OSError, EOFError, ValueError):
                return await self._ask(node, request)
        return None

    async def _ask(self, node: int, request: Record) -> Record:
        """Send a request to a node, and wait until it must have a verdict."""
        # a node that forwards a report may still be testing its own links
        known = self._links.get(node, {"port": self._peers.port})
        patience = self._left(request["part"], 1) + self._seconds * 0.02
        return await links.ask(self._peers, node, known["port"], request, patience)

    def lines(self, seconds: float) -> list[str]:
        """The report: on node 0 about all nodes, elsewhere the findings."""
        reports = {part: current.reports for part, current in self._parts.items()}
        return findings.lines(self._peers, reports, self.findings, seconds, self._server.ignored)
