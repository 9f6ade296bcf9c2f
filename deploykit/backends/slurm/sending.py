"""Hand a plan to sbatch, through submitit."""

from __future__ import annotations

import contextlib
import io
import locale
import os
import shutil
import time
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit import bundle as bundles
from deploykit import contract, paths
from deploykit.backends.slurm import machine, remote, script, sent, watching
from deploykit.backends.slurm.sent import Place
from deploykit.errors import BackendUnavailable, DeploykitError, SubmitRefused, TryAgain
from deploykit.model import Handle, Plan

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

_PORT_FILE = "rendezvous.json"
"""Where the first node tells the others the port; one that exists shows its changes at once."""

_HINTS = {
    "invalid partition": "set slurm.partition to one that `sinfo -s` lists",
    "account": "set slurm.account; `sacctmgr show associations user=$USER` lists yours",
    "qos": "set slurm.qos; `sacctmgr show associations user=$USER` lists yours",
    "time limit": "lower resources.time_limit; `sinfo -o '%P %l'` lists the partitions' limits",
    "more processors": "lower resources.cpus_per_node or resources.nodes",
    "node count": "lower resources.nodes; `sinfo -s` lists what each partition has",
    "memory specification": "lower resources.memory; `sinfo -N -o '%N %m'` lists MiB per node",
    "node configuration": "ask for less per node; see `sinfo -N -o '%N %c %m %G'`",
    "invalid feature": "set slurm.constraint to features that `sinfo -o '%N %f'` lists",
    "dependency problem": "a run of slurm.after is forgotten by Slurm; leave it out if it did well",
    "mail-type": "correct slurm.mail_type; `man sbatch` lists the events",
    "license": "correct slurm.licenses; `scontrol show licenses` lists them",
    "node name": "correct slurm.nodelist and slurm.exclude; `sinfo -N` lists the nodes",
    "reservation": "correct slurm.reservation; `scontrol show reservation` lists them",
    "(gres)": "lower resources.gpus_per_node, or try the other slurm.gres_style",
    "option '--": "correct slurm.extra; `sbatch --help` lists the options",
    "specification": "correct slurm.extra; `man sbatch` describes the options",
    "denied": "you may not use this partition, account or reservation; ask the site",
    "not permitted": "you may not use this partition, account or reservation; ask the site",
    "policy": "a limit of your account or quality of service is reached; `sacctmgr show qos`",
}
"""What to do about a refusal, by a part of sbatch's own sentence in lower case; first wins."""

_SETTLE = (2.0, 4.0, 8.0)
"""Pauses before asking a controller that was too busy to answer, in seconds."""

_AWAY = (
    *("unable to contact slurm controller", "could not establish a configuration source"),
    *("connection refused", "communication connection failure", "protocol authentication error"),
)
_UNSURE = ("socket timed out", "zero bytes were transmitted", "timed out", "connection reset")
_BUSY = ("temporarily unable", "try again", "resource temporarily unavailable")

