"""Measure submits, queues, an array, logs, a sweep and start-up on a real Slurm cluster here.

    python benchmarks/slurm.py [submit queue queue-with-accounting array logs sweep start]
    python benchmarks/slurm.py sweep --trials 100

Each figure is measured together with the one it is compared with. Prints JSON, and returns 1 when a
target is missed. Needs Debian's packages of Slurm (see README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
CLUSTER = TOP / "infra" / "slurm" / "cluster.py"
MANY = 1000
RANKS, LINES = 8, 50_000
REPEATS = 6
SUBMITS = 15
ONE_SUBMIT = 0.2
"""Seconds of CPU that one `submit` may take."""
MORE = 0.5
"""Seconds that a job may start later than below `srun torchrun`."""


def main() -> int:
    """Measure what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *FIGURES], default=[])
    parser.add_argument("--trials", type=int, default=1000, help="of the sweep (default 1000)")
    options = parser.parse_args()
    FIGURES["sweep"] = partial(sweep, trials=options.trials)
    figures = {name: figure(name) for name in options.what or FIGURES}
    print(json.dumps(figures, indent=1))
    return 0 if all(figure["met"] for figure in figures.values()) else 1


def figure(name: str) -> dict[str, object]:
    """One figure, on its own cluster."""
    with cluster(accounting=name.endswith("accounting")) as box:
        folder = box / "work"
        folder.mkdir()
        os.environ["DEPLOYKIT_HOME"] = str(box / "deploykit")
        with contextlib.chdir(folder):
            return FIGURES[name](folder)


@contextlib.contextmanager
def cluster(*, accounting: bool) -> Iterator[Path]:
    """A cluster of four nodes, in whose environment this process then runs."""
    with tempfile.TemporaryDirectory(prefix="box-") as name:
        folder = Path(name)
        start = [sys.executable, CLUSTER, "start", folder, "--accounting", str(int(accounting))]
        subprocess.run(start, check=True, stdout=sys.stderr)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        try:
            yield folder
        finally:
            subprocess.run([sys.executable, CLUSTER, "stop", folder], check=True, stdout=sys.stderr)


def submit(folder: Path) -> dict[str, object]:
    """One `submit` of a small job, the whole command; beside it a Python that imports submitit."""
    (folder / "train.py").write_text("print('done')\n")
    (folder / "job.yaml").write_text(
        "name: one\nentrypoint: {script: train.py}\nresources: {time_limit: 5m}\n"
        "backend: slurm\nslurm: {extra: {hold: ''}}\n"
    )
    ours = median_cpu([sys.executable, "-m", "deploykit", "submit"])
    importing = median_cpu([sys.executable, "-c", "import submitit"])
    subprocess.run(["scancel", "--me"], check=True)
    return {"cpu_s": ours, "import_submitit_cpu_s": importing, "met": ours <= ONE_SUBMIT}


def median_cpu(argv: list[str]) -> float:
    """Seconds of CPU of a command and what it starts, the median of several times."""
    seconds = []
    for _ in range(SUBMITS):
        before = children_cpu()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        seconds.append(children_cpu() - before)
    return statistics.median(seconds)


def queue(folder: Path) -> dict[str, object]:
    """One `status` of 1,000 queued jobs, compared with one `squeue`."""
    from deploykit.backends import slurm
    from deploykit.job.model import Handle

    script = "#!/bin/sh\n#SBATCH --hold\n#SBATCH --output=/dev/null\ntrue\n"
    handles = []
    for number in range(MANY):
        argv = ["sbatch", "--parsable", f"--job-name=run-{number}"]
        done = subprocess.run(argv, input=script, capture_output=True, text=True, check=True)
        job = done.stdout.strip()
        handles.append(Handle("slurm", "localhost", job, f"run-{number}", str(folder)))
    status_seconds, squeue_seconds = interleaved(
        lambda: slurm.status(handles),
        lambda: subprocess.run(["squeue"], check=True, stdout=subprocess.DEVNULL),
    )
    count_by_state = Counter(status.state.value for status in slurm.status(handles).values())
    subprocess.run(["scancel", "--me"], check=True)
    return {
        "status_of_1000_s": status_seconds,
        "squeue_s": squeue_seconds,
        "ratio": status_seconds / squeue_seconds,
        "states": count_by_state,
        "met": status_seconds <= 3 * squeue_seconds and count_by_state == {"queued": MANY},
    }


