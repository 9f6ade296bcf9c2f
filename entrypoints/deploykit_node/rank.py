"""One rank of the job below our own torchrun: start the user's program, and record its exit.

The node is prepared, and its launcher relays the output. This process forks: the child prepares
and becomes the program. The parent forwards signals until the program has ended. There is one for
each GPU, so what it imports is small (`signals`); the child imports what it likes.
"""

from __future__ import annotations

import os

from deploykit_node import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from typing import NoReturn

    from deploykit_node import cluster, records
    from deploykit_node.environment import Environ
else:
    import _signal as signal  # as `signals` has it

PLAIN = "DEPLOYKIT_PLAIN"
"""Variable that marks a plain program, of whose environment torchrun's variables are taken out."""


def run(program: Sequence[str], env: Environ) -> None:
    """Run the program below our own torchrun, whose node is prepared. Does not return.

    Raises LaunchError in the child, or if Nsight Systems is asked for and does not start.
    """
    signals.ignore_notices()
    if env.get("DEPLOYKIT_PROFILE", "").startswith("nsys"):
        from deploykit_node.observe import nsys

        nsys.around(program, env, find(env))
    env["TORCHELASTIC_RESTART_COUNT"] = env.pop("DEPLOYKIT_ROUND")
    before = signals.hold([*signals.FORWARDED, signal.SIGCHLD])
    parent, (started, starting) = os.getpid(), os.pipe()
    child = os.fork()
    if not child:
        # SIGTERM is blocked by torchrun
        signals.child_setup(before - {signal.SIGTERM}, signal.SIGKILL, parent)()
        _become(program, env)
    os.close(starting)
    os.read(started, 1)  # until the child has become the program, which closes the other end
    returncode, stopped = signals.attend(child)
    from deploykit_node import records

    record = records.record_rank(env, find(env), returncode, stopped=stopped)
    if records.went_wrong(record):
        _record_failure(env, record)
    # a non-zero code would make torchrun stop ranks that are still saving, or restart them
    signals.exit_like(0 if returncode == records.STOPPED else returncode)


def _record_failure(env: Environ, record: records.RankRecord) -> None:
    """Record why this rank failed, for the decision whether it starts again."""
    from pathlib import Path

    from deploykit_node import relay
    from deploykit_node.restart import decision

    folder = Path(env["DEPLOYKIT_RANK_DIR"])
    decision.record_failure(env, folder, record, relay.last_output(folder, record["rank"]))


def _become(program: Sequence[str], env: Environ) -> NoReturn:
    """Prepare the program of this rank, and become it."""
    from pathlib import Path

    from deploykit_node import records, relay
    from deploykit_node.observe import hooks, processes

    this_rank, folder = find(env), Path(env.pop("DEPLOYKIT_RANK_DIR"))
    records.register(env, folder, this_rank.rank, os.getppid())
    set_variables(env, this_rank)
    hooked, stacks = hooks.environment(env, folder, this_rank.rank)
    processes.register(env, this_rank, os.getpid(), stacks=stacks)
    (output, own_output), (errors, own_errors) = os.pipe(), os.pipe()
    relay.hand_over((output, errors), folder, this_rank.rank)
    os.dup2(own_output, 1)
    os.dup2(own_errors, 2)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
        signal.signal(number, signal.SIG_DFL)
    argv = relay.command(program)
    os.execve(argv[0], argv, _without_torchrun(hooked))  # noqa: S606 - no shell is the point


def find(env: Environ) -> cluster.Rank:
    """The rank of this process, set by the launcher above. Raises BadEnvironment without one."""
    from deploykit_node import cluster

    this_rank = cluster.rank(env)
    if this_rank is None:
        raise cluster.BadEnvironment(
            "RANK is not set. Start the job with `launch.py torchrun ...`."
        )
    return this_rank


def set_variables(env: Environ, this_rank: cluster.Rank) -> None:
    """Set what the program reads of its rank, under torchrun's names."""
    from deploykit_node import records

    env.update(this_rank.variables())
    env["DEPLOYKIT_RESTART_COUNT"] = str(records.restarts(env))
    env.setdefault("PYTHONUNBUFFERED", "1")


def _without_torchrun(env: Environ) -> Environ:
    """The environment of the program: of a plain one without torchrun's variables."""
    if PLAIN not in env:
        return env
    import re

    of_torchrun = f"{PLAIN}|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$"
    return {name: value for name, value in env.items() if not re.match(of_torchrun, name)}
