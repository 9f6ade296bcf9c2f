"""Monitor training jobs: find them by name, query their status, read their logs, stop them."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.options import environment_region
from deploykit.backends.sagemaker.request import results
from deploykit.cost import cap
from deploykit.job.model import NO_JOB, Handle, LogLine, State, Status
from deploykit.lib import paths, progress, shell
from deploykit.lib.errors import (
    BackendUnavailable,
    DeploykitError,
    NotFound,
    NotPermitted,
    TryAgain,
    UsageError,
)
from deploykit.observe import logfiles
from deploykit.observe.metrics.points import Point, final_metrics

_SENT = "training-job.json"
"""File in the run folder: what the service answered when the job was created."""
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_CONSOLES = {
    "cn-": "console.amazonaws.cn",
    "us-gov-": "console.amazonaws-us-gov.com",
    "us-iso": "",  # another network, whose consoles have no public address
    "": "console.aws.amazon.com",
}
"""Host of the AWS console, by the beginning of the region."""
_POLL_INTERVAL = 5.0
"""Seconds between two requests for new lines."""
_OUTAGE_LIMIT = 900.0
"""Seconds without an answer after which following fails: time to log in again."""
_OrderedLine = tuple[tuple[int, int], LogLine]
"""A line, and its key for sorting: milliseconds, then number within its stream."""
_NODE = re.compile(r".*/algo-(\d{1,9})-.*")
_EXIT_CODE = re.compile(r"[Ee]xit ?[Cc]ode:? ?\"?(\d{1,3})\b")
"""The program's exit code, which the service reports only in the text of the failure."""
_CAP = re.compile(r"(?:the cost cap is near|its cost cap is exhausted) \(([^()]+)\)")
"""The launcher's log line about stopping the program at the cap."""
_CAPPED_NODES = 2
"""Nodes whose logs are asked for it: all print it."""
_CLOSED = "runs on SageMaker, which does not allow access to its containers"
OTHER_ACCOUNT = (
    "use that account's credentials: set sagemaker.profile in the job file or AWS_PROFILE, or run "
    "`aws sso login`"
)
_NEXT_RUN = """\
to allow access in the next run: --set sagemaker.remote_debug=true
--debug makes PyTorch's flight recorder write a dump when a collective times out"""
_INSIDE = """\
in the session, for each process of your script: pip install py-spy; py-spy dump --pid PID
the other nodes are algo-2, algo-3, ...; a session requires the Session Manager plugin"""
_STATES = {
    "InProgress": State.RUNNING,
    "Completed": State.SUCCEEDED,
    "Failed": State.FAILED,
    "Stopping": State.STOPPING,
    "Stopped": State.CANCELLED,
}
_WAITING = {
    "Pending": "waiting for instances",
    "Starting": "starting",
    "LaunchingMLInstances": "launching the instances",
    "PreparingTrainingStack": "preparing the instances",
    "Downloading": "downloading the data",
    "DownloadingTrainingImage": "downloading the container image",
    "Interrupted": "interrupted: the spot instances were reclaimed",
    "Restarting": "restarting",
}
_TIMED_OUT = {
    "MaxRuntimeExceeded": "reached its time limit",
    "MaxWaitTimeExceeded": "no spot instances became available within max_wait",
}
_REASONS = {
    "Training": "training",
    "Uploading": "uploading the results",
    "Completed": "completed",
    "Stopped": "stopped",
    "Stopping": "stopping",
    "Failed": "failed",
}


def find(run: str, folder: Path, target: str) -> Handle | None:
    """The training job named `run`; None if there is none, or if another plan created it.

    The plan is the one in `folder`. Without one, the job was submitted from another computer, and
    the name alone decides. `target` is the region. Raises NotPermitted with the credentials of
    another account, which cannot tell, and what `aws.errors` raises.
    """
    try:
        request = _request(folder)
    except ValueError:  # half written: the request was not sent
        return None
    own = credentials(folder)
    differing = differing_fields(run, target, request, own)
    if differing == []:
        return Handle("sagemaker", target, run, run, str(folder))
    if differing is None and (foreign := _foreign(folder, target)):
        raise NotPermitted(foreign, hint=OTHER_ACCOUNT)
    return None


