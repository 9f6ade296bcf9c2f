"""One node of the job: join the other nodes, prepare the environment, run torchrun.

torchrun starts one rank per process (`deploykit_node.rank`). Whatever happens, the node leaves an
exit record in the run folder. Below another launcher, SageMaker's toolkit or mpirun, this process
is one rank, and does the same for it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploykit_node import (
    LAUNCH,
    cluster,
    command,
    environment,
    log,
    nccl,
    outputs,
    packages,
    rank,
    records,
    relay,
    signals,
    source_hash,
    staging,
    supervisor,
)
from deploykit_node.cluster import BadEnvironment
from deploykit_node.command import Command
from deploykit_node.environment import Environ
from deploykit_node.network import addresses, gathering, interfaces, rendezvous
from deploykit_node.observe import hooks, nsys, stall, usage
from deploykit_node.records import STOPPED, NodeExit
from deploykit_node.restart import cap, checkpoint_keeper, decision, membership
from deploykit_node.restart.attempt import Attempt


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the command `argv` on this node, and end this process as it ended. Does not return.

    Raises LaunchError if the source is not the planned one.
    """
    source_hash.check(env)
    group = cluster.non_training_group(env)
    if group is not None:
        python, argv = packages.prepare(argv, env)
        signals.exit_like(_run_once(command.read(argv, env), env, group, python))
    sys.exit(_run_node(argv, env))


def _run_once(words: Command, env: Environ, group: str, python: str | None) -> int:
    """Run the program once, without a rank, in an instance group that does not train."""
    environment.prepare(env)
    env.setdefault("PYTHONUNBUFFERED", "1")
    program = relay.command(words.program, python)
    return relay.run(program, env, f"[group {group}]", cap=cap.begin(env, 0))[0]


def _run_node(argv: Sequence[str], env: Environ) -> int:
    """Run torchrun on this node, leave an exit record, and return the exit code."""
    number, attempt, elastic = cluster.node_number(env), None, False
    try:
        python, argv = packages.prepare(argv, env)
        if python is not None:
            os.execve(python, [python, LAUNCH, *argv], env)  # noqa: S606 - no shell is needed
        words = command.read(argv, env)
        elastic = words.elastic
        records.clear(env, number, ranks=not elastic)
        here = cluster.find(env)
        number = here.node
        checkpoint_keeper.choose_folder(env, here)
        attempt = Attempt(env, here)
        end = attempt.begin() or attempt.settle(_run_torchrun(words, env, here, attempt))
        if end.code:
            log.say(number, end.reason)
    except cluster.LaunchError as error:
        end = NodeExit(error.exit_code, str(error))
        log.say(number, f"error: {error}")
    except Exception as error:  # noqa: BLE001 - an exit record must be written in any case
        end = NodeExit(
            70, f"launch.py itself failed: {error!r}; the traceback is in the node's log"
        )
        traceback.print_exc()
    if attempt is None:
        records.record_node(env, number, end)
    else:
        attempt.record(end)
        if not elastic:  # another node may still train
            attempt.notify_end(end)
    if elastic:
        membership.end_job(env, end.code)
    return end.code


def _run_torchrun(
    words: Command, env: Environ, here: cluster.Cluster, attempt: Attempt
) -> NodeExit:
    """Prepare this node, run torchrun, and return how the node ended."""
    words.check_nodes(here)
    _check_torch()
    if here.number == 0:
        packages.record(env)
    environment.prepare(env)
    nsys.check(env)
    hooks.check_debugger(env)
    staging.run(env, here, elastic=words.elastic)
    with checkpoint_keeper.around(env, here, lambda: attempt.stop_signal is not None):
        attempt.note_checkpoints()
        if words.elastic:
            return membership.run(words, env, here, attempt, _run_group)
        return _run_group(words, env, here, attempt)


