"""Send a planned request: the source first, then the SDK's opinion, then the request, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploykit import paths, shell
from deploykit.backends.sagemaker import aws, sdk, sdk_terms, uploading, watching
from deploykit.errors import BackendUnavailable, DeploykitError, SubmitRefused, Uncertain
from deploykit.model import Handle, Plan

_IMPORT_TIME = 300
"""Seconds that the SDK may take; a cold file cache on a slow disk takes tens."""
_SHOWN = 200


def submit(plan: Plan, folder: Path) -> Handle:
    """Send exactly `plan.text`, through boto3, after the SDK (where installed) has agreed."""
    compare(plan, folder)
    uploading.upload(plan)
    request = json.loads(plan.text)
    client = aws.client("sagemaker", plan.target)
    with aws.errors(plan.target):
        try:
            client.create_training_job(**request)
        except Exception as error:
            if aws.code(error) != "ResourceInUse" and not aws.uncertain(error):
                raise
            _check_sent(plan, error)
    return watching.handle(plan.run, folder, plan.target)


def _check_sent(plan: Plan, error: Exception) -> None:
    """Raise unless a repeated or broken request has left the job of this plan behind."""
    try:
        other = watching.contradictions(plan.run, plan.target, json.loads(plan.text))
    except DeploykitError as second:
        raise Uncertain(
            f"AWS broke off while it took the job {plan.run}, and cannot be asked whether it has it"
            f": {error}",
            hint="deploykit status finds out, by the job's name",
        ) from second
    if other is None:
        raise error
    if other:
        raise SubmitRefused(
            f"a different training job {plan.run} already exists in {plan.target}: "
            f"{', '.join(other)} differ from the plan",
            hint="choose another --run; to see that job: "
            f"aws sagemaker describe-training-job --training-job-name {plan.run}",
        )


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
    home = paths.private_folder(folder / "sdk")
    question, answer = home / "arguments.json", home / "request.json"
    asked = sdk_terms.arguments(plan.job, plan.options, run=plan.run, bundle=plan.bundle.hash)
    paths.write(question, json.dumps(asked))
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
