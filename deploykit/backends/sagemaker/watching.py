"""A training job after it was sent: found by name, its status, its logs, its end."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploykit import logfiles
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.request import results
from deploykit.errors import BackendUnavailable, DeploykitError, NotFound, NotPermitted, TryAgain
from deploykit.model import Handle, LogLine, State, Status

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_LAST_MOMENT = 253402300799000
"""Milliseconds since the epoch, at the end of the year 9999."""
_PAUSE = 5.0
"""Seconds between two looks at a log that is followed."""
_PATIENCE = 900.0
"""Seconds for which following goes on without an answer: time to log in again."""
_LAST_CODE = 255
_NODE = re.compile(r".*/algo-(\d{1,9})-.*")
_EXIT_CODE = re.compile(r"[Ee]xit ?[Cc]ode:? ?\"?(\d{1,3})\b")
_STATES = {
    "InProgress": State.RUNNING,
    "Completed": State.SUCCEEDED,
    "Failed": State.FAILED,
    "Stopping": State.STOPPING,
    "Stopped": State.CANCELLED,
}
_WAITING = {
    "Pending": "waiting for machines",
    "Starting": "starting",
    "LaunchingMLInstances": "launching the machines",
    "PreparingTrainingStack": "preparing the machines",
    "Downloading": "downloading the data",
    "DownloadingTrainingImage": "downloading the container image",
    "Interrupted": "interrupted: the spot machines were taken away",
    "Restarting": "restarting",
}
_OVER_TIME = {
    "MaxRuntimeExceeded": "it reached its time limit",
    "MaxWaitTimeExceeded": "no machine came within max_wait",
}
_REASONS = {
    "Training": "training",
    "Uploading": "uploading the results",
    "Completed": "completed",
    "Stopped": "it was stopped",
    "Stopping": "it is being stopped",
    "Failed": "failed",
}


def handle(run: str, folder: Path, target: str) -> Handle:
    return Handle("sagemaker", target, run, run, str(folder))


def find(run: str, folder: Path, target: str) -> Handle | None:
    """The job named `run`; None where there is none, or one that `folder` has not sent."""
    try:
        request = json.loads((folder / "plan.json").read_text())
    except FileNotFoundError:  # sent from another machine
        request = None
    except ValueError:  # half written: nothing had been sent
        return None
    other = contradictions(run, target, request)
    return handle(run, folder, target) if other == [] else None


def contradictions(run: str, target: str, request: Any) -> list[str] | None:
    """What shows that the job named `run` was not made by `request`, if there is such a job.

    Any user of the account can create a job of that name. Compares the fields that the service
    returns unchanged, or none if the request is unknown.
    """
    job = _describe(aws.client("sagemaker", target), run, target)
    if job is None or request is None:
        return None if job is None else []
    return [name for name, value in _told(request).items() if _told(job).get(name) != value]


def _told(job: Any) -> dict[str, Any]:
    """The role, image, program, arguments and output of a request or a described job."""
    return {
        "RoleArn": job.get("RoleArn"),
        "TrainingImage": job.get("AlgorithmSpecification", {}).get("TrainingImage"),
        "S3OutputPath": job.get("OutputDataConfig", {}).get("S3OutputPath"),
        **{f"HyperParameters.{key}": one for key, one in job.get("HyperParameters", {}).items()},
    }


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """The status of each, over one client a region."""
    places = sorted({one.target for one in handles})
    clients = {place: aws.client("sagemaker", place) for place in places}
    return {one: _status(_describe(clients[one.target], one.id, one.target)) for one in handles}


def cancel(handle: Handle) -> None:
    """Stop the job. Raises NotFound where there is none."""
    from botocore.exceptions import ClientError

    client = aws.client("sagemaker", handle.target)
    with aws.errors(handle.target):
        try:
            client.stop_training_job(TrainingJobName=handle.id)
        except ClientError as error:
            if _is_missing(error):
                raise NotFound(f"SageMaker has no training job {handle.id}") from error
            if aws.code(error) != "ValidationException" or "status" not in aws.message(error):
                raise  # "The request was rejected because the training job is in status ..."


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """Lines from all machines, by time; with `follow`, until the job has ended.

    CloudWatch is seconds late, so then it goes on until a look brings nothing new. Where AWS or
    the login fails meanwhile, it goes on where it was, unless that lasts for `_PATIENCE` seconds.
    """
    tokens: dict[str, str] = {}
    looked, failing, client = False, None, None
    while True:
        found: list[tuple[tuple[int, int], LogLine]] = []
        try:
            last = not follow or status([handle])[handle].state.final
            client = client or aws.client("logs", handle.target)
            _look(client, handle, tokens, found)
            looked, failing = True, None
        except (BackendUnavailable, NotPermitted, TryAgain) as error:
            if not looked:
                raise
            last, failing = False, _bear(error, failing)
            client = None  # a new one finds a new login
        for _, line in sorted(found, key=lambda pair: pair[0]):
            yield line
        if last and not (follow and found):
            return
        time.sleep(_PAUSE)


def _look(
    client: Any,
    handle: Handle,
    tokens: dict[str, str],
    found: list[tuple[tuple[int, int], LogLine]],
) -> None:
    """Append what is new."""
    with aws.errors(handle.target):
        for stream in _streams(client, handle.id):
            for line in _new_lines(client, stream, tokens):
                found.append(line)  # noqa: PERF402 - what came before an error is kept


def _bear(error: DeploykitError, since: float | None) -> float:
    """Since when there has been no answer, said once, on standard error."""
    now = time.monotonic()
    if since is None:
        hint = f"; {error.hint}" if error.hint else ""
        text = f"no new lines for now: {error}{hint}. They follow once it works again."
        logging.getLogger(__name__).warning(text)
    elif now > since + _PATIENCE:
        raise error
    return since or now


def _describe(client: Any, run: str, target: str) -> Any:
    """DescribeTrainingJob's answer; None where there is no such job."""
    from botocore.exceptions import ClientError

    with aws.errors(target):
        try:
            return client.describe_training_job(TrainingJobName=run)
        except ClientError as error:
            if _is_missing(error):
                return None
            raise