def array(folder: Path) -> dict[str, object]:
    """An array of 1,000: a run, functions of deploykit's executor, and functions of submitit's."""
    import submitit

    from deploykit.run import lifecycle
    from deploykit.slurm import executor

    numbers = itertools.count()

    def run() -> None:
        chosen = [f"slurm.array={MANY}"]
        plan = lifecycle.prepare(path, chosen, "slurm", f"run-{next(numbers)}").plan
        lifecycle.submit(plan)

    path = folder / "project" / "job.yaml"
    path.parent.mkdir()
    path.write_text(
        "name: many\nentrypoint: {module: none}\nresources: {time_limit: 5m}\n"
        "slurm: {extra: {hold: ''}}\n"
    )
    ours = executor(path, folder=folder / "ours")
    peer = submitit.SlurmExecutor(folder=folder / "theirs")
    peer.update_parameters(time=5, additional_parameters={"hold": True})
    run_seconds, function_seconds, submitit_seconds = interleaved(
        run, lambda: ours.map_array(abs, range(MANY)), lambda: peer.map_array(abs, range(MANY))
    )
    subprocess.run(["scancel", "--me"], check=True)
    return {
        "run_s": run_seconds,
        "functions_s": function_seconds,
        "submitit_s": submitit_seconds,
        "ratio_of_run": run_seconds / submitit_seconds,
        "ratio_of_functions": function_seconds / submitit_seconds,
        "met": max(run_seconds, function_seconds) <= submitit_seconds,
    }


WRITER = """
import os, time
rank, attempt = os.environ["RANK"], int(os.environ["DEPLOYKIT_RESTART_COUNT"])
for number in range(attempt * {half}, (attempt + 1) * {half}):
    print("line", rank, number, flush=number % 1000 == 0)
if attempt == 0:
    print("half", flush=True)
    time.sleep(600)
"""


