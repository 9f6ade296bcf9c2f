"""Start the job on this node, or one rank of it. The same file on every backend.

    python .deploykit/launch.py torchrun --nnodes=2 --nproc-per-node=2 -- train.py ARGS...
    python .deploykit/launch.py torchrun --nnodes=2 --nproc-per-node=2 -- -m package.module ARGS...

Without a launcher above, this process is the node's: it finds the other nodes, chooses the
network, resolves secrets and starts torchrun, which starts this file once more for each rank.
Below a launcher (torchrun, SageMaker's toolkit, mpirun) it is a rank and runs the program.

Exit codes: the program's own (128 + signal), among them 75 for one that was told to stop and has
saved a checkpoint; 64 for a wrong command; 78 for an environment in which the job cannot run; 70
for a fault in here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import agent
import cluster
import command
import ends
import network
import private
import rendezvous
import secret_refs
import settings
import signals
import source_hash
import worker
from cluster import BadEnvironment
from command import Command
from ends import STOPPED, Node
from survival import Survival

Environ = dict[str, str]


def main(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run as a node or as a rank, and end the process as the program ended."""
    signals.ignore_notices()
    env = dict(environ)
    try:
        key = source_hash.check(env)
        me = cluster.rank(env)
        if me is None and cluster.aside(env):
            worker.leave(_aside(command.read(argv, env), env))
        if me is None:
            sys.exit(_node(argv, env))
        worker.leave(_rank(command.read(argv, env), env, me, key))
    except cluster.LaunchError as error:
        _say(cluster.node_number(env), f"error: {error}")
        sys.exit(error.exit_code)


def _node(argv: Sequence[str], env: Environ) -> int:
    """Run torchrun on this node. Whatever happens, leave an end file where there is a place."""
    number, end = cluster.node_number(env), Node(70, "")
    try:
        ends.clear(env, number)
        here = cluster.find(env)
        number = here.node
        life = Survival(env, here, lambda text: _say(number, text))
        end = life.begin() or life.settle(_torchrun(command.read(argv, env), env, here, life))
        if end.code:
            _say(number, end.reason)
    except cluster.LaunchError as error:
        end = Node(error.exit_code, str(error))
        _say(number, f"error: {error}")
    except Exception as error:  # noqa: BLE001 - the last line of defence on a node
        end = Node(70, f"launch.py itself failed: {error!r}; the node's log says where")
        traceback.print_exc()
    ends.record_node(env, number, end)
    return end.code


def _torchrun(words: Command, env: Environ, here: cluster.Cluster, life: Survival) -> Node:
    """Prepare this node, run torchrun, and say how it ended."""
    words.check_nodes(here)
    _check_torch()
    _prepare(env)
    meeting = _connect(env, here)
    _set(env, env, here.node)
    _preflight(env, here, meeting, words.processes())
    workers = Path(tempfile.mkdtemp(prefix="deploykit-"))
    env["DEPLOYKIT_WORKERS"] = str(workers)
    env.setdefault("OMP_NUM_THREADS", "1")
    elastic = str(Path(__file__).with_name("elastic.py"))
    torchrun = [sys.executable, elastic, *words.options, *meeting.options()]
    argv = [*torchrun, __file__, "--", *words.program]
    life.shine(meeting.local)
    try:
        orders = agent.Orders(_grace(env), lambda text: _say(here.node, text), life.hear)
        code = agent.run(argv, env, workers, orders, meeting.held)
        return _verdict(code, env, workers)
    finally:
        shutil.rmtree(workers, ignore_errors=True)