def record(folder: Path, arn: str) -> None:
    """Keep the ARN of the job, which names the account that really runs it."""
    paths.write(folder / _SENT, json.dumps({"TrainingJobArn": arn}) + "\n")


def arn(handle: Handle, role: str) -> str:
    """The ARN of a training job; one that was attached is in the account of `role`."""
    try:
        known = json.loads(Path(handle.folder, _SENT).read_text())["TrainingJobArn"]
    except (OSError, ValueError, LookupError):
        _, partition, *_, account, _ = role.split(":")
        known = f"arn:{partition}:sagemaker:{handle.target}:{account}:training-job/{handle.id}"
    return str(known)


def credentials(folder: Path) -> aws.Credentials:
    """Those that sent the run, by its job file; for an attached job, those of the environment."""
    try:
        options = json.loads((folder / backend.JOB).read_text()).get("sagemaker", {})
    except FileNotFoundError:
        return aws.ENVIRONMENT
    return aws.Credentials(options.get("profile"), options.get("assume_role"))


def client_of(service: str, handle: Handle) -> Any:
    """A client with the credentials that sent the run."""
    return aws.client(service, handle.target, credentials(Path(handle.folder)))


def _missing(handle: Handle) -> DeploykitError:
    """Why the service has no job of a run: it may be that of another account."""
    if foreign := _foreign(Path(handle.folder), handle.target):
        return NotPermitted(foreign, hint=OTHER_ACCOUNT)
    return NotFound(f"SageMaker has no training job {handle.id} in {handle.target}")


def _request(folder: Path) -> Any:
    """The request that was sent; None where it is not here, as for an attached job."""
    try:
        return json.loads((folder / "plan.json").read_text())
    except FileNotFoundError:
        return None


def described(handle: Handle) -> Any:
    """The request that created the job; where it is not here, the service's description.

    Raises NotFound if the job does not exist, and what `aws.errors` raises.
    """
    job = _request(Path(handle.folder))
    if job is None:
        job = _describe(client_of("sagemaker", handle), handle.id, handle.target)
    if job is None:
        raise _missing(handle)
    return job


def _foreign(folder: Path, where: str) -> str:
    """Whose credentials these are, if not of the job's account; empty if that is not known."""
    own = _account(folder)
    if own is None:
        return ""
    try:
        account = aws.account(where, credentials(folder))
    except DeploykitError:
        return ""
    if account == own:
        return ""
    return f"you are logged in to account {account}, but the job belongs to account {own}"


def _account(folder: Path) -> str | None:
    """The account of the job: that which created it, else that of its role; None: not known."""
    try:
        arn = json.loads((folder / _SENT).read_text())["TrainingJobArn"]
    except FileNotFoundError:
        request = _request(folder)
        if request is None:
            return None
        arn = request["RoleArn"]
    return str(arn.split(":")[4])


def differing_fields(run: str, target: str, request: Any, own: aws.Credentials) -> list[str] | None:
    """The fields in which the job named `run` differs from `request`; None if there is no job.

    Any user of the account can create a job of that name. Compares the fields that the service
    returns unchanged, or none if `request` is None.
    """
    job = _describe(aws.client("sagemaker", target, own), run, target)
    if job is None or request is None:
        return None if job is None else []
    actual = _identity(job)
    return [name for name, value in _identity(request).items() if actual.get(name) != value]


def _identity(job: Any) -> dict[str, Any]:
    """The role, image, program, arguments and output of a request or a described job."""
    return {
        "RoleArn": job.get("RoleArn"),
        "TrainingImage": job.get("AlgorithmSpecification", {}).get("TrainingImage"),
        "S3OutputPath": job.get("OutputDataConfig", {}).get("S3OutputPath"),
        **{f"HyperParameters.{key}": text for key, text in job.get("HyperParameters", {}).items()},
    }