def _run_group(
    words: Command,
    env: Environ,
    here: cluster.Cluster,
    attempt: Attempt,
    change: Callable[[], int | None] | None = None,
) -> NodeExit:
    """Run torchrun with a fixed set of nodes, and return how this one ended.

    `change` returns a signal to end the ranks with where other nodes are to take part.
    """
    meeting = _connect(words, env, here)
    nccl.set_variables(env, dict(env), here.number)
    if env.get("DEPLOYKIT_PREFLIGHT") and env.get("DEPLOYKIT_GENERATION", "1") == "1":
        from deploykit_node.preflight import coordinator  # asyncio takes a while to load

        coordinator.run(here, meeting, env, words.processes())
    ranks = Path(tempfile.mkdtemp(prefix="deploykit-"))
    env["DEPLOYKIT_RANK_DIR"] = str(ranks)
    if not words.plain:
        env.setdefault("OMP_NUM_THREADS", "1")
    if change is None:
        attempt.start_heartbeat(meeting.local)
    try:
        one = [sys.executable, "-S", LAUNCH, "--rank", *words.program]
        with outputs.around(env, here.number), relay.Relay(env, ranks).copying():
            options = _supervision(env, here, ranks, attempt, change)
            if words.plain:
                plain = {**env, **_plain_variables(meeting)}
                if meeting.held:
                    meeting.held.close()  # the program listens there itself
                code = supervisor.run(one, plain, ranks, options)
                code = signals.shell_code(code)
            else:
                torchrun = [sys.executable, LAUNCH, "--torchrun", *words.options]
                argv = [*torchrun, *meeting.options(), "--no-python", "--", *one]
                code = supervisor.run(argv, env, ranks, options, meeting.held)
        end = _node_exit(code, env, ranks, attempt.stop_signal)
        last = decision.last(env)
        if end.code and last and not last["restart"]:
            end = end._replace(reason=f"{end.reason}; {last['why']}")
        root = attempt.root(ranks) if end.code else None
        return end._replace(ranks=records.codes(ranks), root=root)
    finally:
        shutil.rmtree(ranks, ignore_errors=True)


def _supervision(
    env: Environ,
    here: cluster.Cluster,
    ranks: Path,
    attempt: Attempt,
    change: Callable[[], int | None] | None,
) -> supervisor.Options:
    """How to supervise torchrun; where the run has a folder, the ranks are looked at meanwhile."""
    say, all_ended = partial(log.say, here.number), gathering.gathering(env, "ranks_ended", here)
    options = supervisor.Options(
        _grace(env), say, attempt.on_signal, attempt.cap, attempt.on_cap, all_ended
    )
    if records.folder(env) is None or sys.platform != "linux":
        return options
    watch, recorder = stall.Watch(env, here, ranks, say), usage.Recorder(env, here, ranks)

    def look() -> int | None:
        watch.look()
        recorder.look()
        attempt.notifier.look(here)
        return change() if change else None

    every = min(watch.every, membership.EVERY) if change else watch.every
    return replace(options, look=look, look_every=every, before_stop=watch.stop)


def _plain_variables(meeting: rendezvous.Rendezvous) -> dict[str, str]:
    """What the launcher of a plain program on each node (`launcher: python`) sets.

    Such a program starts its other processes itself. It finds MASTER_ADDR and a MASTER_PORT that is
    free, NODE_RANK and NNODES, and nothing of torchrun, whose TORCHELASTIC_USE_AGENT_STORE would
    make each of its processes a client of a store that nobody serves. For its launcher it is the
    only rank of its node.
    """
    own = cluster.Rank("python", meeting.node, 0, meeting.count, 1).variables()
    return {
        **own,
        "NODE_RANK": str(meeting.node),
        "NNODES": str(meeting.count),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "DEPLOYKIT_ROUND": "0",
        rank.PLAIN: "1",
    }


