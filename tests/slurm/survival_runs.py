"""Many jobs on one real cluster, to each of which something happens, watched all the time."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from slurm_helpers import cluster_command, output, wait_for
from trainer_losses import losses

from deploykit import cli, lifecycle, paths, runs

PATIENCE = 900
FINAL = ("succeeded", "failed", "cancelled")
STEPS = 30
EVERY = 10
"""Steps between two checkpoints."""
AT = 15
"""The step at which something happens."""
LOST = AT % EVERY
"""Steps since the last checkpoint, where nobody gave notice."""
SURVIVOR = Path(__file__).with_name("survivor.py")
OPTIONS = [
    *("--task", "text", "--text", ".", "--sequence", "16", "--layers", "1", "--width", "16"),
    *("--heads", "2", "--optimizer", "sgd", "--lr", "0.1", "--batch-size", "8", "--epochs", "1"),
    *("--steps", str(STEPS), "--checkpoint-steps", str(EVERY), "--log-every", "1"),
    "--no-tensorboard",
]
"""A very small model, whose steps cost little."""
JOB = f"""\
name: survivor
entrypoint: {{script: survivor.py, args: {[f"hold:{AT}", *OPTIONS]}}}
resources: {{time_limit: 2h, memory: 4GiB}}
env: {{OMP_NUM_THREADS: "1"}}
slurm: {{exclusive: true, python: {sys.executable}}}
"""
FAULTY = f"entrypoint.args={[f'fail:{AT}', *OPTIONS]}"
UNHARMED = f"entrypoint.args={['run', *OPTIONS]}"


def source(folder):
    """What a job needs, in `folder`: the reference trainer, something to learn, the job file."""
    trainer = paths.shipped("entrypoints")
    shutil.copy(trainer / "train.py", folder)
    shutil.copytree(trainer / "trainer", folder / "trainer")
    shutil.copy(SURVIVOR, folder)
    (folder / "words.txt").write_text("A small text, of which much is said twice. " * 350)
    (folder / "job.yaml").write_text(JOB)


@dataclass
class Watched:
    """A run, and what its status was over time."""

    run: str
    folder: Path
    seen: list = field(default_factory=list)
    """(state, reason), each time they changed."""
    waiting: subprocess.Popen | None = None
    """`deploykit wait`, from before anything happened on."""

    @property
    def job(self):
        return str((self.folder / "claim").readlink())

    @property
    def losses(self):
        """The loss of each step, as the trainer kept it."""
        return losses(self.folder / "output")

    @property
    def steps(self):
        """What rank 0 did, in order: restart, step."""
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
        files = sorted((self.folder / "exit_records").glob("restart-*.json"))
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

    @functools.cached_property
    def waited(self):
        """What `wait` came to: its exit code, and all that it printed."""
        said, _ = self.waiting.communicate(timeout=PATIENCE)
        return self.waiting.returncode, said


def deploykit(*words):
    """Run a command in this process: its exit code, and all that it printed."""
    with io.StringIO() as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return cli.main(words), said.getvalue()


def submit(run, *settings):
    """Submit one through the command line."""
    words = [word for setting in settings for word in ("--set", setting)]
    code, said = deploykit("submit", "--backend", "slurm", "--run", run, *words)
    assert code == 0, said
    return Watched(run, paths.run_folder(run))


@contextlib.contextmanager
def awaited(jobs):
    """`deploykit wait` for each of the jobs, all the time."""
    for job in jobs:
        argv = [sys.executable, "-m", "deploykit", "wait", job.run]
        to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        job.waiting = subprocess.Popen(argv, **to)
    try:
        yield
    finally:
        for job in jobs:
            job.waiting.kill()


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
    """Ask for the status of all runs again and again, and keep what changes.

    A look at a controller that is just being restarted tells nothing.
    """

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
                told = row.state, row.reason
                if row.state != "unknown" and job.seen[-1:] != [told]:
                    job.seen.append(told)


@contextlib.contextmanager
def cluster_of(nodes, *options):
    """A cluster of its own, in a short path."""
    box = Path(tempfile.mkdtemp(prefix="box-"))
    try:
        done = cluster_command("start", box, "--nodes", nodes, *options)
        assert done.returncode == 0, done.stderr
        yield box
    finally:
        cluster_command("stop", box)
        shutil.rmtree(box, ignore_errors=True)


# there are many processes, and few cores for all of them, so Slurm has to wait longer
SETTINGS = """\
JobAcctGatherParams=OverMemoryKill
KillWait=30
PartitionName=graced Nodes=ALL DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
"""


def configure(box):
    """End jobs that use more memory than they asked for, and have a partition with grace."""
    with (box / "slurm.conf").open("a") as conf:
        conf.write(SETTINGS)
    output("scontrol", "reconfigure")


def preempt_by_quality(box):
    """Two qualities of service, `normal` and `urgent`, that the user may have; needs accounts."""
    user = pwd.getpwuid(os.getuid()).pw_name
    for words in (
        "add account lab",
        f"add user {user} account=lab",
        "add qos urgent preempt=normal",
        f"modify user {user} set qos+=urgent",
    ):
        output("sacctmgr", "--immediate", *words.split())
    conf = box / "slurm.conf"
    conf.write_text(conf.read_text().replace("preempt/partition_prio", "preempt/qos"))


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