def _verdict(returncode: int, env: Environ, workers: Path) -> Node:
    """The end of the rank that failed first, on this node or, where it can be seen, another."""
    if returncode == 0 or ends.all_well(workers):  # a signal to torchrun is no fault of theirs
        rank = ends.first_stopped(workers)
        if rank is None:
            return Node(0, "every rank ended well")
        return Node(STOPPED, f"rank {rank} {ends.how(STOPPED)}", rank)
    attempt = ends.attempt(env)
    failed = ends.failures(ends.run_folder(env), attempt) or ends.failures(workers, attempt)
    if failed:
        first = failed[0]
        return Node(first["exit_code"], ends.sentence(first), first["rank"], first["stopped"])
    vanished = sorted(ends.living(workers))
    if vanished and returncode > 0:
        return Node(137, f"rank {vanished[0]} disappeared, as after SIGKILL", vanished[0])
    code = ends.shell_code(returncode)
    return Node(code, f"torchrun {ends.how(code)}, and no rank had failed")


def _rank(words: Command, env: Environ, me: cluster.Rank, key: bytes) -> worker.End:
    """Run the program as one rank. Below our own torchrun the node has been prepared.

    `key` is what the machines of SageMaker share.
    """
    workers = env.pop("DEPLOYKIT_WORKERS", None)
    if workers:
        env["TORCHELASTIC_RESTART_COUNT"] = env.pop("DEPLOYKIT_ROUND")
        ends.register(env, Path(workers), me.rank)
    else:
        words.check_world(me)
        chosen = _prepare(env)
        _choose_network(env, me, chosen)
        _set(env, _own(env, chosen), me.rank)
    env.update(me.variables())
    _check_master(env, me)
    if not workers and env.get("DEPLOYKIT_PREFLIGHT"):
        _preflight_below(env, me, key)
    env["DEPLOYKIT_RESTART_COUNT"] = str(ends.restarts(env))
    env.setdefault("PYTHONUNBUFFERED", "1")
    end = worker.run(worker.command(words.program), env, f"[rank {me.rank}]")
    seen = {**env, "DEPLOYKIT_WORKERS": workers} if workers else env
    ends.record_rank(seen, me, end.returncode, stopped=end.stopped)
    if workers and end.returncode == STOPPED:
        # to torchrun a good end, or it would stop ranks that still save, or start them again
        return worker.End(0, end.stopped)
    return end


def _aside(words: Command, env: Environ) -> worker.End:
    """Run the program once, without a rank, on a machine of a group that does not train."""
    _prepare(env)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return worker.run(worker.command(words.program), env, f"[group {cluster.aside(env)}]")


def _prepare(env: Environ) -> Environ:
    """Settings, secrets and folders of the plan. Returns what the user had set."""
    chosen = _restore(env)
    env.update(secret_refs.resolve(env))
    env.pop(secret_refs.VARIABLE, None)
    for name in ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR"):
        _make_folder(name, env.get(name, ""))
    return chosen


def _restore(env: Environ) -> Environ:
    """Put the user's settings back that SageMaker's toolkit has overwritten on the way."""
    chosen: Environ = json.loads(env.pop("DEPLOYKIT_ENV", "{}"))
    env.update(chosen)
    return chosen


def _make_folder(name: str, place: str) -> None:
    if not place or "://" in place:
        return
    try:
        private.folder(Path(place))
    except OSError as error:
        raise BadEnvironment(
            f"{name} is {place}, which cannot be made a folder here ({error.strerror}). "
            "Choose a place in the job file that this node may write to."
        ) from None


def _connect(env: Environ, here: cluster.Cluster) -> rendezvous.Rendezvous:
    """Find the way to the other nodes; on several nodes, choose the interface."""
    if here.peer is None:
        env.update(network.loopback(env))
        return rendezvous.alone(env)
    way = _way(here.peer, rendezvous.peer_addresses(here))
    choice = network.choose(way, env)
    env.update(choice.variables)
    _say(here.node, choice.why)
    found = rendezvous.meet(here, env, way.source)
    place = f"node {here.node} of {len(here.hosts)} ({here.launcher})"
    _say(here.node, f"{place} meets the others at {found.host} port {found.port}")
    return found


