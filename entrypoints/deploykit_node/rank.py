"""One rank of the job below our own torchrun: start the user's program, and record its exit.

The node is prepared, and its launcher relays the output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from deploykit_node import cluster, command, records, relay
from deploykit_node.cluster import BadEnvironment
from deploykit_node.environment import Environ
from deploykit_node.observe import hooks, processes
from deploykit_node.records import STOPPED

PLAIN = "DEPLOYKIT_PLAIN"
"""Variable that marks a plain program, of whose environment `_OF_TORCHRUN` is taken out."""
_OF_TORCHRUN = re.compile(
    f"{PLAIN}|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$"
)


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the program below our own torchrun, whose node is prepared. Does not return."""
    words, this_rank = command.read(argv, env), find(env)
    if hooks.by_nsys(env):
        from deploykit_node.observe import nsys  # few jobs ask for it

        nsys.around(words.program, env, this_rank)
    folder = env.pop("DEPLOYKIT_RANK_DIR")
    env["TORCHELASTIC_RESTART_COUNT"] = env.pop("DEPLOYKIT_ROUND")
    records.register(env, Path(folder), this_rank.rank)
    set_variables(env, this_rank)
    hooked, stacks = hooks.environment(env, Path(folder), this_rank.rank)
    process = relay.start(relay.command(words.program), _without_torchrun(hooked))
    processes.register(env, this_rank, process.pid, stacks=stacks)
    relay.hand_over(process, Path(folder), this_rank.rank)
    end = relay.attend(process)
    env["DEPLOYKIT_RANK_DIR"] = folder
    records.record_rank(env, this_rank, end.returncode, stopped=end.stopped)
    if end.returncode == STOPPED:
        # a non-zero code would make torchrun stop ranks that are still saving, or restart them
        end = end._replace(returncode=0)
    relay.exit_like(end)


def find(env: Environ) -> cluster.Rank:
    """The rank of this process, set by the launcher above. Raises BadEnvironment without one."""
    this_rank = cluster.rank(env)
    if this_rank is None:
        raise BadEnvironment("RANK is not set. Start the job with `launch.py torchrun ...`.")
    return this_rank


def set_variables(env: Environ, this_rank: cluster.Rank) -> None:
    """Set what the program reads of its rank, under torchrun's names."""
    env.update(this_rank.variables())
    env["DEPLOYKIT_RESTART_COUNT"] = str(records.restarts(env))
    env.setdefault("PYTHONUNBUFFERED", "1")


def _without_torchrun(env: Environ) -> Environ:
    """The environment of the program: of a plain one without torchrun's variables."""
    if PLAIN not in env:
        return env
    return {name: value for name, value in env.items() if not _OF_TORCHRUN.match(name)}
