"""Plan and submit: render the request, upload source and data, create the training job."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from deploykit.backends.sagemaker import aws, estimator, jobs, request, uploads
from deploykit.backends.sagemaker.options import (
    Options,
    launched,
    local_data,
    machines,
    preferred,
    region,
)
from deploykit.bundle import data_folder
from deploykit.job import environments
from deploykit.job.model import Bundle, Handle, JobSpec, Plan, Problem
from deploykit.lib import progress
from deploykit.lib.errors import DeploykitError, JobFileError, SubmitRefused, Uncertain

_SETUP_PY = Problem(
    "source",
    "contains setup.py: the container would install the source as a package and refuse to run it "
    "with torch_distributed",
    "add setup.py to .deploykitignore, or choose another source folder",
)


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """Render the request. The job must have passed `check`, which is not repeated here.

    Reads the folders of `data` on this machine that have changed since they were last read.

    Raises JobFileError if the container would install the source instead of running it, or if a
    file of `data` cannot be uploaded.
    """
    options = launched(job, options)
    if options.by_torchrun and any(entry.path == "setup.py" for entry in bundle.entries):
        raise JobFileError("the job for SageMaker", [_SETUP_PY])
    local = local_data(job, options).items()
    folders = [data_folder.scan(channel, location) for channel, location in local]
    data = tuple(one._replace(target=options.data_location(one.hash)) for one in folders)
    rendered = request.render(job, options, run=run, bundle=bundle.hash, data=data)
    text = " or ".join(
        " + ".join(f"{count} x {kind}" for count, kind in machines(job, alone))
        for alone in preferred(options)
    )
    spot = ", spot" if options.spot else ""
    installed = request.installed(job)
    packages = f"; {environments.sentence(installed)}" if installed else ""
    account, role = options.role.split(":")[4], options.role.rpartition("/")[2]
    sent_with = str(options.credentials)
    return Plan(
        backend="sagemaker",
        target=region(options) or "",
        run=run,
        text=json.dumps(rendered, indent=2, ensure_ascii=False) + "\n",
        language="json",
        job=job,
        options=options,
        bundle=bundle,
        output=request.results(rendered),
        summary=f"sagemaker: {text}{spot}, role {role} in account {account}, {region(options)}"
        + (f", sent with {sent_with}" if sent_with else "")
        + packages,
        sent_with=sent_with,
        data=data,
    )


def submit(plan: Plan, folder: Path) -> Handle:
    """Create the training job that `plan.text` describes.

    Raises SubmitRefused if the service or the user's SDK refuses the request, or if a different job
    of the same name exists; Uncertain if the service may have accepted the request but did not
    answer; BackendUnavailable, NotPermitted or TryAgain if AWS cannot be used.
    """
    client = aws.client("sagemaker", plan.target, plan.options.credentials)
    if plan.options.sender == "sdk":
        create = estimator.sender(plan, client)
    else:
        create = partial(client.create_training_job, **json.loads(plan.text))
    uploads.upload(plan)
    with aws.errors(plan.target):
        try:
            created = create()
        except Exception as error:
            if aws.code(error) != "ResourceInUse" and not aws.may_have_succeeded(error):
                raise
            _require_submitted(plan, error)
        else:
            jobs.record(folder, created["TrainingJobArn"])
            payer = created["TrainingJobArn"].split(":")[4:5]
            if payer != [plan.options.role.split(":")[4]]:
                where = f"runs in account {(payer or ['unknown'])[0]}, which is billed for it,"
                progress.warn(f"warning: {plan.run} {where} instead of the account of its role")
    return Handle("sagemaker", plan.target, plan.run, plan.run, str(folder))


def _require_submitted(plan: Plan, error: Exception) -> None:
    """Raise unless a repeated or interrupted request has created the job of this plan."""
    try:
        differing = jobs.differing_fields(
            plan.run, plan.target, json.loads(plan.text), plan.options.credentials
        )
    except DeploykitError as second:
        raise _uncertain(plan, error, "could not be asked whether it exists") from second
    if differing is None:
        if aws.was_lost(error):
            raise _uncertain(plan, error, "does not list it yet") from error
        raise error
    if differing:
        raise SubmitRefused(
            f"a different training job {plan.run} already exists in {plan.target}: "
            f"{', '.join(differing)} differ from the plan",
            hint="choose another --run; to see that job: "
            f"aws sagemaker describe-training-job --training-job-name {plan.run}",
        )


def _uncertain(plan: Plan, error: Exception, outcome: str) -> Uncertain:
    return Uncertain(
        f"the request to create the job {plan.run} failed ({error}), and AWS {outcome}",
        hint=f"`deploykit status {plan.run}` looks the job up by its name; "
        f"submitting again with --run {plan.run} never starts a second job",
    )
