"""Jobs for Slurm, and their scripts as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from submitit.slurm.slurm import SlurmExecutor

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.backends.slurm import script as scripts
from deploykit.backends.slurm.options import Container, Restarts
from deploykit.bundle import archive as bundles
from deploykit.job.model import Entrypoint, Environment, InputChannel, JobSpec, Resources

BUNDLE = bundles.Bundle(Path("/nowhere"), (), "0" * 64)
PYTHON = "/shared/venv/bin/python"
JOB = JobSpec("digits", Entrypoint("train.py", args=("--epochs", "5")), Resources(time_limit=1800))


def job(**changes):
    """`JOB` with these fields changed; `resources` changes some of its resources."""
    resources = dataclasses.replace(JOB.resources, **changes.pop("resources", {}))
    return dataclasses.replace(JOB, resources=resources, **changes)


def script(job=JOB, options=None, run="digits-1"):
    """The text of a plan."""
    return plan_of(job, options or Options(python=PYTHON), run).text


def directives(text):
    """The options of sbatch in a script, by name."""
    return dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    )


def plan_of(job, options, run="digits-1"):
    """A plan without a source."""
    return slurm.plan(job, options, run=run, bundle=BUNDLE)


class OfflineExecutor(SlurmExecutor):
    """submitit's executor; the real one requires srun on PATH."""

    @classmethod
    def affinity(cls):
        return 2


def rendered_by_submitit(plan):
    """The text of submitit's own renderer, with the parameters of a plan."""
    folder = plan.options.run_folder(plan.run)
    restarts = plan.options.allowed(plan.job)
    arguments = (plan.job, plan.options, plan.run, folder, restarts)
    executor = OfflineExecutor(folder)
    executor.update_parameters(**scripts.parameters(*arguments))
    return executor._make_submission_file_text(scripts.command(*arguments), "uid")


NEVER = Restarts(0, 0, 0, 0)
HOSTILE = (
    *("", " ", "a b", "it's", 'say "hi"', "$(touch /tmp/pwned)", "`id`", "a\nb", "a\r\nb\r"),
    *("#SBATCH --hold", "\n#SBATCH --hold\n", "--lr", "-x", "{{ run }}", "{% raw %}", "\\", "a\\"),
    *("é☃", "\u2028", "%j", "~", "*", ";", "&", "|", ">", "!", "\x1b[0m", "\t", "a=b,c", ": :"),
    *("\u201cquoted\u201d", "=x", "~/x", "\u00a0", "\x01"),
)


CASES = {
    "plain": (JOB, Options(python=PYTHON)),
    "two-nodes": (
        job(resources={"nodes": 2, "processes_per_node": 2, "cpus_per_node": 4}, retries=1),
        Options(python=PYTHON, partition="main"),
    ),
    "elastic": (
        job(resources={"nodes": 4, "min_nodes": 2, "cpus_per_node": 4}),
        Options(python=PYTHON),
    ),
    "environment": (
        job(
            environment=Environment(uv="~/it's mine", modules=("uv/0.9",)),
            outputs=("snapshot.pt", "it's/**"),
        ),
        Options(host="login1", folder="/shared/ada"),
    ),
    "every-option": (
        job(
            resources={"nodes": 2, "gpus_per_node": 8, "memory": 64 * 1024**3, "time_limit": 5430},
            env={"OMP_NUM_THREADS": "1", "HF_TOKEN": "secret:env:HF_TOKEN"},
            data={"train": InputChannel("/shared/data/train")},
            output="/shared/out",
            checkpoints="/shared/checkpoints",
        ),
        Options(
            partition="gpu",
            account="lab42",
            qos="high",
            constraint="a100&nvlink",
            reservation="tuesday",
            nodelist="node[01-02]",
            exclude="node07",
            exclusive=True,
            python=PYTHON,
            licenses="matlab:2",
            mail_type="END,FAIL",
            mail_user="ada@example.org",
            modules=("cuda/12.8", "it's"),
            setup=("ulimit -c 0",),
            signal_seconds=300,
            restarts=Restarts(time_limit=5, error=2),
            extra={"nice": "7", "contiguous": "", "comment": 'a\\b "c"'},
            srun=("--auto-resume=1", "--comment=it's here"),
        ),
    ),
    "pyxis": (
        job(
            resources={"nodes": 2, "cpus_per_node": 4}, data={"train": InputChannel("/shared/data")}
        ),
        Options(container=Container("nvcr.io#nvidia/pytorch:25.01-py3", mounts=("/a b:/b",))),
    ),
    "apptainer": (
        job(resources={"gpus_per_node": 1}, output="/shared/out"),
        Options(container=Container("/shared/my image.sif", "apptainer", ("/scratch",))),
    ),
    "array": (
        job(output="/shared/out"),
        Options(python=PYTHON, array=1000, at_once=8),
    ),
    "gres": (
        job(resources={"gpus_per_node": 4, "memory": 1024**2 + 1, "time_limit": 60}),
        Options(python=PYTHON, gres_style="gres", restarts=NEVER),
    ),
    "module": (
        job(entrypoint=Entrypoint(module="package.train", args=("--flag", "--flag", "a b"))),
        Options(python=PYTHON),
    ),
    "hostile": (
        job(
            entrypoint=Entrypoint("it's a script.py", args=HOSTILE),
            env={"A": "a\nb", "B": "$(id)", "C": "\n#SBATCH --hold\n", "D": "'\"\\"},
            data={"train": InputChannel("/a b/$(id)")},
        ),
        Options(python="/opt/my python/bin/python3", extra={"comment": "it's #1 $(id)"}),
    ),
    "colon": (
        job(entrypoint=Entrypoint("train.py", args=("a", ":", "it's"))),
        Options(python=PYTHON),
    ),
}
"""Jobs with a golden file each, by its name."""
