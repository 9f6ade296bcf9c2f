"""Jobs on a real cluster that are disturbed in different ways, and their status over time."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.run import registry
from deploykit.run import state as run_state
from tests.backends.slurm.slurm_helpers import cluster_command, output, wait_for
from tests.trainer_losses import losses

PATIENCE = 900
FINAL = ("succeeded", "failed", "cancelled")
STEPS = 30
EVERY = 10
"""Steps between two checkpoints."""
AT = 15
"""The step at which the job is disturbed."""
LOST = AT % EVERY
"""Steps since the last checkpoint, which are lost without notice."""
SURVIVOR = Path(__file__).with_name("survivor.py")
OPTIONS = [
    *("--task", "text", "--text", ".", "--sequence", "16", "--layers", "1", "--width", "16"),
    *("--heads", "2", "--optimizer", "sgd", "--lr", "0.1", "--batch-size", "8", "--epochs", "1"),
    *("--steps", str(STEPS), "--checkpoint-steps", str(EVERY), "--log-every", "1"),
    "--no-tensorboard",
]
"""A very small model with fast steps."""
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
    """Write what a job needs to `folder`: the reference trainer, a text and the job file."""
    trainer = paths.shipped("entrypoints")
    shutil.copy(trainer / "train.py", folder)
    shutil.copytree(trainer / "trainer", folder / "trainer")
    shutil.copy(SURVIVOR, folder)
    (folder / "words.txt").write_text("A small text with many repetitions. " * 350)
    (folder / "job.yaml").write_text(JOB)


@dataclass
class Watched:
    """A run, and its status over time."""

    run: str
    folder: Path
    history: list = field(default_factory=list)
    """(state, reason) after each change."""
    waiting: subprocess.Popen | None = None
    """`deploykit wait`, started with the run."""

    @property
    def job(self):
        return str((self.folder / "claim").readlink())

    @property
    def losses(self):
        """The loss of each step, as the trainer recorded it."""
        return losses(self.folder / "output")

    @property
    def steps(self):
        """The steps of rank 0, in order: restart, step."""
        path = self.folder / "output" / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    @property
    def lost(self):
        """How many steps were repeated."""
        return len(self.steps) - len({line["step"] for line in self.steps})

    @property
    def restarts(self):
        """The reasons of the restarts in order, as the nodes recorded them."""
        files = sorted((self.folder / "exit_records").glob("restart-*.json"))
        return [json.loads(path.read_text())["why"] for path in files]

    @property
    def nodes(self):
        """Its current nodes, starting with that of the batch script."""
        nodes = output("squeue", "--noheader", "--format=%N", f"--jobs={self.job}").strip()
        return output("scontrol", "show", "hostnames", nodes).split()

    @property
    def states(self):
        """The sequence of states."""
        return [state for state, _ in itertools.groupby(state for state, _ in self.history)]

    def reasons_in(self, state):
        """All reasons while it was in `state`."""
        return " | ".join(reason for old, reason in self.history if old == state)

    @property
    def log(self):
        return "".join(path.read_text() for path in sorted((self.folder / "logs").iterdir()))

    def in_mid_run(self):
        """Wait until it is disturbed. Fails, and says why, where it ends before or hangs."""
        wait_for(self._held, PATIENCE, what=lambda: f"{self._now}: not at step {AT}")

    def _held(self):
        steps = self.steps
        assert not (self.history and self.history[-1][0] in FINAL), f"{self._now}: ended early"
        return steps and steps[-1]["step"] >= AT

    @property
    def _now(self):
        """Its status, and the end of its log, for a message."""
        return f"{self.run} {self.job} {self.history[-1:]} {self.log[-1000:]!r}"

    def ended(self):
        wait_for(lambda: self.history and self.history[-1][0] in FINAL, PATIENCE)

    @functools.cached_property
    def waited(self):
        """The exit code and the output of `wait`."""
        out, _ = self.waiting.communicate(timeout=PATIENCE)
        return self.waiting.returncode, out


def deploykit(*words):
    """Run a command in this process; its exit code and its output."""
    with io.StringIO() as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return cli.main(words), out.getvalue()


def submit(run, *settings):
    """Submit a run through the command line."""
    words = [word for setting in settings for word in ("--set", setting)]
    code, out = deploykit("submit", "--backend", "slurm", "--run", run, *words)
    assert code == 0, out
    return Watched(run, paths.run_folder(run))


@contextlib.contextmanager
def awaited(jobs):
    """Run `deploykit wait` for each of the jobs."""
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
    """Follow the logs of a run into the file `log`, to their end."""
    argv = [sys.executable, "-m", "deploykit", "logs", "--follow", run]
    with log.open("w") as file, subprocess.Popen(argv, stdout=file) as process:
        try:
            yield
            process.wait(PATIENCE)
        finally:
            process.kill()


class Watch(threading.Thread):
    """Poll the status of all runs and record changes.

    UNKNOWN is ignored: the controller is restarted in between.
    """

    def __init__(self, jobs):
        super().__init__(daemon=True)
        self.jobs = jobs
        self.stopped = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.join()

    def run(self):
        while not self.stopped.wait(0.3):
            every = list(self.jobs.values())
            rows = run_state.refresh([registry.get(job.run) for job in every])
            for job, row in zip(every, rows, strict=True):
                status = row.state, row.reason
                if row.state != "unknown" and job.history[-1:] != [status]:
                    job.history.append(status)


@contextlib.contextmanager
def cluster_of(nodes, *options):
    """A new cluster, in a folder with a short path."""
    box = Path(tempfile.mkdtemp(prefix="box-"))
    try:
        done = cluster_command("start", box, "--nodes", nodes, *options)
        assert done.returncode == 0, done.stderr
        yield box
    finally:
        cluster_command("stop", box)
        shutil.rmtree(box, ignore_errors=True)


# many processes share few cores, so that Slurm has to wait longer; a node that is set down stays
# down, since its slurmd may still be about to kill the last attempt, and would kill the next one
SETTINGS = """\
JobAcctGatherParams=OverMemoryKill
KillWait=30
ReturnToService=1
PartitionName=graced Nodes=ALL DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
"""


def configure(box):
    """End jobs that exceed their memory, and add a partition with grace time.

    A requeued job is pending for as long as a credential is valid: long enough that `Watch` sees
    it on a busy machine too.
    """
    conf = box / "slurm.conf"
    conf.write_text(conf.read_text().replace("cred_expire=5", "cred_expire=30") + SETTINGS)
    output("scontrol", "reconfigure")


def preempt_by_quality(box):
    """Let the QOS `urgent` preempt `normal`; requires accounting."""
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
    """Restart the controller with its saved state."""
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
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def daemon(box, name):
    return json.loads((box / "cluster.json").read_text())["pids"][name][0]


def daemon_lines(job):
    """What the daemons of this cluster logged about a job."""
    logs = (Path(os.environ["SLURM_CONF"]).parent / "log").glob("*.log")
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines(True)]
    return "".join(sorted(line for line in lines if re.search(rf"\b{job.job}\b", line)))


def signal_node(box, node, number):
    """Send a signal to a whole node: its slurmd and everything that it started."""
    children = _with({f"SLURMD_NODENAME={node}", f"SLURM_CONF={box}/slurm.conf"})
    stepds = {stepd for pid in children if (stepd := stepd_of(pid))}
    for pid in (daemon(box, node), *stepds, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_task(job, task):
    """Kill a launcher and all that it started, as the kernel does where memory runs out."""
    for pid in _with({f"SLURM_JOB_ID={job}", f"SLURM_PROCID={task}"}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stepd_of(pid):
    """The parent of a process if that is a slurmstepd."""
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
    """Processes with all these variables in their environment."""
    wanted = {variable.encode() for variable in variables}
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    pids.append(int(entry.name))
    return pids
