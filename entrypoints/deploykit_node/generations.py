"""The node of a job whose number of nodes may change: one torchrun after the other.

Each has a fixed set of nodes, see `membership`. The ranks of the next one go on from the newest
checkpoint, as after any other restart.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from deploykit_node import log, membership
from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.command import Command
from deploykit_node.environment import Environ
from deploykit_node.exit_records import NodeExit
from deploykit_node.membership import Generation, Membership, Size
from deploykit_node.network import addresses, interfaces
from deploykit_node.restart.attempt import Attempt

Run = Callable[[Command, Environ, Cluster, Attempt, Callable[[], int | None]], NodeExit]
"""Runs torchrun with a fixed set of nodes."""


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
    except membership.TooFewNodes as error:
        attempt.missing = error.missing
        end = NodeExit(BadEnvironment.exit_code, str(error))
    membership.end(env, end.code)
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
    text = f"group {generation.number}: {count} of {len(here.hosts)} nodes train ({names})"
    log.say(here.node, text)


def _own_address(here: Cluster) -> str:
    """The address of this node that the others reach."""
    route = interfaces.route_to_any(addresses.peer_addresses(here)) if here.peer else None
    return route.source if route else "127.0.0.1"