_SITE_DEFAULTS = {f"SBATCH_{name.upper()}": name for name in remote.SITE_DEFAULTS}
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "DEPLOYKIT_HOME"}
_LAUNCHERS = ("SLURM", "SBATCH_", "SRUN_", "DEPLOYKIT_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}


def submit(plan: Plan, folder: Path) -> Handle:
    paths.private_folder(folder / "sbatch")
    if plan.options.host is None:
        _check_here(plan)
        bundles.unpack(bundles.store(plan.bundle), folder / "source")
        for name in contract.FOLDERS:
            paths.private_folder(folder / name)
        paths.touch(folder / _PORT_FILE)
    else:
        place = Place(plan.options.host, str(plan.options.run_folder(plan.run)))
        sent.record_place(folder, place)
        remote.deliver(plan, place)
    if plan.options.array is not None:
        sent.record_tasks(folder, plan.options.array)
    paths.write(folder / watching.CLUSTER, watching.cluster(plan.options.host) + "\n")
    job = _sbatch(plan, folder)
    sent.record(folder, job)
    return Handle("slurm", plan.target, job, plan.run, str(folder))


def unwanted(environ: Iterable[str], text: str) -> list[str]:
    """Variables that must not reach sbatch: it would pass them on, or put them above the script.

    A submit from inside another job, or from a rank of one, has many.
    """
    return sorted(
        name
        for name in environ
        if (name.startswith(_LAUNCHERS) or name in _RANKS)
        and name not in _KEPT
        and (name not in _SITE_DEFAULTS or f"#SBATCH --{_SITE_DEFAULTS[name]}=" in text)
    )


def refusal(said: str) -> DeploykitError:
    """The error that sbatch's complaint stands for."""
    sentence, lower = watching.spoken(said), said.lower()
    if any(part in lower for part in _AWAY):
        hint = "is this a machine of the cluster, and is it up?"
        return BackendUnavailable(f"sbatch: {sentence}", hint=hint)
    if any(part in lower for part in (*_UNSURE, *_BUSY)):
        return TryAgain(f"sbatch: {sentence}", hint="the cluster is busy; submit again")
    what_to_do = next((text for part, text in _HINTS.items() if part in lower), None)
    return SubmitRefused(f"Slurm refused the job: {sentence}", hint=what_to_do)


def unsure(said: str) -> bool:
    """Whether the job may have been taken although sbatch complained."""
    return any(part in said.lower() for part in _UNSURE)


def _check_here(plan: Plan) -> None:
    for program in ("sbatch", "squeue", "scontrol"):
        if shutil.which(program) is None:
            raise BackendUnavailable(
                f"the program {program!r} is not on PATH",
                hint="submit from a login node of the cluster",
            )
    # submitit writes the script in the locale's encoding
    if not plan.text.isascii() and locale.getencoding().lower() != "utf-8":
        raise SubmitRefused(
            f"the script has letters that the encoding {locale.getencoding()} may not have",
            hint="export LC_ALL=C.UTF-8",
        )


def _sbatch(plan: Plan, folder: Path) -> str:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    complaint = io.StringIO()
    try:
        # submitit prints what sbatch says as well as raising it
        with contextlib.redirect_stderr(complaint):
            executor = _executor(plan, folder)
            text = script.command(plan.job, plan.options, run=plan.run)
            return str(executor._submit_command(text).job_id)  # noqa: SLF001
    except (FailedJobError, FailedSubmissionError) as error:
        said = str(error)
        words = [line for line in said.splitlines() if line.startswith("sbatch: ")]
        if plan.options.host is not None and words:
            said = "\n".join(words)
        # where ssh itself failed, sbatch said nothing
        if not unsure(said) and (plan.options.host is None or words):
            raise refusal(said) from error
        return _found(plan, folder, said)


def _found(plan: Plan, folder: Path, said: str) -> str:
    """The id of a job that the controller took although sbatch gave up waiting for its answer.

    One that answers again may still come to it.
    """
    answered = False
    for pause in _SETTLE:
        time.sleep(pause)
        with contextlib.suppress(BackendUnavailable):
            handle = watching.find(plan.run, folder, plan.target)
            if handle is not None:
                return handle.id
            answered = True
            if plan.options.host is not None:
                break  # whoever sends there holds a lock, so this is the last word
    if answered:
        raise refusal(said)
    raise TryAgain(
        f"Slurm does not answer, and may or may not have taken the job: {watching.spoken(said)}",
        hint=f"`deploykit submit --run {plan.run}` with the same job finds out, and starts it once",
    )


def _executor(plan: Plan, folder: Path) -> SlurmExecutor:
    base = type(script.offline(folder))

    class Exactly(base):  # type: ignore[misc,valid-type]
        """Submits what it renders, if that is the plan's text."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            text = str(super()._make_submission_file_text(command, uid))
            if text != plan.text:
                raise SubmitRefused(
                    f"submitit would send something else: {_difference(plan.text, text)}",
                    hint="please report this, with the version of submitit",
                )
            return text

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            paths.make_private(submission_file_path)
            if (place := sent.place(folder)) is not None:
                return remote.sbatch(plan, place)
            argv = super()._make_submission_command(submission_file_path)
            drop = unwanted(os.environ, plan.text)
            return ["env", *(word for name in drop for word in ("-u", name)), *argv]

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            said = string.encode() if isinstance(string, str) else string
            answer = machine.after_mark(said) if plan.options.host else said
            found = super(Exactly, Exactly)._get_job_id_from_submission_command(answer.decode())
            return str(found)

    executor = Exactly(folder / "sbatch")
    executor.update_parameters(**script.parameters(plan.job, plan.options, run=plan.run))
    return executor


def _difference(ours: str, theirs: str) -> str:
    """The first line that is not the same in both."""
    pairs = zip_longest(ours.split("\n"), theirs.split("\n"))
    mine, other = next((a, b) for a, b in pairs if a != b)
    return f"planned {mine!r}, submitit {other!r}"
