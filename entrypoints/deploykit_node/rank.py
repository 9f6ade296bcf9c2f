"""One rank of the job: start the user's program below our own torchrun, and record its exit.

While the program runs, `rank_relay` stays beside it, in the same process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit_node import LAUNCH, cap, cluster, command, exit_records, plain, relay
from deploykit_node.cluster import BadEnvironment
from deploykit_node.exit_records import STOPPED
from deploykit_node.observe import hooks, processes

if TYPE_CHECKING:
    from deploykit_node.environment import Environ


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the program below our own torchrun, whose node is prepared. Does not return.

    This process becomes the relay of the program, and its last act is `end`.
    """
    words, this_rank = command.read(argv, env), find(env)
    if hooks.by_nsys(env):
        from deploykit_node.observe import nsys  # few jobs ask for it

        nsys.around(words.program, env, this_rank)
    folder = env.pop("DEPLOYKIT_RANK_DIR")
    env["TORCHELASTIC_RESTART_COUNT"] = env.pop("DEPLOYKIT_ROUND")
    exit_records.register(env, Path(folder), this_rank.rank)
    _set_variables(env, this_rank)
    hooked, stacks = hooks.environment(env, Path(folder), this_rank.rank)
    child = relay.start(relay.command(words.program), plain.environment(hooked))
    processes.register(env, this_rank, child.pid, stacks=stacks)
    os.set_inheritable(child.output, True)
    os.set_inheritable(child.errors, True)
    numbers = map(str, (child.pid, child.output, child.errors, child.torchrun))
    small = [sys.executable, "-S", LAUNCH, "--relay", *numbers]
    os.execve(small[0], small, {**env, "DEPLOYKIT_RANK_DIR": folder})


def end(child: relay.ChildExit, env: Environ) -> None:
    """Record how the program of a rank ended, and end this process in the same way."""
    exit_records.record_rank(env, find(env), child.returncode, stopped=child.stopped)
    if child.returncode == STOPPED:
        # a non-zero code would make torchrun stop ranks that are still saving, or restart them
        child = relay.ChildExit(0, stopped=child.stopped)
    relay.exit_like(child)


def find(env: Environ) -> cluster.Rank:
    """The rank of this process, set by the launcher above. Raises BadEnvironment without one."""
    this_rank = cluster.rank(env)
    if this_rank is None:
        raise BadEnvironment("RANK is not set. Start the job with `launch.py torchrun ...`.")
    return this_rank


def run_program(
    words: command.Command, env: Environ, this_rank: cluster.Rank, limit: cap.Cap | None
) -> relay.ChildExit:
    """Run the program below another launcher; with a `limit` it is stopped at its cost cap."""
    _set_variables(env, this_rank)
    program = hooks.profiled(env, this_rank.rank)
    return relay.run(relay.command(words.program), program, f"[rank {this_rank.rank}]", limit)


def _set_variables(env: Environ, this_rank: cluster.Rank) -> None:
    env.update(this_rank.variables())
    env["DEPLOYKIT_RESTART_COUNT"] = str(exit_records.restarts(env))
    env.setdefault("PYTHONUNBUFFERED", "1")
