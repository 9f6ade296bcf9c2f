"""One rank below another launcher than ours: SageMaker's toolkit, or mpirun.

It does what the node's launcher does below our own torchrun.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploykit_node import (
    cap,
    cluster,
    command,
    environment,
    exit_records,
    log,
    outputs,
    rank,
    relay,
    source_hash,
)
from deploykit_node.cluster import BadEnvironment
from deploykit_node.environment import Environ
from deploykit_node.network import addresses, interfaces, rendezvous
from deploykit_node.observe import nsys


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the program below another launcher: SageMaker's toolkit or mpirun. Does not return.

    Raises LaunchError if the job cannot run here.
    """
    key = source_hash.check(env)
    words, this_rank = command.read(argv, env), rank.find(env)
    words.check_world(this_rank)
    user_settings = environment.prepare(env)
    nsys.check(env, launcher=this_rank.launcher)
    _choose_interface(env, this_rank, user_settings)
    environment.set_nccl_env(env, _settings_to_keep(env, user_settings), this_rank.rank)
    _check_master(env, this_rank)
    if env.get("DEPLOYKIT_PREFLIGHT"):
        _preflight(env, this_rank, key)
    machine = this_rank.rank // this_rank.local_world_size
    with outputs.around(env, machine, this_rank.local_rank):
        child = rank.run_program(words, env, this_rank, cap.begin(env, this_rank.rank))
    exit_records.record_rank(env, this_rank, child.returncode, stopped=child.stopped)
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