def _way(peer: str, addresses: Sequence[str]) -> network.Route:
    """The route to the node `peer` by the best of its addresses."""
    way = network.route_to_any(addresses)
    if way is None:
        raise BadEnvironment(
            f"There is no route from this node to {peer} ({', '.join(addresses)}), which is in the "
            "same job. Check that the nodes share a network and that its interface is up."
        )
    if way.source == way.peer and not rendezvous.is_loopback(way.peer):
        raise BadEnvironment(
            f"The host name {peer} means {way.peer} here, which is this machine's own address on "
            f"{way.interface}. Give {peer} its own address in /etc/hosts or DNS."
        )
    return way


def _preflight(
    env: Environ, here: cluster.Cluster, meeting: rendezvous.Rendezvous, ranks: int
) -> None:
    """Test the network where the job asks for it."""
    if not env.get("DEPLOYKIT_PREFLIGHT"):
        return
    import preflight  # asyncio takes a while to load

    preflight.run(preflight.course(here, meeting), env, ranks, lambda text: _say(here.node, text))


def _choose_network(env: Environ, me: cluster.Rank, chosen: Environ) -> None:
    """Below SageMaker's launchers: what they set is a constant, so look for the route here."""
    hosts = cluster.sagemaker_hosts(env) if "SM_HOSTS" in env else ()
    if len(hosts) < 2:  # noqa: PLR2004 - a network has two ends
        return
    try:
        way = network.route_to_any(rendezvous.address(host) for host in hosts)
    except BadEnvironment:  # the launcher above has met all the same
        way = None
    choice = network.choose(way, chosen)
    env.update(choice.variables)
    if me.local_rank == 0:
        _say(me.rank // me.local_world_size, choice.why)


def _preflight_below(env: Environ, me: cluster.Rank, key: bytes) -> None:
    """Below SageMaker's launchers: the first rank of each machine tests.

    The others wait for it where the ranks meet.
    """
    if "SM_HOSTS" not in env or me.local_rank:
        return
    here = cluster.find(env)
    if len(here.hosts) * me.local_world_size != me.world_size:
        return  # only a group of the machines trains
    way = network.route_to_any(rendezvous.peer_addresses(here)) if here.peer else None
    local, port = way.source if way else "", int(env["MASTER_PORT"]) + 1
    meeting = rendezvous.below(env, here, local, port, key)
    _preflight(env, here, meeting, me.local_world_size)


def _own(env: Environ, chosen: Environ) -> Environ:
    """What the user or the site has set, without what SageMaker's toolkit puts in its place."""
    toolkit = {"NCCL_DEBUG"} if "SM_HOSTS" in env else set()
    return {name: value for name, value in env.items() if name not in toolkit} | chosen


def _set(env: Environ, chosen: Environ, number: int) -> None:
    """Variables for NCCL and PyTorch, but those that were `chosen`. The first of all says which."""
    found = settings.choose(settings.machine(), env, chosen)
    if found:
        settings.prepare(env)
    for name, value, why in found:
        env[name] = value
        if number == 0:
            _say(0, f"setting {name}={value}: {why}")


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise BadEnvironment(
            f"PyTorch is not installed for {sys.executable} on this node. "
            "Install it there, or choose the Python of an environment that has it."
        )


def _check_master(env: Environ, me: cluster.Rank) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise BadEnvironment(
            f"{me.launcher} started this rank without {' and '.join(missing)}, so the ranks cannot "
            "meet. Pass them on, as in: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"
        )


def _grace(env: Environ) -> float | None:
    """Seconds that the ranks have to end, where the user has chosen."""
    text = env.get("DEPLOYKIT_GRACE")
    try:
        return float(text) if text else None
    except ValueError:
        raise BadEnvironment(
            f"DEPLOYKIT_GRACE is {text!r}; it must be a number of seconds."
        ) from None


def _say(node: int, text: str) -> None:
    print(f"{ends.now()} [node {node}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
