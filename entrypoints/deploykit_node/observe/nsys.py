"""A rank below NVIDIA's Nsight Systems (``profile: nsys``), which writes a report of its program.

The process that torchrun has started runs ``nsys profile``, and below it the rank itself
(`deploykit_node.rank`), which starts the program as ever. So nsys stands beside the path of
signals: they go to the rank by the process id that it registers, its exit code is in its record,
and stacks and usage are those of the program. nsys itself never sees a signal to stop, at which it
would drop its report and end the program.
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploykit_node import LAUNCH, cluster, log, records, signals
from deploykit_node.cluster import BadEnvironment
from deploykit_node.environment import Environ
from deploykit_node.observe import hooks, processes

BELOW = "DEPLOYKIT_BELOW_NSYS"
"""Variable of a rank below nsys: the process id of the one above."""
_OPTIONS = (
    "--trace=cuda,nvtx,osrt",
    "--sample=none",  # needs perf_event_paranoid <= 2, which containers seldom have
    "--cpuctxsw=none",  # as above
    "--kill=none",  # the program goes on when nsys has seen enough
    "--wait=primary",  # nsys does not wait for what the program leaves behind
    "--force-overwrite=true",
)
_STEPS = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")
_NEVER = 70
"""Exit code of a rank that nsys has not started."""
_TICK = 0.5
"""Seconds between two looks at processes of which this one is no parent."""


def check(env: Mapping[str, str], *, launcher: str = "") -> None:
    """Raise BadEnvironment where the job asks for nsys, and it cannot be started.

    `launcher` is the one above, where that is not deploykit's.
    """
    if not env.get("DEPLOYKIT_PROFILE", "").startswith("nsys"):
        return
    other = "choose torch:FIRST:LAST, PyTorch's own profiler"
    if launcher:
        raise BadEnvironment(
            f"profile: nsys requires ranks started by deploykit, not by {launcher}; {other}."
        )
    if _program(env) is None:
        raise BadEnvironment(
            "profile: nsys is not on the PATH of this node. Load the Nsight Systems or "
            f"CUDA toolkit module, or {other}."
        )


def _program(env: Mapping[str, str]) -> str | None:
    return shutil.which("nsys", path=env.get("PATH"))


def around(program: Sequence[str], env: Environ, rank: cluster.Rank) -> None:
    """Run this rank below nsys, and do not return; return where it is there already.

    It also returns where the rank has its report, of an earlier attempt, and where none can be
    kept. Raises BadEnvironment if nsys cannot be started.
    """
    file = hooks.profile(env, f"rank-{rank.rank}{hooks.REPORT}")
    if BELOW in env:
        _settle(env)
    elif file is not None and not file.exists():
        code = _Session(env, rank, file).run(program)
        signals.exit_like(code)


def _settle(env: Environ) -> None:
    """Settle below nsys: lead a process group, as every rank, and end with the process above."""
    above = int(env.pop(BELOW))
    with contextlib.suppress(PermissionError):  # nsys has made it a leader
        os.setpgid(0, 0)
    signals.start_thread(_end_with, above)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGHUP])


def _end_with(above: int) -> None:
    """Kill this process group once a process is gone; nsys may end before, and is no sign."""
    while _lives(above):
        time.sleep(_TICK)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _lives(pid: int) -> bool:
    stat = processes.stat(pid)
    return stat is not None and stat.state not in "ZX"


class _Session:
    """One ``nsys profile`` with a rank below it, seen from above."""

    def __init__(self, env: Environ, rank: cluster.Rank, file: Path) -> None:
        self._env, self._rank, self._number, self._file = env, rank, rank.rank, file
        self._ranks = Path(env["DEPLOYKIT_RANK_DIR"])
        self._early: list[int] = []
        """Signals that came before the rank had registered."""

    def run(self, program: Sequence[str]) -> int:
        """Run the program; the code with which its rank has exited."""
        count = {"TORCHELASTIC_RESTART_COUNT": self._env["DEPLOYKIT_ROUND"]}
        records.register({**self._env, **count}, self._ranks, self._number, os.getpid())
        with records.writing(self._ranks, f"rank-{self._number}"):
            child = self._start(program)
            while child.poll() is None or self._living():
                received = signals.wait([*signals.FORWARDED, signal.SIGCHLD], _TICK)
                if received and received.number != signal.SIGCHLD:
                    self._early.append(received.number)
                self._forward()
        if records.living(self._ranks).get(self._number) == os.getpid():  # it never began
            records.record_rank(self._env, self._rank, _NEVER, stopped=False)
        return self._code(child.returncode)

    def _start(self, program: Sequence[str]) -> subprocess.Popen[bytes]:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        steps = _STEPS if ":" in self._env["DEPLOYKIT_PROFILE"] else ()
        output = str(self._file.with_suffix("")).replace("%", "%%")  # nsys adds the suffix
        argv = [_program(self._env) or "nsys", "profile", *_OPTIONS, *steps, f"--output={output}"]
        argv += [sys.executable, LAUNCH, "--rank", *program]
        held = signals.hold([*signals.FORWARDED, signal.SIGCHLD]) | set(signals.STOPS)
        try:
            return subprocess.Popen(
                argv,
                env={**self._env, BELOW: str(os.getpid())},
                preexec_fn=signals.child_setup(held, signal.SIGKILL),  # noqa: PLW1509 - no thread
            )
        except OSError as error:
            raise BadEnvironment(f"nsys cannot be started: {error.strerror}.") from None

    def _living(self) -> int | None:
        """The process of the rank below, once it has registered and until it has ended."""
        pid = records.living(self._ranks).get(self._number)
        return pid if pid is not None and pid != os.getpid() and _lives(pid) else None

    def _forward(self) -> None:
        """Pass on what has come, as torchrun and others signal this process alone."""
        pid = self._living()
        if pid is not None:
            for number in self._early:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._early.clear()

    def _code(self, code: int) -> int:
        """The code of the rank, whatever that of nsys is; and a word about its report."""
        record = records.read(self._ranks / f"rank-{self._number}.json") or {"exit_code": _NEVER}
        if not self._file.exists():
            text = f"no profile: nsys {records.how(signals.shell_code(code))} without a report"
            start = f"{log.now()} [rank {self._number}] deploykit:"
            print(start, text, file=sys.stderr, flush=True)
        return 0 if record["exit_code"] == records.STOPPED else int(record["exit_code"])