def attach(run: str, folder: Path, target: str | None) -> Handle:
    """The training job of that name in a region, by default the environment's.

    Raises UsageError if no region is chosen, NotFound if it has no such job.
    """
    where = target or environment_region()
    if not where:
        raise UsageError("no region is set", hint="pass --target REGION, or set AWS_REGION")
    handle = find(run, folder, where)
    if handle is None:
        raise NotFound(f"SageMaker has no job {run} in {where}", hint="check the region")
    return handle


def pages(handle: Handle) -> Mapping[str, str]:
    """The job and its log in the AWS console; see `base.Capabilities.pages`."""
    region = handle.target
    console = next(host for start, host in _CONSOLES.items() if region.startswith(start))
    if not console:
        return {}
    home = f"https://{region}.{console}"
    # the console decodes what follows its # twice
    group, stream = (quote(quote(text, safe=""), safe="") for text in (LOG_GROUP, f"{handle.id}/"))
    chosen = f"$3FlogStreamNameFilter$3D{stream.replace('%', '$')}"
    return {
        "console": f"{home}/sagemaker/home?region={region}#/jobs/{quote(handle.id)}",
        "logs": f"{home}/cloudwatch/home?region={region}#logsV2:log-groups/log-group/"
        f"{group.replace('%', '$')}{chosen}",
    }


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """The status of many jobs: one request each, over one client per region and login.

    The service lists jobs only by a common part of their names, so one call cannot serve all.
    Raises what `aws.errors` raises.
    """
    logins = {handle: (handle.target, credentials(Path(handle.folder))) for handle in handles}
    clients = {login: aws.client("sagemaker", *login) for login in set(logins.values())}
    return {handle: _current(clients[logins[handle]], handle) for handle in handles}


def _current(client: Any, handle: Handle) -> Status:
    job = _describe(client, handle.id, handle.target)
    if job is not None:
        status = _status(job)
        if status.state is State.FAILED and cap.VARIABLE in job.get("Environment", {}):
            capped = _capped(handle)
            return status._replace(reason=": ".join(filter(None, [capped, status.reason])))
        return status
    reason = _foreign(Path(handle.folder), handle.target)
    reason = reason or f"SageMaker has no training job with this name in {handle.target}"
    return Status(State.UNKNOWN, NO_JOB, reason)


def _capped(handle: Handle) -> str:
    """Why a job was stopped, if its launcher did that at its cost cap; else empty.

    Only the log says so: the service knows that the program failed.
    """
    client = client_of("logs", handle)
    try:
        with aws.errors(handle.target):
            streams = _streams(client, LOG_GROUP, f"{handle.id}/")
            for stream in itertools.islice(streams, _CAPPED_NODES):
                events = client.get_log_events(logGroupName=LOG_GROUP, logStreamName=stream)
                for event in events["events"]:  # the last ones
                    if match := _CAP.search(event["message"]):
                        return f"stopped at its cost cap ({match[1]})"
    except DeploykitError:  # the service's own reason remains
        pass
    return ""


def metrics(handle: Handle) -> Iterator[Point]:
    """The last values of the job's metrics, as the service extracted them from its log.

    None before the job has ended. Raises what `aws.errors` raises.
    """
    job = _describe(client_of("sagemaker", handle), handle.id, handle.target)
    yield from final_metrics((job or {}).get("FinalMetricDataList"))


def cancel(handle: Handle) -> None:
    """Stop the training job, unless it has ended.

    Raises NotFound if it does not exist, and NotPermitted if it is of another account.
    """
    client = client_of("sagemaker", handle)
    with aws.errors(handle.target):
        try:
            client.stop_training_job(TrainingJobName=handle.id)
        except Exception as error:
            if is_missing(error):
                raise _missing(handle) from error
            if aws.code(error) != "ValidationException" or "status" not in aws.message(error):
                raise  # "The request was rejected because the training job is in status ..."


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """The job's lines in CloudWatch, from all nodes, by time; `follow`: until the job has ended.

    Raises as `group_lines`.
    """
    yield from group_lines(
        handle.target,
        credentials(Path(handle.folder)),
        LOG_GROUP,
        f"{handle.id}/",
        ended=lambda: not follow or status([handle])[handle].state.final,
        absent=lambda: _require_job(handle),
        follow=follow,
    )


