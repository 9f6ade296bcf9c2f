"""Start one of the node plane's programs. Every backend starts this file on every node.

    python .deploykit/launch.py torchrun --nnodes=2 --nproc-per-node=2 -- train.py ARGS...
    python .deploykit/launch.py torchrun --nnodes=2 --nproc-per-node=2 -- -m package.module ARGS...

Without a launcher above, this process is the node's (`deploykit_node.node`). Below one
(SageMaker's toolkit, mpirun) it is a rank. One file has to decide, because
SageMaker's toolkit takes one file name and starts it once per node or once per rank.

The node plane starts its other programs through this file too, so that none of its module names is
at the top of `sys.path`, where it could hide another module:

    launch.py --emulated-nodes --nodes=N --time-limit=SECONDS torchrun ...
    launch.py --torchrun TORCHRUN_OPTIONS... python -S launch.py --rank PROGRAM ARGS...
    launch.py --preflight-ranks SOCKET
    launch.py --keep-outputs NODE
    launch.py --keep-checkpoints NODE NODES
    launch.py --dump-stacks RUN_FOLDER FOLDER [--native] [--py-spy PATH]
    launch.py --enter RUN_FOLDER RANK -- [COMMAND ARGS...]
    launch.py --notify

From here to the first rank, in the order in which a node gets there:

 1. `launch.main`: which program is it?
 2. `launch._launch`: a node's launcher, or a rank?
 3. `node.run`: the node's launcher.
 4. `source_hash.check`: is the source the planned one?
 5. `node._run_node`: whatever happens, it leaves an exit record.
 6. `command.read`: torchrun's options, the program and its arguments.
 7. `cluster.find`: which node of which cluster is this?
 8. `restart.attempt.Attempt.begin`: may this attempt start?
 9. `node._run_torchrun`: prepares the node.
10. `environment.prepare`: the settings of the job, secrets, folders.
11. `staging.run`: copies the data of channels with `stage`.
12. `node._run_group`: with a fixed set of nodes, so once for each with ``nodes: 2:4``.
13. `node._connect`: joins the other nodes.
14. `network.interfaces.choose`: the interface that leads to them.
15. `network.rendezvous.meet`: an address and a port on node 0.
16. `nccl.set_variables`: for NCCL, PyTorch and libfabric.
17. `preflight.coordinator.run`: tests the nodes, where the job asks for it.
18. `outputs.around`: brings back files of an earlier attempt.
19. `relay.Relay.copying`: a thread that copies what the ranks print.
20. `node._supervision`: what is looked at while they run.
21. `supervisor.run`: starts torchrun, and delivers signals until it ends.
22. `network.elastic.main`: in torchrun's process.
23. `network.elastic.FixedNodes.next_rendezvous`: waits for all nodes.
24. `rank.run`: in the process that torchrun starts for each rank; it forks.
25. `rank._become`: the child prepares the program.
26. `relay.hand_over`: its output goes to the thread of step 19. Then it is the program.

Exit codes: the program's own (128 + signal), among them 75 for a program that was told to stop and
saved a checkpoint; 64 for a wrong command; 78 for an environment in which the job cannot run; 70
for a bug in the launcher.
"""

import os
import sys

# Python 2.7 must be able to parse this file, to print that it is too old: so types are comments.


def main(argv, environ):
    # type: (list[str], dict[str, str]) -> None
    """Run the program that the first argument, or else the environment, selects."""
    program, rest = "".join(argv[:1]), argv[1:]
    if program == "--emulated-nodes":
        from deploykit_node import emulated_nodes

        sys.exit(emulated_nodes.main(rest))
    elif program == "--torchrun":
        from deploykit_node.network import elastic

        elastic.main(rest)
    elif program == "--preflight-ranks":
        from deploykit_node.preflight import members

        members.main(rest)
    elif program == "--keep-outputs":
        from deploykit_node import outputs

        outputs.keep(rest, environ)
    elif program == "--keep-checkpoints":
        from deploykit_node.restart import checkpoint_keeper

        sys.exit(checkpoint_keeper.main(rest, environ))
    elif program == "--dump-stacks":
        from deploykit_node.observe import stacks

        stacks.main(rest)
    elif program == "--enter":
        from deploykit_node.observe import enter

        enter.main(rest, environ)
    elif program == "--notify":
        from deploykit_node import notify

        notify.main(environ)
    else:
        _launch(argv, environ)


def _launch(argv, environ):
    # type: (list[str], dict[str, str]) -> None
    """Run as a node's launcher or as a rank, and end as the program ended."""
    try:
        if argv[:1] == ["--rank"]:
            from deploykit_node import rank

            rank.run(argv[1:], environ)
        else:
            from deploykit_node import cluster, node, signals

            signals.ignore_notices()
            below_launcher = cluster.rank(environ) is not None
            (node.run_rank if below_launcher else node.run)(argv, environ)
    except Exception as error:
        from deploykit_node import cluster, log  # late, as the process above a rank is small

        if not isinstance(error, cluster.LaunchError):
            raise
        log.say(cluster.node_number(environ), "error: {}".format(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - the node's Python is the user's choice
        _version = ".".join(map(str, sys.version_info[:3]))
        _message = (
            "deploykit: the job cannot start: {} is Python {}; deploykit requires 3.10 or later"
        )
        sys.stderr.write(_message.format(sys.executable, _version) + "\n")
        sys.exit(78)
    _folder = os.path.dirname(os.path.realpath(__file__))
    if _folder not in sys.path:  # PYTHONSAFEPATH is set
        sys.path.insert(0, _folder)
    main(sys.argv[1:], dict(os.environ))