def _node_exit(returncode: int, env: Environ, ranks: Path, stop: int | None) -> NodeExit:
    """How the node ended: as the rank that failed first, on this node or a visible other one.

    `stop` is the signal to stop that this node has received, if any.
    """
    if returncode == 0 or records.all_ended_well(ranks):  # torchrun may have been signalled
        rank = records.first_stopped(ranks)
        if rank is None:
            return NodeExit(0, "every rank exited with code 0")
        return NodeExit(STOPPED, f"rank {rank} {records.how(STOPPED)}", rank)
    first = records.first_failure(env, ranks)
    if first is not None:
        by_torchrun = first["exit_code"] == signals.shell_code(-supervisor.TORCHRUN_STOP)
        if stop is not None and by_torchrun and records.last_round(ranks):
            # torchrun had just restarted the rank that the signal had ended, and then ended it
            first["exit_code"] = signals.shell_code(-stop)
        if stop is not None and first["exit_code"] == signals.shell_code(-stop):
            # Slurm signals the processes one by one: the rank may end before its launcher knows
            first["stopped"] = True
        reason = records.sentence(first)
        return NodeExit(first["exit_code"], reason, first["rank"], first["stopped"])
    vanished = sorted(records.living(ranks))
    if vanished and returncode > 0:
        reason = f"rank {vanished[0]} disappeared, as if killed by SIGKILL"
        return NodeExit(137, reason, vanished[0])
    if stop is not None and not vanished:
        reason = f"{signals.name(stop)} arrived before any rank had started"
        return NodeExit(signals.shell_code(-stop), reason, stopped=True)
    code = signals.shell_code(returncode)
    return NodeExit(code, f"torchrun {records.how(code)}, but no rank had failed")


def _connect(words: Command, env: Environ, here: cluster.Cluster) -> rendezvous.Rendezvous:
    """Join the other nodes; on several nodes, choose the network interface.

    A plain program listens at the port itself.
    """
    if here.peer is None:
        env.update(interfaces.loopback(env))
        return rendezvous.reserved(env) if words.plain else rendezvous.alone(env)
    route = _route_to(here.peer, addresses.peer_addresses(here))
    choice = interfaces.choose(route, env)
    env.update(choice.variables)
    log.say(here.node, f"interfaces: {interfaces.inventory()}")
    log.say(here.node, choice.why)
    if words.plain and here.launcher == "sagemaker":
        meeting = rendezvous.by_name(here, env, route.source)
    else:
        meeting = rendezvous.meet(here, env, route.source)
    node = f"node {here.node} of {len(here.hosts)} ({here.launcher})"
    log.say(here.node, f"{node}: rendezvous at {meeting.host} port {meeting.port}")
    return meeting


def _route_to(peer: str, peer_addresses: Sequence[str]) -> interfaces.Route:
    """The route to the node `peer` by the best of its addresses."""
    route = interfaces.route_to_any(peer_addresses)
    if route is None:
        raise BadEnvironment(
            f"There is no route from this node to {peer} ({', '.join(peer_addresses)}), which is "
            "in the same job. Check that the nodes share a network and that its interface is up."
        )
    if route.source == route.peer and not addresses.is_loopback(route.peer):
        raise BadEnvironment(
            f"The host name {peer} resolves to {route.peer} here, which is this machine's own "
            f"address on {route.interface}. Give {peer} its own address in /etc/hosts or DNS."
        )
    return route


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise BadEnvironment(
            f"PyTorch is not installed for {sys.executable} on this node. "
            "Install it, or choose a Python environment that contains it."
        )


def _grace(env: Environ) -> float | None:
    """Seconds that the ranks have to end after a signal, if the user has set them."""
    text = env.get("DEPLOYKIT_GRACE")
    try:
        return float(text) if text else None
    except ValueError:
        raise BadEnvironment(
            f"DEPLOYKIT_GRACE is {text!r}; it must be a number of seconds."
        ) from None


def run_rank(argv: Sequence[str], env: Environ) -> None:
    """Run the program below another launcher: SageMaker's toolkit or mpirun. Does not return.

    Raises LaunchError if the job cannot run here.
    """
    key = source_hash.check(env)
    python, argv = packages.prepare(argv, env)
    words, this_rank = command.read(argv, env), rank.find(env)
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
        rank.set_variables(env, this_rank)
        program = hooks.profiled(env, this_rank.rank)
        if this_rank.rank == 0:
            log.say(0, packages.sentence(python))
        prefix, limit = f"[rank {this_rank.rank}]", cap.begin(env, this_rank.rank)
        returncode, stopped = relay.run(
            relay.command(words.program, python), program, prefix, limit
        )
    records.record_rank(env, this_rank, returncode, stopped=stopped)
    signals.exit_like(returncode)


def _check_master(env: Environ, this_rank: cluster.Rank) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise BadEnvironment(
            f"{this_rank.launcher} started this rank without {' and '.join(missing)}, so the ranks "
            "cannot find each other. Pass them on, for example: mpirun -x MASTER_ADDR=HOST -x "
            "MASTER_PORT=29500"
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