def _is_missing(error: BaseException) -> bool:
    text = aws.message(error).lower()
    return aws.code(error) in {"ValidationException", "ResourceNotFound"} and (
        "not found" in text or "could not find" in text
    )


def _status(job: Any) -> Status:
    if job is None:
        return Status(State.UNKNOWN, reason="SageMaker has no job of this name")
    primary, secondary = _word(job, "TrainingJobStatus"), _word(job, "SecondaryStatus")
    state = _STATES.get(primary, State.UNKNOWN)
    if primary == "InProgress" and secondary in _WAITING:
        state = State.QUEUED
    if secondary in _OVER_TIME:
        state = State.FAILED if state.final else state
    reason = _word(job, "FailureReason") or (_WAITING | _OVER_TIME | _REASONS).get(secondary, "")
    return Status(
        state,
        native=f"{primary}/{secondary}" if secondary else primary,
        reason=f"{reason}{_money(job)}",
        exit_code=_exit_code(state, reason),
        started=_moment(job, "TrainingStartTime"),
        finished=_moment(job, "TrainingEndTime"),
        output=_output(job),
    )


def _word(job: Any, name: str) -> str:
    """A text of an answer; empty where it is missing, or of another kind."""
    value = job.get(name)
    return value if isinstance(value, str) else ""


def _moment(job: Any, name: str) -> datetime | None:
    value = job.get(name)
    return value if isinstance(value, datetime) else None


def _output(job: Any) -> str:
    try:
        return results(job)
    except (AttributeError, KeyError, TypeError):
        return ""


def _money(job: Any) -> str:
    """Seconds that are paid for, and what spot machines saved."""
    trained, billed = job.get("TrainingTimeInSeconds"), job.get("BillableTimeInSeconds")
    if not isinstance(trained, int) or not isinstance(billed, int) or trained <= 0:
        return ""
    saved = f", {100 - 100 * billed // trained}% less than on demand" if billed < trained else ""
    return f"; {billed} s of {trained} s are billed{saved}"


def _exit_code(state: State, reason: str) -> int | None:
    """The program's exit code, which stands nowhere but in the sentence about the failure."""
    if state is State.SUCCEEDED:
        return 0
    match = _EXIT_CODE.search(reason)
    code = int(match[1]) if match and state is State.FAILED else None
    return code if code is None or code <= _LAST_CODE else None


def _streams(client: Any, run: str) -> Iterator[str]:
    """Names of the job's log streams; none before the first machine has started."""
    pages = client.get_paginator("describe_log_streams").paginate(
        logGroupName=LOG_GROUP, logStreamNamePrefix=f"{run}/"
    )
    try:
        for page in pages:
            yield from (stream["logStreamName"] for stream in page["logStreams"])
    except client.exceptions.ResourceNotFoundException:
        return


def _new_lines(
    client: Any, stream: str, tokens: dict[str, str]
) -> Iterator[tuple[tuple[int, int], LogLine]]:
    """Events after the stream's token, each with its place in the order of all."""
    match = _NODE.fullmatch(stream)
    node = int(match[1]) - 1 if match else None
    count = itertools.count()
    while True:
        after = {"nextToken": tokens[stream]} if stream in tokens else {}
        answer = client.get_log_events(
            logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **after
        )
        for event in answer.get("events", ()):
            yield (_milliseconds(event), next(count)), _line(event, node)
        token = answer.get("nextForwardToken")
        if token is None or token == tokens.get(stream):
            return
        tokens[stream] = token


def _line(event: Any, node: int | None) -> LogLine:
    line = logfiles.parse(_word(event, "message").rstrip("\n"), node)
    if line.time is not None:
        return line
    return replace(line, time=datetime.fromtimestamp(_milliseconds(event) / 1000, UTC))


def _milliseconds(event: Any) -> int:
    """When a line was written, since the epoch; 0 where that is no time of this world."""
    value = event.get("timestamp")
    return value if isinstance(value, int) and 0 <= value <= _LAST_MOMENT else 0
