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
from deploykit.backends.slurm.options import Options
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
    folder = paths.run_folder(run)
    more: dict[str, Any] = {
        **{name: value or True for name, value in options.extra.items()},
        "chdir": str(folder / "source"),
        "output": str(folder / "logs" / "slurm.log"),
        "requeue" if comes_back(options) else "no-requeue": True,
        "reservation": options.reservation,
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
    }
    return {
        **_escaped(chosen),
        "additional_parameters": _escaped(more),
        "setup": list(_PREAMBLE),
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
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
    plain = contract.in_folder(job, "slurm", run)
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
    folder = paths.run_folder(run)
    text = render.shell(
        "slurm.sh.j2",
        folder=folder,
        setup=options.setup,
        environment=_environment(job, options, run),
        cpus=job.resources.cpus_per_node,
        command=_words(options.python or sys.executable, job),
    )
    # sbatch refuses a script with a DOS line end, even inside a quoted value
    return text.rstrip("\n").replace("\r", "'$'\\r''")


def _words(python: str, job: JobSpec) -> list[str]:
    words = [python, contract.LAUNCH, *contract.command(job)]
    if ":" in words:  # to srun this word alone means that another component of the job follows
        return ["bash", "-c", f"exec {shlex.join(words)}"]
    return words
