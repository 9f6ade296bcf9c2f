"""The batch script, exactly as submitit would render it from our parameters.

The shell text ``templates/slurm.sh`` is the same in each; this module writes what differs, with
every value quoted, and needs no submitit. ``tests/backends/slurm/test_slurm_submitit.py`` proves
that submitit's renderer gives the same text, for the golden files and for random jobs.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.backends.slurm import arrays
from deploykit.backends.slurm.options import Container, Options, Restarts
from deploykit.cost import cap
from deploykit.job import environments
from deploykit.job.model import Bundle, JobSpec, Plan
from deploykit.lib import paths

_NOTICE = 90
"""Seconds between SIGUSR2 and the time limit, unless the job file says otherwise."""

_SUBMITIT_ONLY = {
    *("additional_parameters", "setup", "signal_delay_s"),
    *("stderr_to_stdout", "use_srun", "wckey"),
}
"""Parameters of submitit that are not options of sbatch."""

_SETUP = (
    "# text in single quotes below is literal",
    "# shellcheck disable=SC1003,SC1097,SC1112,SC2016,SC2088",
)

_FAIL = """\
# A failing line of slurm.setup ends the job; a failing line in a sourced file does not.
setup_failed() {
    [ "$3" -gt 1 ] && return
    echo "deploykit: the job cannot start: slurm.setup failed with exit code $1: $2"
    exit 78
}
trap 'setup_failed $? "$BASH_COMMAND" ${#BASH_SOURCE[@]}' ERR"""

_SRUN_OPTIONS = ("--unbuffered", "--export=ALL", "--kill-on-bad-exit=1")

_OF_EACH_TASK = (
    *("DEPLOYKIT_CHECKPOINT_BUCKET", "DEPLOYKIT_CHECKPOINT_DIR", "DEPLOYKIT_CHECKPOINT_FOLDER"),
    "DEPLOYKIT_OUTPUT_DIR",
)
"""Variables with a folder for each task of an array."""

_DEPENDENCIES = {"succeeded": "afterok", "failed": "afternotok", "ended": "afterany"}


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """Render the batch script. Needs no Slurm on this machine."""
    folder, restarts = options.run_folder(run), options.allowed(job)
    output = job.output or str(folder / "output")
    return Plan(
        backend="slurm",
        target=options.host or "localhost",
        run=run,
        text=batch_script(
            parameters(job, options, run, folder, restarts),
            command(job, options, run, folder, restarts),
        ),
        language="sh",
        job=job,
        options=options,
        bundle=bundle,
        output=f"{options.host}:{output}" if options.host else output,
    )


def batch_script(values: dict[str, Any], shell: str) -> str:
    """The text of a batch script with these `parameters` and shell commands."""
    flags = {name: value for name, value in values.items() if name not in _SUBMITIT_ONLY}
    flags |= {"signal": f"USR2@{values['signal_delay_s']}", "open-mode": "append"}
    flags |= values["additional_parameters"]
    lines = [
        *("#!/bin/bash", "", "# Parameters"),
        *(_directive(name, flags[name]) for name in sorted(flags)),
        *("", "# setup", *values["setup"]),
        *("", "# command", "export SUBMITIT_EXECUTOR=slurm", shell, ""),
    ]
    return "\n".join(lines)


def _directive(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    return f"#SBATCH --{dashed}" + ("" if value is True else f"={shlex.quote(str(value))}")


def parameters(
    job: JobSpec, options: Options, run: str, folder: Path, restarts: Restarts
) -> dict[str, Any]:
    """The parameters for submitit's renderer: its own, and options of sbatch by their names.

    `folder` is the path of the run's folder on the nodes. None for `wckey` removes a default of
    submitit's; other absent values are left out.
    """
    named: dict[str, Any] = {
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
    additional: dict[str, Any] = {
        **{name: value or True for name, value in options.extra.items()},
        "chdir": str(folder / "source"),
        "output": str(folder / "logs" / ("slurm-%a.log" if options.array else "slurm.log")),
        "requeue" if any(dataclasses.astuple(restarts)) else "no-requeue": True,
        "reservation": options.reservation,
        "licenses": options.licenses,
        **_dependencies(options),
    }
    if options.array is not None:
        limit = f"%{options.at_once}" if options.at_once else ""
        additional["array"] = f"{arrays.numbered(options)}{limit}"
    if job.resources.min_nodes is not None:
        additional |= {"no-kill": True, "mincpus": job.resources.cpus_per_node}
    return {
        **_escaped(named),
        "additional_parameters": _escaped(additional),
        "setup": list(_SETUP),
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
    }


def function_parameters(job: JobSpec, options: Options) -> dict[str, Any]:
    """The parameters for submitit's executor of Python functions.

    submitit adds its own command, log files and working directory; each process is a task of srun.
    """
    folder, restarts = options.run_folder(job.name), options.allowed(job)
    values = parameters(job, options, job.name, folder, restarts)
    for name in ("chdir", "output"):
        del values["additional_parameters"][name]
    cpus, processes = job.resources.cpus_per_node, job.resources.processes
    tasks = {"ntasks_per_node": processes, "cpus_per_task": cpus and max(1, cpus // processes)}
    setup = _setup_lines(job, options) + _exports(dict(sorted(job.env.items())), options)
    srun = ["--export=ALL", "--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={tasks['cpus_per_task']}"] if cpus else []
    srun += options.srun
    own = {"setup": [*values["setup"], *setup], "use_srun": True, "srun_args": srun}
    return {
        name: value
        for name, value in {**values, **tasks, **own}.items()
        if value is not None or name == "wckey"
    }


def function_python(job: JobSpec, options: Options) -> str | None:
    """The Python that runs functions, as shell text. None: the one that submits them."""
    if _names_environment(job, options):
        return '"$python"'
    return options.python and shlex.quote(options.python)


def _resources(job: JobSpec, options: Options) -> dict[str, Any]:
    """Options of sbatch for the resources of the job.

    With a number of tasks, of each node or in all, Slurm would give a job whose number of nodes may
    change the fewest nodes (22.05).
    """
    resources, named = job.resources, dict[str, Any]()
    if resources.min_nodes is None:
        named |= {"nodes": resources.nodes, "ntasks_per_node": 1}
        named |= {"cpus_per_task": resources.cpus_per_node}
    else:
        named |= {"nodes": f"{resources.min_nodes}-{resources.nodes}"}
    if resources.gpus_per_node:
        value = resources.gpus_per_node
        gres = options.gres_style == "gres"
        named |= {"gres": f"gpu:{value}"} if gres else {"gpus_per_node": value}
    if resources.memory is not None:
        named["mem"] = f"{-(-resources.memory // 1024**2)}M"
    return named


def _dependencies(options: Options) -> dict[str, Any]:
    """Without ``--kill-on-invalid-dep``, a job whose dependency cannot be met stays pending."""
    jobs = [
        f"{_DEPENDENCIES[how]}:{arrays.job_id(paths.run_folder(run))}"
        for run, how in options.after.items()
    ]
    return {"dependency": ",".join(jobs), "kill-on-invalid-dep": "yes"} if jobs else {}


def _escaped(values: dict[str, Any]) -> dict[str, Any]:
    """Drop None, and double each backslash: sbatch reads it as an escape even in single quotes."""
    return {
        name: value.replace("\\", "\\\\") if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _minutes(job: JobSpec) -> int:
    """The time limit in whole minutes, rounded up, as Slurm takes it."""
    return -(-job.resources.time_limit // 60)


def _notice(job: JobSpec, options: Options) -> int:
    return options.signal_seconds or min(_NOTICE, _minutes(job) * 30)


def command(job: JobSpec, options: Options, run: str, folder: Path, restarts: Restarts) -> str:
    """The shell commands below the directives."""
    environment = backend.in_folder(job, "slurm", run, folder)
    run_folder = environment.pop("DEPLOYKIT_RUN_DIR")
    if options.checkpoint_folder:
        environment["DEPLOYKIT_CHECKPOINT_FOLDER"] = options.checkpoint_folder
    if any(dataclasses.astuple(restarts)):
        environment["DEPLOYKIT_NOTICE"] = str(_notice(job, options))
        environment["DEPLOYKIT_RESTARTS"] = json.dumps(dataclasses.asdict(restarts))
    if job.stop_at_cap:
        from deploykit.backends.slurm import site  # few jobs need what a cluster charges

        environment |= cap.variables(job, site.cost(job, options))
    installed = on_nodes(job, options)
    lines = [
        f"export DEPLOYKIT_RUN_DIR={shlex.quote(run_folder)}",
        template("slurm.sh"),
        *_with_python(_setup_lines(job, options), job, options),
        *backend.staging_comments(job),
        *_exports(dict(sorted(environment.items())), options),
        "",
        *(environments.comment(installed) if installed else []),
        *_steps(job, options, folder, survives=bool(restarts.node_failure)),
    ]
    # sbatch refuses a script with DOS line endings, even inside a quoted value
    return "\n".join(lines).replace("\r", "'$'\\r''")


def _steps(job: JobSpec, options: Options, folder: Path, *, survives: bool) -> list[str]:
    """Lines that start the launchers: one step for all nodes, or one for each that may be lost.

    `survives`: whether the job is restarted after the failure of a node.
    """
    srun = ["srun", *_SRUN_OPTIONS, *_srun(job, options, folder)]
    launcher = f"    {_launcher(job, options, folder)}"
    if job.resources.min_nodes is None:
        output = '    --output="$DEPLOYKIT_RUN_DIR/logs/node-%t.log" --open-mode=append \\'
        watched = survives and job.resources.nodes > 1
        before = [template("slurm_restarted_node.sh")] if watched else []
        step = shlex.join(srun if watched else ["exec", *srun])
        return [*before, f"{step} \\", output, launcher]
    start = ["run_step() {", f'    {shlex.join(srun)} "$@" \\', f"    {launcher}", "}"]
    return [*start, template("slurm_nodes.sh").rstrip()]


def template(name: str) -> str:
    """The text of one of the shipped templates."""
    return (paths.shipped("templates") / name).read_text(encoding="utf-8")


def _setup_lines(job: JobSpec, options: Options) -> list[str]:
    """Lines that load modules, those of `slurm.setup`, and those that activate the environment."""
    lines = [*_FAIL.split("\n"), *options.setup, "trap - ERR", ""] if options.setup else []
    if job.environment is None and not options.modules:
        return lines
    modules = [*environments.module_lines(options.modules, "slurm.modules")]
    if job.environment is None:
        return [*modules, *lines]
    loaded = environments.module_lines(job.environment.modules, "environment.modules")
    activated = environments.lines(job.environment) if _names_environment(job, options) else ()
    return [*loaded, *modules, *lines, *activated]


def on_nodes(job: JobSpec, options: Options) -> dict[str, Any] | None:
    """What each node installs first; nothing in a container, whose image has everything."""
    if options.container is not None:
        return None
    return environments.on_nodes(job, elsewhere=options.host is not None)


def _exports(environment: dict[str, str], options: Options) -> list[str]:
    """Lines that set the variables."""
    return [
        f"export {name}={shlex.quote(value)}"
        + ('/"$SLURM_ARRAY_TASK_ID"' if options.array and name in _OF_EACH_TASK else "")
        for name, value in environment.items()
    ]


def _srun(job: JobSpec, options: Options, folder: Path) -> list[str]:
    """Options of srun that depend on the job. srun does not inherit the CPUs from sbatch."""
    cpus, container = job.resources.cpus_per_node, options.container
    flags = [] if cpus is None else [f"--cpus-per-task={cpus}"]
    flags += options.srun
    if container is None or container.runtime != "pyxis":
        return flags
    return [
        *flags,
        f"--container-image={container.image}",
        f"--container-mounts={','.join(_mounts(job, options, container, folder))}",
        f"--container-workdir={folder}/source",
    ]


def _mounts(job: JobSpec, options: Options, container: Container, folder: Path) -> list[str]:
    """``FOLDER:INSIDE`` for the folders of the run, the job file and the `slurm` section."""
    staged = [channel.stage_folder for channel in backend.staged(job).values()]
    locations = [path for path in backend.locations(job).values() if not paths.is_address(path)]
    own = filter(None, [*staged, options.checkpoint_folder])
    mounts = [str(folder), *locations, *own, *container.mounts]
    return list(dict.fromkeys(path if ":" in path else f"{path}:{path}" for path in mounts))


def _names_environment(job: JobSpec, options: Options) -> bool:
    """Whether the job file names an environment that is there, which brings the Python."""
    named = job.environment is not None and job.environment.python is not None
    return named and on_nodes(job, options) is None


def _chooses_python(job: JobSpec, options: Options) -> bool:
    """Whether the job's own lines may activate the environment of the Python to use."""
    lines = options.setup or options.modules or job.environment is not None
    return bool(lines) and not (options.python or options.container)


