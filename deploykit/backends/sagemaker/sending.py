"""Send a planned request: the source first, then the SDK's opinion, then the request, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit import private, shell
from deploykit.backends.sagemaker import aws, sdk, sdk_terms, watching
from deploykit.backends.sagemaker import request as rendering
from deploykit.errors import BackendUnavailable, DeploykitError, SubmitRefused, Uncertain
from deploykit.model import Handle, Plan

_IMPORT_TIME = 300
"""Seconds that the SDK may take; a cold file cache on a slow disk takes tens."""
_SHOWN = 200


def submit(plan: Plan, folder: Path) -> Handle:
    """Send exactly `plan.text`, through boto3, after the SDK (where installed) has agreed."""
    compare(plan, folder)
    upload(plan)
    request = json.loads(plan.text)
    client = aws.client("sagemaker", plan.place)
    with aws.errors(plan.place):
        try:
            client.create_training_job(**request)
        except Exception as error:
            if aws.code(error) != "ResourceInUse" and not aws.uncertain(error):
                raise
            return _sent_after_all(plan, folder, error)
    return watching.handle(plan.run, folder, plan.place)


def _sent_after_all(plan: Plan, folder: Path, error: Exception) -> Handle:
    """The job that a repeated or broken request has left behind."""
    try:
        found = watching.find(plan.run, folder, plan.place)
    except DeploykitError as second:
        raise Uncertain(
            f"AWS broke off while it took the job {plan.run}, and cannot be asked whether it has it"
            f": {error}",
            hint="deploykit status finds out, by the job's name",
        ) from second
    if found is None:
        raise error
    return found


def upload(plan: Plan) -> None:
    """Put the source archive into the bucket, unless one with the same content is there."""
    client = aws.client("s3", plan.place)
    bucket = plan.options.bucket
    key = rendering.code_key(plan.options, plan.bundle.hash)
    with aws.errors(plan.place):
        if _exists(client, bucket, key):
            return
        with plan.bundle.store().open("rb") as archive:
            client.put_object(Bucket=bucket, Key=key, Body=archive)


def _exists(client: Any, bucket: str, key: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        # 403 is what one who may not list the bucket gets for a missing key
        if aws.code(error) in {"404", "403", "NoSuchKey"}:
            return False
        raise
    return True


def compare(plan: Plan, folder: Path) -> None:
    """Raise SubmitRefused where the SDK would send anything but `plan.text`."""
    if plan.options.sender == "boto3":
        return
    if not sdk.available():
        if plan.options.sender == "sdk":
            raise BackendUnavailable(
                "the SageMaker SDK 2.x is not installed, and sagemaker.sender asks for it",
                hint="pip install 'deploykit[sagemaker]', or sender: auto",
            )
        return
    different = list(differences(json.loads(plan.text), asked_sdk(plan, folder)))
    if different:
        raise SubmitRefused(
            "the SageMaker SDK would send something else: " + "; ".join(different),
            hint="please report this; sagemaker.sender: boto3 sends the plan as it is",
        )


def asked_sdk(plan: Plan, folder: Path) -> Any:
    """The request that the SDK's estimator would send for this plan."""
    home = private.folder(folder / "sdk")
    question, answer = home / "arguments.json", home / "request.json"
    asked = sdk_terms.arguments(plan.job, plan.options, run=plan.run, bundle=plan.bundle.hash)
    private.write(question, json.dumps(asked))
    answer.unlink(missing_ok=True)
    ran = shell.run(
        sdk.command(question, answer), cwd=home, env=sdk.surroundings(home), timeout=_IMPORT_TIME
    )
    if ran.code != 0 or not answer.exists():
        raise BackendUnavailable(
            f"the SageMaker SDK broke: {(ran.err or ran.out).strip()[-_SHOWN:]}",
            hint="repair it, or set sagemaker.sender: boto3",
        )
    result = json.loads(answer.read_text())
    if "refused" in result:
        raise SubmitRefused(f"the SageMaker SDK refuses this job: {result['refused']}")
    return result["request"]


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Each field that is not the same in two requests, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            place = f"{path}.{name}" if path else name
            yield from differences(ours.get(name), theirs.get(name), place)
    elif ours != theirs:
        yield f"{path}: planned {_short(ours)}, the SDK {_short(theirs)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