def group_lines(  # noqa: PLR0913 - one keyword for each part of the question
    region: str,
    own: aws.Credentials,
    group: str,
    prefix: str,
    *,
    ended: Callable[[], bool],
    absent: Callable[[], None],
    follow: bool,
) -> Iterator[LogLine]:
    """Lines of the streams of a CloudWatch log group, by time; `follow`: until `ended` is true.

    CloudWatch lags by seconds, so following ends with the first request after the end that returns
    nothing new. If AWS or the login fails meanwhile, following resumes where it stopped; an outage
    of more than `_OUTAGE_LIMIT` seconds, or one at the start, raises BackendUnavailable,
    NotPermitted or TryAgain. `absent` is called if there are no streams at the start.
    """
    tokens: dict[str, str] = {}
    connected, outage_start, client = False, None, None
    while True:
        lines: list[_OrderedLine] = []
        try:
            is_last = ended()
            client = client or aws.client("logs", region, own)
            with aws.errors(region):
                streams = list(_streams(client, group, prefix))
                if not streams and not connected:
                    absent()
                for stream in streams:
                    for line in _new_lines(client, group, stream, tokens):
                        lines.append(line)  # noqa: PERF402 - keeps the lines before an error
            connected, outage_start = True, None
        except (BackendUnavailable, NotPermitted, TryAgain) as error:
            if not connected:
                raise
            is_last, outage_start = False, _tolerate(error, outage_start)
            client = None  # a new client reads new credentials
        yield from (line for _, line in sorted(lines, key=lambda pair: pair[0]))
        if is_last and not (follow and lines):
            return
        time.sleep(_POLL_INTERVAL)


def _require_job(handle: Handle) -> None:
    """Raise NotPermitted if a job without logs is of another account, where they are."""
    if foreign := _foreign(Path(handle.folder), handle.target):
        raise NotPermitted(foreign, hint=OTHER_ACCOUNT)


def _tolerate(error: DeploykitError, outage_start: float | None) -> float:
    """The start of the outage, by the monotonic clock. Warns once; raises if it lasts too long."""
    now = time.monotonic()
    if outage_start is None:
        hint = f"; {error.hint}" if error.hint else ""
        resumes = "Reading resumes when AWS answers again."
        progress.warn(f"cannot read new log lines: {error}{hint}. {resumes}")
    elif now > outage_start + _OUTAGE_LIMIT:
        raise error
    return outage_start or now


def _describe(client: Any, run: str, target: str) -> Any:
    with aws.errors(target):
        try:
            return client.describe_training_job(TrainingJobName=run)
        except Exception as error:
            if is_missing(error):
                return None
            raise


def is_missing(error: BaseException) -> bool:
    text = aws.message(error).lower()
    return aws.code(error) in {"ValidationException", "ResourceNotFound"} and (
        "not found" in text or "could not find" in text
    )


