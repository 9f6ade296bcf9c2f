"""One node of the job: join the other nodes, prepare the environment, run torchrun.

torchrun starts one rank per process (`deploykit_node.rank`). Whatever happens, the node leaves an
exit record in the run folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploykit_node import (
    LAUNCH,
    cap,
    cluster,
    command,
    environment,
    exit_records,
    log,
    membership,
    one_rank,
    outputs,
    plain,
    records,
    relay,
    signals,
    source_hash,
    supervisor,
)
from deploykit_node.cluster import BadEnvironment
from deploykit_node.command import Command
from deploykit_node.environment import Environ
from deploykit_node.exit_records import STOPPED, NodeExit
from deploykit_node.network import addresses, interfaces, rendezvous
from deploykit_node.observe import hooks, nsys, stall, usage
from deploykit_node.restart.attempt import Attempt


def run(argv: Sequence[str], env: Environ) -> None:
    """Run the command `argv` on this node, and end this process as it ended. Does not return.

    Raises LaunchError if the source is not the planned one.
    """
    source_hash.check(env)
    group = cluster.non_training_group(env)
    if group is not None:
        relay.exit_like(_run_once(command.read(argv, env), env, group))
    sys.exit(_run_node(argv, env))


def _run_once(words: Command, env: Environ, group: str) -> relay.ChildExit:
    """Run the program once, without a rank, in an instance group that does not train."""
    environment.prepare(env)
    env.setdefault("PYTHONUNBUFFERED", "1")
    program = relay.command(words.program)
    return relay.run(program, env, f"[group {group}]", cap=cap.begin(env, 0))


def _run_node(argv: Sequence[str], env: Environ) -> int:
    """Run torchrun on this node, leave an exit record, and return the exit code."""
    number, attempt, elastic = cluster.node_number(env), None, False
    try:
        words = command.read(argv, env)
        elastic = words.elastic
        exit_records.clear(env, number, ranks=not elastic)
        here = cluster.find(env)
        number = here.node
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
        exit_records.record_node(env, number, end)
    else:
        attempt.record(end)
    if elastic:
        membership.end(env, end.code)
    return end.code


def _run_torchrun(
    words: Command, env: Environ, here: cluster.Cluster, attempt: Attempt
) -> NodeExit:
    """Prepare this node, run torchrun, and return how the node ended."""
    words.check_nodes(here)
    _check_torch()
    environment.prepare(env)
    nsys.check(env)
    hooks.check_debugger(env)
    if words.elastic:
        from deploykit_node import generations  # few jobs are

        return generations.run(words, env, here, attempt, _run_group)
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
    environment.set_nccl_env(env, dict(env), here.number)
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
        observers = _observers(env, here, ranks)
        launch = _own_copy(ranks) if len(here.hosts) > 1 else LAUNCH
        with outputs.around(env, here.number), _starter(words, env, meeting, launch) as start:
            options = _supervision(env, here, attempt, observers, change)
            code = supervisor.run(start, env, ranks, options)
        end = _node_exit(code, env, ranks, attempt.stop_signal)
        return end._replace(ranks=exit_records.codes(ranks))
    finally:
        shutil.rmtree(ranks, ignore_errors=True)


def _observers(
    env: Environ, here: cluster.Cluster, ranks: Path
) -> tuple[stall.Watch, usage.Recorder] | None:
    """The stall rule and the record of what the ranks use, where the run has a folder."""
    if records.folder(env) is None or sys.platform != "linux":
        return None
    watch = stall.Watch(env, here, ranks, partial(log.say, here.number))
    return watch, usage.Recorder(env, here, ranks)


def _supervision(
    env: Environ,
    here: cluster.Cluster,
    attempt: Attempt,
    observers: tuple[stall.Watch, usage.Recorder] | None,
    change: Callable[[], int | None] | None,
) -> supervisor.Options:
    """How to supervise torchrun, with those who look at the ranks meanwhile."""
    say, all_ended = partial(log.say, here.number), exit_records.gathering(env, "ranks_ended", here)
    options = supervisor.Options(
        _grace(env), say, attempt.on_signal, attempt.cap, attempt.on_cap, all_ended
    )
    if observers is None:
        return options
    watch, recorder = observers

    def look() -> int | None:
        watch.look()
        recorder.look()
        return change() if change else None

    every = min(watch.every, membership.EVERY) if change else watch.every
    return replace(options, look=look, look_every=every)


def _own_copy(folder: Path) -> str:
    """A copy of the node plane for torchrun and the ranks of this node.

    Each of these processes would look for a hundred files in the folder that all nodes share.
    """
    package, copy = Path(__file__).parent, folder / "node_plane"
    try:
        shutil.copytree(package, copy / package.name)
        return str(shutil.copy2(LAUNCH, copy))
    except OSError:  # such as a full disk
        return LAUNCH


@contextlib.contextmanager
def _starter(
    words: Command, env: Environ, meeting: rendezvous.Rendezvous, launch: str
) -> Iterator[supervisor.Start]:
    """How to start the ranks: with torchrun, or the only one of the job or the node without."""
    if words.plain:
        own = plain.variables(meeting.node, meeting.count, meeting.host, meeting.port)
        release = meeting.held.close if meeting.held else lambda: None
        yield partial(one_rank.start, words, {**env, **own}, release)
        return
    if not one_rank.is_one(words):
        yield supervisor.torchrun(_torchrun_argv(words, meeting, launch), env, meeting.held)
        return
    with contextlib.closing(one_rank.Store()) as store:
        own = {**env, **store.variables(meeting.name), "DEPLOYKIT_ROUND": "0"}
        own.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        yield partial(one_rank.start, words, own, store.serve)


def _torchrun_argv(words: Command, meeting: rendezvous.Rendezvous, launch: str) -> list[str]:
    torchrun = [sys.executable, launch, "--torchrun", *words.options, *meeting.options()]
    return [*torchrun, launch, "--rank", "--", *words.program]


def _node_exit(returncode: int, env: Environ, ranks: Path, stop: int | None) -> NodeExit:
    """How the node ended: as the rank that failed first, on this node or a visible other one.

    `stop` is the signal to stop that this node has received, if any.
    """
    if returncode == 0 or exit_records.all_ended_well(ranks):  # torchrun may have been signalled
        rank = exit_records.first_stopped(ranks)
        if rank is None:
            return NodeExit(0, "every rank exited with code 0")
        return NodeExit(STOPPED, f"rank {rank} {exit_records.how(STOPPED)}", rank)
    first = exit_records.first_failure(env, ranks)
    if first is not None:
        by_torchrun = first["exit_code"] == signals.shell_code(-supervisor.TORCHRUN_STOP)
        if stop is not None and by_torchrun and exit_records.last_round(ranks):
            # torchrun had just restarted the rank that the signal had ended, and then ended it
            first["exit_code"] = signals.shell_code(-stop)
        reason = exit_records.sentence(first)
        return NodeExit(first["exit_code"], reason, first["rank"], first["stopped"])
    vanished = sorted(exit_records.living(ranks))
    if vanished and returncode > 0:
        return NodeExit(137, f"rank {vanished[0]} disappeared, as after SIGKILL", vanished[0])
    if stop is not None and not vanished:
        reason = f"{signals.name(stop)} arrived before any rank had started"
        return NodeExit(signals.shell_code(-stop), reason, stopped=True)
    code = signals.shell_code(returncode)
    return NodeExit(code, f"torchrun {exit_records.how(code)}, and no rank had failed")


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
            "Install it there, or choose the Python of an environment that has it."
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
