"""The batch script, as submitit renders it from our parameters with none of its defaults left in.

A plan writes the lines itself: importing submitit takes as long as all the rest of a dry run.
`submit` has submitit's own renderer make the script, and refuses when the two differ; the tests
hold them equal over many jobs. The private hooks of submitit that this leans on are held by
``tests/slurm/test_slurm_submitit.py``.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit import contract, paths, render
from deploykit.backends.slurm import sent
from deploykit.backends.slurm.options import Container, Options
from deploykit.model import JobSpec

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

_NOTICE = 90
"""Seconds between SIGUSR2 and the time limit, where the job file does not say."""

_NOT_SBATCH = {
    *("additional_parameters", "setup", "signal_delay_s"),
    *("stderr_to_stdout", "use_srun", "wckey"),
}
"""Parameters that are submitit's own."""

_PREAMBLE = (
    "# what stands in single quotes below is meant literally",
    "# shellcheck disable=SC1003,SC1097,SC1112,SC2016,SC2088",
)


def render_script(job: JobSpec, options: Options, *, run: str) -> str:
    """The text that sbatch gets."""
    values = parameters(job, options, run=run)
    flags = {name: value for name, value in values.items() if name not in _NOT_SBATCH}
    flags |= {"signal": f"USR2@{values['signal_delay_s']}", "open-mode": "append"}
    flags |= values["additional_parameters"]
    lines = [
        "#!/bin/bash",
        "",
        "# Parameters",
        *(_flag(name, flags[name]) for name in sorted(flags)),
    ]
    lines += ["", "# setup", *values["setup"]]
    lines += ["", "# command", "export SUBMITIT_EXECUTOR=slurm", command(job, options, run=run), ""]
    return "\n".join(lines)


