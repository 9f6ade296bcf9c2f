"""Plan and submit: render the request, upload the source, create the training job."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from deploykit.backends.sagemaker import aws, estimator, jobs, request
from deploykit.backends.sagemaker.options import Options, launched, machines, region
from deploykit.bundle import archive as bundles
from deploykit.job import environments
from deploykit.job.model import Bundle, Handle, JobSpec, Plan, Problem
from deploykit.lib import progress
from deploykit.lib.errors import (
    BackendUnavailable,
    DeploykitError,
    JobFileError,
    NotPermitted,
    SubmitRefused,
    TryAgain,
    Uncertain,
)

_SETUP_PY = Problem(
    "source",
    "contains setup.py: the container would treat the source as a package to install, and refuse "
    "to run it with torch_distributed",
    "add setup.py to .deploykitignore, or choose another source folder",
)


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """Render the request. The job must have passed `check`, which is not repeated here.

    Raises JobFileError if the container would install the source instead of running it.
    """
    options = launched(job, options)
    if options.by_torchrun and any(entry.path == "setup.py" for entry in bundle.entries):
        raise JobFileError("the job for SageMaker", [_SETUP_PY])
    rendered = request.render(job, options, run=run, bundle=bundle.hash)
    text = " + ".join(f"{count} x {kind}" for count, kind in machines(job, options))
    spot = ", spot" if options.spot else ""
    installed = request.installed(job)
    packages = f"; {environments.sentence(installed)}" if installed else ""
    account, role = options.role.split(":")[4], options.role.rpartition("/")[2]
    return Plan(
        backend="sagemaker",
        target=region(options) or "",
        run=run,
        text=json.dumps(rendered, indent=2) + "\n",
        language="json",
        job=job,
        options=options,
        bundle=bundle,
        output=request.results(rendered),
        summary=f"sagemaker: {text}{spot}, role {role} of account {account}, {region(options)}"
        + packages,
    )


def submit(plan: Plan, folder: Path) -> Handle:
    """Create the training job that `plan.text` describes.

    Raises SubmitRefused if the service or the user's SDK refuses the request, or if a different job
    of the same name exists; Uncertain if the service may have accepted the request but did not
    answer; BackendUnavailable, NotPermitted or TryAgain if AWS cannot be used.
    """
    client = aws.client("sagemaker", plan.target)
    if plan.options.sender == "sdk":
        create = estimator.sender(plan, client)
    else:
        create = partial(client.create_training_job, **json.loads(plan.text))
    upload(plan)
    with aws.errors(plan.target):
        try:
            created = create()
        except Exception as error:
            if aws.code(error) != "ResourceInUse" and not aws.may_have_succeeded(error):
                raise
            _require_submitted(plan, error)
        else:
            payer = created["TrainingJobArn"].split(":")[4:5]
            if payer != [plan.options.role.split(":")[4]]:
                where = f"runs in account {(payer or ['unknown'])[0]}, which pays for it"
                progress.warn(f"warning: {plan.run} {where}, not in that of its role")
    return Handle("sagemaker", plan.target, plan.run, plan.run, str(folder))


def _require_submitted(plan: Plan, error: Exception) -> None:
    """Raise unless a repeated or interrupted request has created the job of this plan."""
    try:
        differing = jobs.differing_fields(plan.run, plan.target, json.loads(plan.text))
    except DeploykitError as second:
        raise _uncertain(plan, error, "did not say whether the job exists") from second
    if differing is None:
        if aws.was_lost(error):
            raise _uncertain(plan, error, "has no such job yet") from error
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
        f"the request to create the job {plan.run} failed, and AWS {outcome}: {error}",
        hint=f"`deploykit status {plan.run}` looks the job up by its name; "
        f"submitting again with --run {plan.run} never starts a second job",
    )


def upload(plan: Plan) -> None:
    """Put the source archive into the bucket, unless S3 has it with the same checksum.

    A name proves nothing: anyone with write access to the bucket can give an archive that name.
    S3 stores the SHA-256 of an upload if asked to, and refuses bytes that do not match it:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html

    Raises NotPermitted if the bucket belongs to another account, and TryAgain if the archive was
    damaged in transit.
    """
    archive = bundles.store(plan.bundle)
    with archive.open("rb") as file:
        checksum = base64.b64encode(hashlib.file_digest(file, "sha256").digest()).decode()
    target = {
        "Bucket": plan.options.bucket,
        "Key": plan.options.code_key(plan.bundle.hash),
        "ExpectedBucketOwner": plan.options.owner,
    }
    client = aws.client("s3", plan.target)
    with aws.errors(plan.target):
        if _stored_checksum(client, target, plan.target) != checksum:
            _put(client, target, archive, checksum)


def _stored_checksum(client: Any, target: dict[str, str], region: str) -> str | None:
    """The SHA-256 that S3 stores for the object; None without object or checksum."""
    try:
        head = client.head_object(**target, ChecksumMode="ENABLED")
    except Exception as error:
        # S3 answers 403 for a missing key without permission to list the bucket
        if aws.code(error) in {"404", "403", "NoSuchKey"}:
            return None
        if aws.code(error) == "400":  # without a body: STS says whether the login has expired
            with contextlib.suppress(BackendUnavailable, TryAgain):
                aws.account(region)
        raise
    checksum: str | None = head.get("ChecksumSHA256")
    return checksum


class _Watched(io.FileIO):
    """A file that reports how much of it was read."""

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(-1 if size is None else size)
        if progress.show is not None:
            progress.show("sending", self.tell(), os.fstat(self.fileno()).st_size)
        return piece


def _put(client: Any, target: dict[str, str], archive: Path, checksum: str) -> None:
    try:
        with archive.open("rb") if progress.show is None else _Watched(archive) as file:
            expected = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": checksum}
            client.put_object(**target, Body=file, **expected)
    except Exception as error:
        if aws.code(error) not in aws.DENIED:
            raise
        bucket, owner = target["Bucket"], target["ExpectedBucketOwner"]
        raise NotPermitted(
            f"S3 denied the upload to the bucket {bucket} of account {owner}: {aws.message(error)}",
            hint="allow your user or role s3:PutObject there; if the bucket belongs to another "
            "account that you trust, set sagemaker.bucket_owner",
        ) from error