def _status(job: Any) -> Status:
    primary, secondary = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    state = _STATES.get(primary, State.UNKNOWN)
    if primary == "InProgress" and secondary in _WAITING:
        state = State.QUEUED
    if secondary in _TIMED_OUT:
        state = State.FAILED if state.final else state
    reason = job.get("FailureReason") or (_WAITING | _TIMED_OUT | _REASONS).get(secondary, "")
    started, billed = job.get("TrainingStartTime"), job.get("BillableTimeInSeconds")
    if secondary == "MaxWaitTimeExceeded" and started:
        reason = "did not end within max_wait, which includes waiting for spot instances"
    code = _EXIT_CODE.search(reason) if state is State.FAILED else None
    trained = job.get("TrainingTimeInSeconds")
    if trained and billed is not None:
        saved = (
            f", {100 - 100 * billed // trained}% less than on-demand" if billed < trained else ""
        )
        reason = f"{reason}; {billed} of {trained} s billed{saved}"
    return Status(
        state,
        native=f"{primary}/{secondary}" if secondary else primary,
        reason=reason,
        exit_code=0 if state is State.SUCCEEDED else int(code[1]) if code else None,
        started=started,
        finished=job.get("TrainingEndTime"),
        output=results(job) if "OutputDataConfig" in job else "",
        billed=billed,  # of one instance; for spot instances, those that on-demand would cost
    )


def _streams(client: Any, group: str, prefix: str) -> Iterator[str]:
    """Names of the log streams that begin with `prefix`; none before the first node has started."""
    pages = client.get_paginator("describe_log_streams").paginate(
        logGroupName=group, **({"logStreamNamePrefix": prefix} if prefix else {})
    )
    try:
        for page in pages:
            yield from (stream["logStreamName"] for stream in page["logStreams"])
    except client.exceptions.ResourceNotFoundException:
        return


def _new_lines(
    client: Any, group: str, stream: str, tokens: dict[str, str]
) -> Iterator[_OrderedLine]:
    match = _NODE.fullmatch(stream)
    node = int(match[1]) - 1 if match else None
    count = itertools.count()
    while True:
        after = {"nextToken": tokens[stream]} if stream in tokens else {}
        response = client.get_log_events(
            logGroupName=group, logStreamName=stream, startFromHead=True, **after
        )
        for event in response["events"]:
            yield (event["timestamp"], next(count)), _line(event, node)
        token = response.get("nextForwardToken")
        if token is None or token == tokens.get(stream):
            return
        tokens[stream] = token


def _line(event: Any, node: int | None) -> LogLine:
    line = logfiles.parse(event["message"].rstrip("\n"), node)
    if line.time is not None:
        return line
    return line._replace(time=datetime.fromtimestamp(event["timestamp"] / 1000, UTC))


def dump_by_hand(handle: Handle) -> tuple[str, str]:
    """Why `dump` cannot take the stacks of a job, and the commands that can."""
    if not _is_allowed(handle):
        return f"{handle.run} {_CLOSED}", _NEXT_RUN
    enter = shell.command(*_session(handle, 1))
    reason = f"{handle.run} runs on SageMaker, whose containers accept only SSM sessions"
    return reason, f"{enter}\n{_INSIDE}"


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> list[str]:
    """The AWS CLI's command for a shell in the container of a rank's node.

    Raises UsageError where the job allows none, and for a command: a session takes only what a
    person types.
    """
    if not _is_allowed(handle):
        raise UsageError(f"{handle.run} {_CLOSED}", hint=_NEXT_RUN.partition("\n")[0])
    session = _session(handle, 1 + rank // _ranks_per_node(handle))
    if command or not terminal:
        raise UsageError(
            f"{handle.run} runs on SageMaker, whose containers accept only an "
            "interactive SSM session, not a command",
            hint=shell.command(*session),
        )
    return session


def _session(handle: Handle, node: int) -> list[str]:
    target = f"sagemaker-training-job:{handle.run}_algo-{node}"
    session = ["aws", "ssm", "start-session", "--region", handle.target, "--target", target]
    profile = credentials(Path(handle.folder)).profile
    return [*session, "--profile", profile] if profile else session


def _is_allowed(handle: Handle) -> bool:
    request = _request(Path(handle.folder)) or {}
    return bool(request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"))


def _ranks_per_node(handle: Handle) -> int:
    """As the job was submitted; 1 for an attached job."""
    try:
        resources = json.loads(Path(handle.folder, backend.JOB).read_text())["resources"]
    except FileNotFoundError:
        return 1
    return int(resources.get("processes_per_node") or resources.get("gpus_per_node") or 1)
