"""Which nodes train together, in a job whose number of nodes may change (``nodes: 2:4``).

Such a job trains in generations: the members of one are fixed, and torchrun runs with them as in
any other job. A generation ends early when a member is lost, or when another node has come and
there is a new checkpoint to go on from. Each node then waits for the next one, whose ranks go on
from the newest checkpoint, as after any other restart.

Everything is agreed upon through small files in ``members/ATTEMPT`` of the run folder:

* ``waiting-N.json``: node N waits for a generation, and accepts connections while it lives,
* ``generation-G.json``: the members of generation G, created once, by the lowest waiting node,
* ``change-G.json``: why generation G ends although the program has not,
* ``over``: the exit code of the job; no generation follows.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit_node import log, records
from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.command import Command
from deploykit_node.environment import Environ
from deploykit_node.network import addresses, alive, interfaces
from deploykit_node.records import NodeExit
from deploykit_node.restart import checkpoints
from deploykit_node.restart.attempt import Attempt

Run = Callable[[Command, Environ, Cluster, Attempt, Callable[[], int | None]], NodeExit]
"""Runs torchrun with a fixed set of nodes."""
FOLDER = "members"
"""Folder inside the run folder."""
EVERY = 1.0
"""Seconds between two looks at the other members."""

_LAST_CALL = 30.0
"""Seconds that the first generation waits for nodes that it could do without, as torchrun does."""
_PATIENCE = 600.0
"""Seconds to wait for nodes that the job cannot do without."""
_ANSWER = 3.0
"""Seconds for a member to accept a connection."""
_SETTLE = 5.0
"""Seconds for a member that failed to say so, before it counts as lost."""
_PAUSE = 0.2


class TooFewNodes(Exception):
    """Fewer nodes were there in time than the job needs; `missing` are those that were not."""

    def __init__(self, least: int, missing: list[int]) -> None:
        super().__init__(f"fewer than {least} nodes were available within {_PATIENCE:g} seconds")
        self.missing = missing


class Size(NamedTuple):
    """How many nodes train: at least, and at most."""

    least: int
    most: int


class Member(NamedTuple):
    """One node of a generation: its number, and where its launcher accepts connections."""

    node: int
    host: str
    port: int

    def answers(self) -> bool:
        """Whether the launcher lives."""
        return alive.answers(self.host, self.port, _ANSWER)


class Generation(NamedTuple):
    """Nodes that train together."""

    number: int
    members: tuple[Member, ...]

    def cluster(self, here: Cluster) -> Cluster:
        """The cluster of its members alone, where their numbers are without gaps."""
        nodes = tuple(member.node for member in self.members)
        hosts = tuple(here.hosts[node] for node in nodes)
        return Cluster(here.launcher, nodes.index(here.node), hosts, nodes)


class Membership:
    """The part of a node, which the others reach at `address`, in what is agreed."""

    def __init__(self, env: Environ, node: int, size: Size, address: str) -> None:
        self._env, self._node, self._size = env, node, size
        self._run = records.folder(env)
        self._folder = folder(env)
        records.make_folder(self._folder)
        self._listener = alive.Listener(address)
        self._me = Member(node, address, self._listener.port)
        self._now = Generation(0, ())
        self._checkpoints: checkpoints.Snapshot = {}
        self._looked = 0.0

    def join(self, say: Callable[[str], None]) -> Generation | None:
        """Wait for the next generation with this node; None if the job is over.

        Raises TooFewNodes after ten minutes without the least number of nodes.
        """
        begun, announced = time.monotonic(), 0
        while not over(self._env):
            newest = self._newest()
            if newest.number > self._now.number and self._me in newest.members:
                self._now = newest
                self._checkpoints = self._saved()
                return newest
            if announced <= newest.number:
                announced = newest.number + 1
                self._announce(announced)
                if newest.number > self._now.number:
                    count = len(newest.members)
                    say(f"{count} nodes are training; this node will join at the next checkpoint")
            if any(member.answers() for member in newest.members if member != self._me):
                begun = time.monotonic()
            self._form(newest)
            if time.monotonic() - begun > _PATIENCE:
                present = {member.node for member, _ in self._waiting(newest.number + 1)}
                missing = sorted(set(range(self._size.most)) - present)
                raise TooFewNodes(self._size.least, missing)
            time.sleep(_PAUSE)
        return None

    def change(self) -> str | None:
        """Why this generation must end now; None while all members live and no node joins."""
        noted = records.read(self._path("change", self._now.number))
        if noted is None and time.monotonic() - self._looked >= EVERY:
            self._looked = time.monotonic()
            others = self._others()
            lost = self._lost(others) if others and not others[0].answers() else None
            why = lost or self._joining()
            noted = self._note(why) if why else None
        return str(noted["why"]) if noted else None

    def change_after_end(self) -> str | None:
        """Why the ranks ended early if that was for another node; else None.

        They may have failed because a member was lost, which takes some seconds to show.
        """
        deadline = time.monotonic() + _SETTLE
        while (why := self.change() or self._lost(self._others())) is None:
            if self._ended() or time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE)
        self._note(why)
        return why

    def close(self) -> None:
        """Live no more, for the other nodes."""
        self._listener.close()

    def _announce(self, number: int) -> None:
        record = {**self._me._asdict(), "generation": number, "since": time.time()}
        records.write(self._path("waiting", self._node), record)

    def _waiting(self, number: int) -> list[tuple[Member, float]]:
        """Nodes that wait for a generation and live, in order, and since when."""
        fields = {"host": str, "port": int, "generation": int, "since": float}
        waiting = records.read_all(self._folder, "waiting-*.json", fields)
        each = [
            (Member(node, record["host"], record["port"]), record["since"])
            for node, record in waiting
            if record["generation"] == number
        ]
        return sorted((member, since) for member, since in each if self._lives(member))

    def _lives(self, member: Member) -> bool:
        return member == self._me or member.answers()

    def _newest(self) -> Generation:
        """The newest generation; number 0 and no member if there is none."""
        generations = records.read_all(self._folder, "generation-*.json", {"members": list})
        number, record = max(generations, key=lambda each: each[0], default=(0, {"members": []}))
        return Generation(number, tuple(Member(*member) for member in record["members"]))

    def _form(self, newest: Generation) -> None:
        """Create the next generation if all nodes that can be in it wait for it."""
        waiting = self._waiting(newest.number + 1)
        members = [member for member, _ in waiting]
        if not members or members[0] != self._me or len(members) < self._size.least:
            return
        if newest.number == 0:
            oldest = min(since for _, since in waiting)
            if len(members) < self._size.most and time.time() - oldest < _LAST_CALL:
                return
        elif any(member not in members and member.answers() for member in newest.members):
            return
        for path in self._run.glob("process-*.json") if self._run else ():
            path.unlink(missing_ok=True)
        record = {"members": members[: self._size.most]}
        records.write_first(self._path("generation", newest.number + 1), record)

    def _lost(self, others: Sequence[Member]) -> str | None:
        """Which of the other members live no more, in words, unless they have ended."""
        silent = [member.node for member in others if not member.answers()]
        lost = sorted(node for node in silent if not records.has_ended(self._env, node))
        if not lost or over(self._env):
            return None
        return f"node {', '.join(map(str, lost))} was lost"

    def _others(self) -> list[Member]:
        """The other members, first the one after this node, which it watches."""
        members = list(self._now.members)
        at = members.index(self._me)
        return members[at + 1 :] + members[:at]

    def _ended(self) -> bool:
        """Whether a member has ended by itself."""
        return any(records.has_ended(self._env, one.node) for one in self._now.members)

    def _joining(self) -> str | None:
        """The nodes that have come, in words, once there is a checkpoint newer than they are."""
        if self._now.members[0] != self._me or len(self._now.members) == self._size.most:
            return None
        waiting = self._waiting(self._now.number + 1)
        if not waiting:
            return None
        first = min(since for _, since in waiting)
        folder = self._env.get("DEPLOYKIT_CHECKPOINT_DIR", "")
        if folder and not checkpoints.newest(self._checkpoints, folder, first):
            return None
        return f"node {', '.join(str(member.node) for member, _ in waiting)} joins"

    def _saved(self) -> checkpoints.Snapshot:
        return checkpoints.snapshot(self._env.get("DEPLOYKIT_CHECKPOINT_DIR", ""))

    def _note(self, why: str) -> dict[str, Any]:
        records.write_first(self._path("change", self._now.number), {"why": why})
        return {"why": why}

    def _path(self, what: str, number: int) -> Path:
        return self._folder / f"{what}-{number}.json"


def folder(env: Environ) -> Path:
    """Where the nodes of this attempt agree. Raises BadEnvironment without a run folder."""
    run = env.get("DEPLOYKIT_RUN_DIR")
    if not run:
        raise BadEnvironment(
            "The nodes of an elastic job find each other through the run folder: "
            "set DEPLOYKIT_RUN_DIR to a folder that all nodes share."
        )
    return Path(run, FOLDER, str(records.attempt(env)))


def over(env: Environ) -> bool:
    """Whether the job is over."""
    return (folder(env) / "over").exists()


def end_job(env: Environ, code: int) -> None:
    """Say that the job is over, with an exit code."""
    if records.folder(env) is not None:
        records.write_first(folder(env) / "over", {"code": code})


def run(words: Command, env: Environ, here: Cluster, attempt: Attempt, run_group: Run) -> NodeExit:
    """Train with whatever nodes there are, until the program or the job ends."""
    least, most = words.nodes()
    env["DEPLOYKIT_FULL_WORLD_SIZE"] = str(most * words.processes())
    members = Membership(env, here.node, Size(least, len(here.hosts)), _own_address(here))

    def train(generation: Generation) -> NodeExit:
        group = generation.cluster(here)
        attempt.regroup(group)
        fixed = words.with_nodes(len(group.hosts))
        return run_group(fixed, env, group, attempt, lambda: _signal(members.change()))

    try:
        end = _train_in_groups(members, train, env, here, attempt)
    except TooFewNodes as error:
        attempt.missing = error.missing
        end = NodeExit(BadEnvironment.exit_code, str(error))
    end_job(env, end.code)
    members.close()
    return end


def _train_in_groups(
    members: Membership,
    train: Callable[[Generation], NodeExit],
    env: Environ,
    here: Cluster,
    attempt: Attempt,
) -> NodeExit:
    """Train with one group of nodes after the other."""
    while (generation := members.join(lambda text: log.say(here.node, text))) is not None:
        env["DEPLOYKIT_GENERATION"] = str(generation.number)
        _describe(generation, here)
        end = train(generation)
        why = _why_not_over(end, attempt, members)
        if why is None:
            return end
        log.say(here.node, f"{why}: forming a new group")
    return NodeExit(0, "the job ended while this node waited to join it")


def _signal(why: str | None) -> int | None:
    """The signal for ranks that make way for others; those of a lost node wait for it in vain."""
    if why is None:
        return None
    return signal.SIGTERM if why.endswith("joins") else signal.SIGKILL


def _why_not_over(end: NodeExit, attempt: Attempt, members: Membership) -> str | None:
    """Why the job goes on with other nodes; None if it has ended."""
    if end.code == 0 or attempt.stop_signal is not None:
        return None
    return members.change_after_end()


def _describe(generation: Generation, here: Cluster) -> None:
    names = ", ".join(str(member.node) for member in generation.members)
    count = len(generation.members)
    text = f"group {generation.number}: {count} of {len(here.hosts)} nodes are training ({names})"
    log.say(here.node, text)


def _own_address(here: Cluster) -> str:
    """The address of this node that the others reach."""
    route = interfaces.route_to_any(addresses.peer_addresses(here)) if here.peer else None
    return route.source if route else "127.0.0.1"
