"""One rank of the job: start the user's program, and record its exit.

Below our own torchrun the node is prepared, and `rank_relay` stays beside the program, in the same
process. Below another launcher, SageMaker's toolkit or mpirun, the rank does what the node's
launcher does otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploykit_node import (
    LAUNCH,
    cluster,
    command,
    environment,
    log,
    nccl,
    outputs,
    plain,
    records,
    relay,
    source_hash,
)
from deploykit_node.cluster import BadEnvironment
from deploykit_node.environment import Environ
from deploykit_node.network import addresses, interfaces, rendezvous
from deploykit_node.observe import debugger, faults, nsys, processes, profile
from deploykit_node.records import STOPPED
from deploykit_node.restart import cap


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the program below our own torchrun, whose node is prepared. Does not return.

    This process becomes the relay of the program, and its last act is `end`.
    """
    words, this_rank = command.read(argv, env), find(env)
    if profile.by_nsys(env):
        from deploykit_node.observe import nsys  # few jobs ask for it

        nsys.around(words.program, env, this_rank)
    folder = env.pop("DEPLOYKIT_RANK_DIR")
    env["TORCHELASTIC_RESTART_COUNT"] = env.pop("DEPLOYKIT_ROUND")
    records.register(env, Path(folder), this_rank.rank)
    _set_variables(env, this_rank)
    hooked, stacks = faults.environment(env, Path(folder), this_rank.rank)
    hooked = profile.environment(hooked, this_rank.rank)
    hooked = debugger.environment(hooked, this_rank.rank)
    child = relay.start(relay.command(words.program), plain.environment(hooked))
    processes.register(env, this_rank, child.pid, stacks=stacks)
    os.set_inheritable(child.output, True)
    os.set_inheritable(child.errors, True)
    numbers = map(str, (child.pid, child.output, child.errors, child.torchrun))
    small = [sys.executable, "-S", LAUNCH, "--relay", *numbers]
    os.execve(small[0], small, {**env, "DEPLOYKIT_RANK_DIR": folder})


def end(child: relay.ChildExit, env: Environ) -> None:
    """Record how the program of a rank ended, and end this process in the same way."""
    records.record_rank(env, find(env), child.returncode, stopped=child.stopped)
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
    program = profile.environment(env, this_rank.rank)
    return relay.run(relay.command(words.program), program, f"[rank {this_rank.rank}]", limit)


def _set_variables(env: Environ, this_rank: cluster.Rank) -> None:
    env.update(this_rank.variables())
    env["DEPLOYKIT_RESTART_COUNT"] = str(records.restarts(env))
    env.setdefault("PYTHONUNBUFFERED", "1")


def run_below_launcher(argv: Sequence[str], env: Environ) -> None:
    """Run the program below another launcher: SageMaker's toolkit or mpirun. Does not return.

    Raises LaunchError if the job cannot run here.
    """
    key = source_hash.check(env)
    words, this_rank = command.read(argv, env), find(env)
    words.check_world(this_rank)
    user_settings = environment.prepare(env)
    nsys.check(env, launcher=this_rank.launcher)
    _choose_interface(env, this_rank, user_settings)
    nccl.set_variables(env, _settings_to_keep(env, user_settings), this_rank.rank)
    _check_master(env, this_rank)
    if env.get("DEPLOYKIT_PREFLIGHT"):
        _preflight(env, this_rank, key)
    machine = this_rank.rank // this_rank.local_world_size
    with outputs.around(env, machine, this_rank.local_rank):
        child = run_program(words, env, this_rank, cap.begin(env, this_rank.rank))
    records.record_rank(env, this_rank, child.returncode, stopped=child.stopped)
    relay.exit_like(child)


def _check_master(env: Environ, this_rank: cluster.Rank) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise BadEnvironment(
            f"{this_rank.launcher} started this rank without {' and '.join(missing)}, so the ranks "
            "cannot meet. Pass them on, as in: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"
        )


def _choose_interface(env: Environ, this_rank: cluster.Rank, user_settings: Environ) -> None:
    """Choose the interface below SageMaker's launchers, which set a constant."""
    hosts = cluster.sagemaker_hosts(env) if "SM_HOSTS" in env else ()
    if len(hosts) < 2:  # noqa: PLR2004 - a network has two ends
        return
    try:
        route = interfaces.route_to_any(addresses.address(host) for host in hosts)
    except BadEnvironment:  # SageMaker's launcher has reached all hosts nevertheless
        route = None
    choice = interfaces.choose(route, user_settings)
    env.update(choice.variables)
    if this_rank.local_rank == 0:
        log.say(this_rank.rank // this_rank.local_world_size, choice.why)


def _settings_to_keep(env: Environ, user_settings: Environ) -> Environ:
    """What the user or the site has set, without the defaults of SageMaker's toolkit."""
    toolkit_defaults = {"NCCL_DEBUG"} if "SM_HOSTS" in env else set()
    kept = {name: value for name, value in env.items() if name not in toolkit_defaults}
    return kept | user_settings


def _preflight(env: Environ, this_rank: cluster.Rank, key: bytes) -> None:
    """Test the network below SageMaker's launchers: one rank per node tests for all of them.

    The others wait where the ranks meet. `key` is the secret that the nodes share.
    """
    if "SM_HOSTS" not in env or this_rank.local_rank:
        return
    here = cluster.find(env)
    if len(here.hosts) * this_rank.local_world_size != this_rank.world_size:
        return  # only one instance group trains
    route = interfaces.route_to_any(addresses.peer_addresses(here)) if here.peer else None
    local, port = route.source if route else "", int(env["MASTER_PORT"]) + 1
    meeting = rendezvous.below_launcher(env, here, local, port, key)
    from deploykit_node.preflight import coordinator  # asyncio takes a while to load

    coordinator.run(here, meeting, env, this_rank.local_world_size)