def _flag(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    return f"#SBATCH --{dashed}" + ("" if value is True else f"={shlex.quote(str(value))}")


def offline(folder: Path) -> SlurmExecutor:
    """The executor of submitit, which would refuse to exist where there is no srun on PATH."""
    from submitit.slurm.slurm import SlurmExecutor

    class Offline(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2

    return Offline(folder)


def parameters(job: JobSpec, options: Options, *, run: str) -> dict[str, Any]:
    """What submitit's renderer is told: its own parameters, and sbatch's by their own names."""
    folder = options.run_folder(run)
    more: dict[str, Any] = {
        **{name: value or True for name, value in options.extra.items()},
        "chdir": str(folder / "source"),
        "output": str(folder / "logs" / ("slurm-%a.log" if options.array else "slurm.log")),
        "requeue" if comes_back(options) else "no-requeue": True,
        "reservation": options.reservation,
        "licenses": options.licenses,
        **_after(options),
        **_array(options),
    }
    chosen = {
        **_resources(job, options),
        "job_name": run,
        "time": _minutes(job),
        "signal_delay_s": _notice(job, options),
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "nodelist": options.nodelist,
        "exclude": options.exclude,
        "exclusive": options.exclusive or None,
        "mail_type": options.mail_type,
        "mail_user": options.mail_user,
    }
    return {
        **_escaped(chosen),
        "additional_parameters": _escaped(more),
        "setup": list(_PREAMBLE),
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
    }


_AFTER = {"succeeded": "afterok", "failed": "afternotok", "ended": "afterany"}


def _after(options: Options) -> dict[str, Any]:
    """Slurm would let a job wait for ever for one that ended otherwise."""
    jobs = [
        f"{_AFTER[how]}:{sent.job(paths.run_folder(run))}" for run, how in options.after.items()
    ]
    return {"dependency": ",".join(jobs), "kill-on-invalid-dep": "yes"} if jobs else {}


def _array(options: Options) -> dict[str, Any]:
    if options.array is None:
        return {}
    most = f"%{options.at_once}" if options.at_once else ""
    return {"array": f"0-{options.array - 1}{most}"}


def function_parameters(job: JobSpec, options: Options) -> dict[str, Any]:
    """What submitit is told where it sends a Python function: the command is its own."""
    values = parameters(job, options, run=job.name)
    for ours in ("chdir", "output"):
        del values["additional_parameters"][ours]
    cpus, processes = job.resources.cpus_per_node, job.resources.processes
    tasks = {"ntasks_per_node": processes, "cpus_per_task": cpus and max(1, cpus // processes)}
    text = render.shell(
        "slurm-setup.sh.j2",
        modules=options.modules,
        setup=options.setup,
        environment=dict(sorted(job.env.items())),
    )
    srun = ["--export=ALL", "--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={tasks['cpus_per_task']}"] if cpus else []
    more = {"setup": [*values["setup"], *text.split("\n")], "use_srun": True, "srun_args": srun}
    return {
        name: value
        for name, value in {**values, **tasks, **more}.items()
        if value is not None or name == "wckey"
    }


def comes_back(options: Options) -> bool:
    """Whether Slurm may start the job again at all."""
    return any(dataclasses.astuple(options.restarts))


def _minutes(job: JobSpec) -> int:
    """The time limit; Slurm takes whole minutes."""
    return -(-job.resources.time_limit // 60)


def _notice(job: JobSpec, options: Options) -> int:
    return options.signal_seconds or min(_NOTICE, _minutes(job) * 60 // 2)


def _environment(job: JobSpec, options: Options, run: str) -> dict[str, str]:
    """The contract's variables, and what the launchers must know to start the job again."""
    plain = contract.in_folder(job, "slurm", run, options.run_folder(run))
    if not comes_back(options):
        return plain
    ours = {
        "DEPLOYKIT_NOTICE": str(_notice(job, options)),
        "DEPLOYKIT_RESTARTS": json.dumps(dataclasses.asdict(options.restarts)),
    }
    return dict(sorted({**plain, **ours}.items()))


def _resources(job: JobSpec, options: Options) -> dict[str, Any]:
    wanted = job.resources
    gpus = wanted.gpus_per_node
    style: dict[str, Any] = {} if not gpus else {"gpus_per_node": gpus}
    if gpus and options.gres_style == "gres":
        style = {"gres": f"gpu:{gpus}"}
    return {
        "nodes": wanted.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": wanted.cpus_per_node,
        "mem": None if wanted.memory is None else f"{-(-wanted.memory // 1024**2)}M",
        **style,
    }


def _escaped(values: dict[str, Any]) -> dict[str, Any]:
    """Without the absent ones. In an #SBATCH line a backslash escapes even in single quotes."""
    return {
        name: value.replace("\\", "\\\\") if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def command(job: JobSpec, options: Options, *, run: str) -> str:
    """What the script does below its directives."""
    folder = options.run_folder(run)
    text = render.shell(
        "slurm.sh.j2",
        folder=folder,
        place='"$task"' if options.array else shlex.quote(str(folder)),
        log=_log(options, folder),
        array=options.array,
        modules=options.modules,
        setup=options.setup,
        environment=_environment(job, options, run),
        srun=_srun(job, options, folder),
        command=_words(job, options, folder),
    )
    # sbatch refuses a script with a DOS line end, even inside a quoted value
    return text.rstrip("\n").replace("\r", "'$'\\r''")


def _log(options: Options, folder: Path) -> str:
    """What the batch script itself prints, in the words of a shell."""
    task = '"$SLURM_ARRAY_TASK_ID"' if options.array else ""
    return f"{shlex.quote(str(folder))}/logs/slurm{task and f'-{task}'}.log"


def _srun(job: JobSpec, options: Options, folder: Path) -> list[str]:
    """Options of srun that not every job has. It does not inherit the CPUs from sbatch."""
    cpus, container = job.resources.cpus_per_node, options.container
    found = [] if cpus is None else [f"--cpus-per-task={cpus}"]
    if container is not None and container.runtime == "pyxis":
        found += [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(_mounts(job, container, folder))}",
            f"--container-workdir={folder}/source",
        ]
    return found


def _mounts(job: JobSpec, container: Container, folder: Path) -> list[str]:
    """``FOLDER:INSIDE`` of all that the launcher, the job and the user want to see."""
    wanted = [str(folder), *contract.locations(job).values(), *container.mounts]
    return list(dict.fromkeys(one if ":" in one else f"{one}:{one}" for one in wanted))


def _words(job: JobSpec, options: Options, folder: Path) -> list[str]:
    container = options.container
    python = options.python or ("python3" if container or options.host else sys.executable)
    words = [python, contract.LAUNCH, *contract.command(job)]
    if container is not None and container.runtime == "apptainer":
        gpus = ["--nv"] if job.resources.gpus_per_node else []
        binds = f"--bind={','.join(_mounts(job, container, folder))}"
        place = f"--pwd={folder}/source"
        words = ["apptainer", "exec", *gpus, binds, place, container.image, *words]
    if ":" in words:  # to srun this word alone means that another component of the job follows
        return ["bash", "-c", f"exec {shlex.join(words)}"]
    return words