def _with_python(lines: list[str], job: JobSpec, options: Options) -> list[str]:
    """The lines, and those that use the Python of an environment that they activate."""
    if not _chooses_python(job, options) or _names_environment(job, options):
        return lines
    return [
        "before=$(command -v python3)",
        *lines,
        "# an activated environment provides its own Python",
        "python=$(command -v python3)",
        f'[ "$python" != "$before" ] || python={default_python(options)}',
        *("export python", ""),
    ]


def default_python(options: Options) -> str:
    """The launcher's Python where nothing is activated, as shell text."""
    python = options.python or ("python3" if options.container or options.host else sys.executable)
    home, below = python[:2] == "~/", python[2:]
    return f'"$HOME"/{shlex.quote(below)}' if home else shlex.quote(python)


def _launcher(job: JobSpec, options: Options, folder: Path) -> str:
    """The command that srun starts on each node."""
    container = options.container
    python = '"$python"' if _chooses_python(job, options) else default_python(options)
    arguments = [backend.LAUNCH, *backend.command(job, on_nodes(job, options))]
    before = []
    if container is not None and container.runtime == "apptainer":
        gpus = ["--nv"] if job.resources.gpus_per_node else []
        binds = f"--bind={','.join(_mounts(job, options, container, folder))}"
        directory = f"--pwd={folder}/source"
        before = ["apptainer", "exec", *gpus, binds, directory, container.image]
    text = " ".join([*map(shlex.quote, before), python, shlex.join(arguments)])
    if ":" in arguments:  # srun reads this argument as the start of the next job component
        return shlex.join(["bash", "-c", f"exec {text}"])
    return text
