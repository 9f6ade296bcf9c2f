"""Many jobs on one real cluster, to each of which something happens, watched all the time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from slurm_helpers import cluster_command, output, wait_for
from survivor import AT

from deploykit import lifecycle, runs

PATIENCE = 900
FINAL = ("succeeded", "failed", "cancelled")
STEPS = 60
SURVIVOR = Path(__file__).with_name("survivor.py")
JOB = f"""\
name: survivor
entrypoint: {{script: survivor.py, args: ["{STEPS}", hold]}}
resources: {{time_limit: 2h, memory: 4GiB}}
slurm: {{exclusive: true, python: {sys.executable}}}
"""


@dataclass
class Watched:
    """A run, and what its status was over time."""

    run: str
    seen: list = field(default_factory=list)
    """(state, reason), each time they changed."""

    @property
    def folder(self):
        return Path(os.environ["DEPLOYKIT_HOME"], "runs", self.run)

    @property
    def job(self):
        return str((self.folder / "claim").readlink())

    @property
    def steps(self):
        """What rank 0 did, in order: restart, step, loss."""
        path = self.folder / "output" / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    @property
    def lost(self):
        """How many steps were done more than once."""
        return len(self.steps) - len({line["step"] for line in self.steps})

    @property
    def restarts(self):
        """The reasons in order, as the nodes wrote them down."""
        files = sorted((self.folder / "ends").glob("restart-*.json"))
        return [json.loads(path.read_text())["why"] for path in files]

    @property
    def nodes(self):
        """The nodes that it runs on now, the one of its batch script first."""
        shown = output("squeue", "--noheader", "--format=%N", f"--jobs={self.job}").strip()
        return output("scontrol", "show", "hostnames", shown).split()

    @property
    def states(self):
        """The states that `status` went through."""
        return [state for state, _ in itertools.groupby(state for state, _ in self.seen)]

    def said(self, state):
        """All that `status` said while it was in that state."""
        return " | ".join(reason for seen, reason in self.seen if seen == state)

    @property
    def log(self):
        return "".join(path.read_text() for path in sorted((self.folder / "logs").iterdir()))

    def in_mid_run(self):
        wait_for(lambda: self.steps and self.steps[-1]["step"] >= AT, PATIENCE)

    def ended(self):
        wait_for(lambda: self.seen and self.seen[-1][0] in FINAL, PATIENCE)


def deploykit(*words):
    """Run a command to its end: its exit code, and all that it printed."""
    argv = [sys.executable, "-m", "deploykit", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout + done.stderr


def submit(run, *settings):
    """Submit one through the command line."""
    words = [word for setting in settings for word in ("--set", setting)]
    code, said = deploykit("submit", "--backend", "slurm", "--run", run, *words)
    assert code == 0, said
    return Watched(run)


@contextlib.contextmanager
def following(run, log):
    """Follow the logs of a run into the file `log` meanwhile, to their end."""
    argv = [sys.executable, "-m", "deploykit", "logs", "--follow", run]
    with log.open("w") as file, subprocess.Popen(argv, stdout=file) as process:
        try:
            yield
            process.wait(PATIENCE)
        finally:
            process.kill()


class Watch(threading.Thread):
    """Ask for the status of all runs again and again, and keep what changes."""

    def __init__(self, jobs):
        super().__init__(daemon=True)
        self.jobs = jobs
        self.over = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def run(self):
        while not self.over.wait(0.3):
            every = list(self.jobs.values())
            rows = lifecycle.refresh([runs.get(job.run) for job in every])
            for job, row in zip(every, rows, strict=True):
                if not job.seen or job.seen[-1] != (row.state, row.reason):
                    job.seen.append((row.state, row.reason))


@contextlib.contextmanager
def big_cluster(nodes):
    """A cluster that ends jobs which use more memory than they asked for, in a short path.

    Many processes share few cores here, so it waits longer for them than the usual one.
    """
    box = Path(tempfile.mkdtemp(prefix="box-"))
    try:
        done = cluster_command("start", box, "--nodes", nodes)
        assert done.returncode == 0, done.stderr
        with (box / "slurm.conf").open("a") as conf:
            conf.write("JobAcctGatherParams=OverMemoryKill\nKillWait=15\n")
        argv = ["scontrol", "reconfigure"]
        subprocess.run(argv, env={**os.environ, "SLURM_CONF": f"{box}/slurm.conf"}, check=True)
        yield box
    finally:
        cluster_command("stop", box)
        shutil.rmtree(box, ignore_errors=True)


@contextlib.contextmanager
def another_controller(box):
    """End the controller, and start it again with the state that it has kept."""
    pid = daemon(box, "slurmctld")
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not running(pid))
    argv = ["/usr/sbin/slurmctld", "-D", "-f", str(box / "slurm.conf")]
    with (
        (box / "log" / "again.out").open("w") as log,
        subprocess.Popen(argv, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(lambda: subprocess.run(["squeue"], check=False, stdout=log).returncode == 0)
            yield
        finally:
            process.kill()


def running(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def daemon(box, name):
    return json.loads((box / "cluster.json").read_text())["pids"][name][0]


def strike(box, node, number):
    """Send a signal to a whole node: its slurmd, and all that it has started."""
    below = _with({f"SLURMD_NODENAME={node}", f"SLURM_CONF={box}/slurm.conf"})
    stepds = {stepd for pid in below if (stepd := above(pid))}
    for pid in (daemon(box, node), *stepds, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def above(pid):
    """The slurmstepd that started a process, if it was one."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text() == "slurmstepd\n":
            return parent
    return None


def trainer_of(job, rank):
    """The process id of a rank's program."""
    (pid,) = (
        pid
        for pid in _with({f"SLURM_JOB_ID={job.job}", f"RANK={rank}"})
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == b"survivor.py"
    )
    return pid


def _with(variables):
    """Processes that have all these in their environment."""
    wanted = {variable.encode() for variable in variables}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found
