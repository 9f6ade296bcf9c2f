"""One rank of the job: run the user's program below our own torchrun, and record its exit.

One of these processes stays beside every rank, so it imports little.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit_node import cap, cluster, command, exit_records, relay
from deploykit_node.cluster import BadEnvironment
from deploykit_node.exit_records import STOPPED
from deploykit_node.inspect import debugger, faults, processes, profile, stall

if TYPE_CHECKING:
    from deploykit_node.environment import Environ


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the program below our own torchrun, whose node is prepared. Does not return."""
    words, this_rank = command.read(argv, env), find(env)
    if profile.by_nsys(env):
        from deploykit_node.inspect import nsys  # few jobs ask for it

        nsys.around(words.program, env, this_rank)
    folder = env.pop("DEPLOYKIT_RANK_DIR")
    env["TORCHELASTIC_RESTART_COUNT"] = env.pop("DEPLOYKIT_ROUND")
    exit_records.register(env, Path(folder), this_rank.rank)
    child = run_program(words, env, this_rank, Path(folder))
    exit_records.record_rank(
        {**env, "DEPLOYKIT_RANK_DIR": folder}, this_rank, child.returncode, stopped=child.stopped
    )
    if child.returncode == STOPPED:
        # a non-zero code would make torchrun stop ranks that are still saving, or restart them
        child = relay.ChildExit(0, child.stopped)
    relay.exit_like(child)


def find(env: Environ) -> cluster.Rank:
    """The rank of this process, set by the launcher above. Raises BadEnvironment without one."""
    this_rank = cluster.rank(env)
    if this_rank is None:
        raise BadEnvironment("RANK is not set. Start the job with `launch.py torchrun ...`.")
    return this_rank


def run_program(
    words: command.Command,
    env: Environ,
    this_rank: cluster.Rank,
    folder: Path | None = None,
    limit: cap.Cap | None = None,
) -> relay.ChildExit:
    """Run the program; with a `folder` of the node's, so that its stacks can be seen meanwhile.

    With a `limit` the program is stopped at its cost cap.
    """
    env.update(this_rank.variables())
    env["DEPLOYKIT_RESTART_COUNT"] = str(exit_records.restarts(env))
    env.setdefault("PYTHONUNBUFFERED", "1")
    argv, prefix = relay.command(words.program), f"[rank {this_rank.rank}]"
    if folder is None:
        return relay.run(argv, profile.environment(env, this_rank.rank), prefix, cap=limit)
    hooked, stacks = faults.environment(env, folder, this_rank.rank)
    hooked = profile.environment(hooked, this_rank.rank)
    hooked = debugger.environment(hooked, this_rank.rank)
    started = partial(processes.register, env, this_rank, stacks=stacks)
    observer = relay.Observer(started, stall.Heard(folder, this_rank.rank))
    return relay.run(argv, hooked, prefix, observer)