def logs(folder: Path) -> dict[str, object]:
    """50,000 lines of each of 8 ranks, followed live, with a requeue in the middle."""
    from deploykit.lib import paths

    (folder / "train.py").write_text(WRITER.format(half=LINES // 2))
    (folder / "job.yaml").write_text(
        "name: logs\nentrypoint: {script: train.py}\n"
        "resources: {time_limit: 20m, nodes: 2, processes_per_node: 4}\n"
    )
    command = [sys.executable, "-m", "deploykit"]
    started = time.monotonic()
    submit = [*command, "submit", "--backend", "slurm", "--run", "logs"]
    subprocess.run(submit, check=True, stdout=subprocess.DEVNULL)
    follower = subprocess.Popen([*command, "logs", "-f", "logs"], stdout=subprocess.PIPE, text=True)
    numbers_by_rank: dict[str, list[int]] = {str(rank): [] for rank in range(RANKS)}
    halves = 0
    with follower:
        for line in follower.stdout or ():
            if match := re.match(r"\[rank \d+\] line (\d+) (\d+)$", line):
                numbers_by_rank[match[1]].append(int(match[2]))
            elif line.endswith("] half\n"):
                halves += 1
                if halves == RANKS:
                    claim = paths.run_folder("logs") / "claim"
                    subprocess.run(["scontrol", "requeue", str(claim.readlink())], check=True)
    complete = sum(numbers == list(range(LINES)) for numbers in numbers_by_rank.values())
    done = subprocess.run([*command, "wait", "logs"], stdout=subprocess.DEVNULL, check=False)
    return {
        "lines": sum(map(len, numbers_by_rank.values())),
        "ranks_with_every_line_once_in_order": complete,
        "exit_code": done.returncode,
        "seconds": time.monotonic() - started,
        "met": complete == RANKS and done.returncode == 0,
    }


def sweep(folder: Path, trials: int) -> dict[str, object]:
    """A random sweep, which is one job array, beside submitit's array of as many functions.

    Both until the last task has ended; a trial runs a script, and submitit's task a function.
    """
    ours = measured(lambda: run_sweep(folder, trials))
    theirs = measured(lambda: run_submitit(folder, trials))
    return {
        "trials": trials,
        "sweep": ours,
        "submitit": theirs,
        "ratio": ours["seconds"] / theirs["seconds"],
        "met": ours["seconds"] <= 1.2 * theirs["seconds"],
    }


def measured(run: Callable[[], None]) -> dict[str, float]:
    """Where the time goes until `run` returns, whose job array is the newest of the cluster."""
    began, machine, own = time.time(), machine_cpu(), children_cpu()
    run()
    ended, machine_after, own_after = time.time(), machine_cpu(), children_cpu()
    while subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout:
        time.sleep(0.5)  # a task of submitit's ends after its result is there
    tasks = newest_array()
    starts, ends = [task["StartTime"] for task in tasks], [task["EndTime"] for task in tasks]
    return {
        "seconds": ended - began,
        "until_first_task_s": min(starts) - began,  # Slurm's times are whole seconds
        "tasks_s": max(ends) - min(starts),
        "after_last_task_s": ended - max(ends),
        "mean_of_a_task_s": statistics.mean(map(float.__sub__, ends, starts)),
        "cpu_s_of_control_plane": own_after - own,
        "cpu_s_of_machine_per_task": (machine_after - machine) / len(tasks),
    }


def newest_array() -> list[dict[str, float]]:
    """When each task of the newest job array began and ended, in seconds since 1970."""
    text = subprocess.run(
        ["scontrol", "--oneliner", "show", "job"], capture_output=True, text=True, check=True
    ).stdout
    tasks: dict[int, list[dict[str, float]]] = {}
    for line in text.splitlines():
        job = re.search(r"ArrayJobId=(\d+)", line)
        times = re.findall(r"(StartTime|EndTime)=(\S+)", line)
        if job:
            seconds = {name: datetime.fromisoformat(value).timestamp() for name, value in times}
            tasks.setdefault(int(job[1]), []).append(seconds)
    return tasks[max(tasks)]


def machine_cpu() -> float:
    """Seconds that all processors of this machine have worked."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def children_cpu() -> float:
    """Seconds of CPU of all commands that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_sweep(folder: Path, trials: int) -> None:
    """A sweep until it has ended."""
    (folder / "train.py").write_text("print('step 1/1 loss=0.5')\n")
    (folder / "job.yaml").write_text(
        "name: many\nentrypoint: {script: train.py}\nresources: {time_limit: 5m}\nbackend: slurm\n"
    )
    (folder / "sweep.yaml").write_text(
        "parameters: {lr: {range: [0.1, 1]}}\nobjective: {metric: loss}\nsampler: random\n"
        f"trials: {trials}\nparallel: {trials}\n"
    )
    command = [sys.executable, "-m", "deploykit", "sweep", "start", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if json.loads(done.stdout)["counts"] != {"succeeded": trials}:
        sys.exit(f"not all {trials} trials have succeeded")


def run_submitit(folder: Path, trials: int) -> None:
    """An array of submitit until each task has left its result."""
    import submitit

    peer = submitit.SlurmExecutor(folder=folder / "theirs")
    peer.update_parameters(time=5, array_parallelism=trials)
    jobs = peer.map_array(abs, range(trials))
    results = [folder / f"theirs/{job.job_id}_0_result.pkl" for job in jobs]
    while results := [one for one in results if not one.exists()]:
        time.sleep(0.1)


BARE = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5 --output=log
touch began
srun {bin}/torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-endpoint="$(hostname):{port}" train.py {folder}
"""


def start(folder: Path) -> dict[str, object]:
    """From the first line of a job's script to that of the program on all of 2 nodes' 4 ranks.

    Beside `srun torchrun`, which starts the same program, one after the other.
    """
    program = "import os, pathlib, sys\npathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
    (folder / "train.py").write_text(program)
    (folder / "job.yaml").write_text(
        "name: start\nentrypoint: {script: train.py}\n"
        "resources: {time_limit: 5m, nodes: 2, processes_per_node: 2}\n"
    )
    pairs = [(_start_ours(folder, n), _start_bare(folder, n)) for n in range(REPEATS)]
    ours, bare = (statistics.median(times) for times in zip(*pairs, strict=True))
    more = statistics.median(own - other for own, other in pairs)
    return {"ours_s": ours, "srun_torchrun_s": bare, "more_s": more, "met": more <= MORE}


def _start_ours(folder: Path, number: int) -> float:
    from deploykit.lib import paths

    ranks, run = folder / f"ours-{number}", f"start-{number}"
    ranks.mkdir()
    command = [sys.executable, "-m", "deploykit", "submit", "--backend", "slurm", "--wait"]
    words = [*command, "--run", run, "job.yaml", "--", str(ranks)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return _until_all(ranks, paths.run_folder(run) / "claim")


def _start_bare(folder: Path, number: int) -> float:
    ranks = folder / f"bare-{number}"
    ranks.mkdir()
    bin_, port = Path(sys.executable).parent, 20_000 + os.getpid() % 10_000 + number
    script = BARE.format(bin=bin_, port=port, folder=ranks)
    subprocess.run(["sbatch", "--wait"], input=script, text=True, check=True, stdout=sys.stderr)
    return _until_all(ranks, folder / "began")


def _until_all(ranks: Path, began: Path) -> float:
    """Seconds from the time of a file to those of all ranks' files."""
    times = [file.stat().st_mtime for file in ranks.iterdir()]
    if len(times) != 4:  # noqa: PLR2004 - two nodes with two ranks each
        sys.exit(f"{len(times)} of 4 ranks have started")
    return max(times) - began.lstat().st_mtime


def interleaved(*calls: Callable[[], object]) -> list[float]:
    """Median wall times in seconds. The calls alternate, and each is first equally often."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS):
        for number in range(len(calls)):
            index = (repeat + number) % len(calls)
            started = time.perf_counter()
            calls[index]()
            times[index].append(time.perf_counter() - started)
    return list(map(statistics.median, times))


FIGURES: dict[str, Callable[[Path], dict[str, object]]] = {
    "submit": submit,
    "queue": queue,
    "queue-with-accounting": queue,
    "array": array,
    "logs": logs,
    "sweep": partial(sweep, trials=1000),
    "start": start,
}

if __name__ == "__main__":
    sys.exit(main())
