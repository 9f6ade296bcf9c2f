"""Spot, retries, warm pools, time limits, the network, profiling and debugging."""

from __future__ import annotations

import re

from deploykit.backend import command
from deploykit.backends.sagemaker.oracle.oracle_rule import Case, OracleRule, Verdict
from deploykit.backends.sagemaker.oracle.sources import API, GUIDE, SDK
from deploykit.backends.sagemaker.request import argument_vector
from deploykit.backends.sagemaker.sections import REGION

_REGIONS = "https://docs.aws.amazon.com/general/latest/gr/sagemaker.html"
_SPOT = f"{GUIDE}/model-managed-spot-training.html"
_POOLS = f"{GUIDE}/train-warm-pools.html"
_STOPPING = f"{API}/API_StoppingCondition.html"
_ENCRYPT = f"{GUIDE}/train-encrypt.html"
_REMOTE_DEBUG = f"{GUIDE}/train-remote-debugging.html"
_PROFILER = f"{SDK}/fw_utils.py"
_LONGEST_RUN = 28 * 24 * 3600
_LONGEST_KEEP_ALIVE = 3600
_LONGEST_ARGUMENTS = 50_000
"""Characters. AWS's toolkit passes them in single variables of at most 128 KiB."""
_INTERVALS = (100, 200, 500, 1000, 5000, 60000)
_WITHOUT_PROFILER = (
    *("us-iso-east-1", "us-isob-east-1", "ap-southeast-3", "ap-southeast-4", "eu-south-2"),
    *("me-central-1", "ap-south-2", "eu-central-2", "us-gov-east-1"),
)
"""Regions for which the SDK knows neither profiler nor debugger."""


def _max_wait_too_short(case: Case) -> bool:
    wait = case.options.max_wait
    return case.options.spot and (wait is None or wait < case.job.resources.time_limit)


def _long_arguments(case: Case) -> list[str]:
    """The length of the arguments as JSON, if it is too long."""
    length = sum(map(len, argument_vector(command(case.job)).values()))
    return [str(length)] if length > _LONGEST_ARGUMENTS else []


def _missing_network_key(case: Case) -> list[str]:
    if bool(case.options.subnets) == bool(case.options.security_group_ids):
        return []
    return ["security_group_ids" if case.options.subnets else "subnets"]


def _not_in_region(case: Case) -> list[str]:
    """The keys that ask for the profiler or the debugger where neither is available."""
    if case.region not in _WITHOUT_PROFILER:
        return []
    profiler = ["profiler_interval"] * (case.options.profiler_interval is not None)
    return profiler + ["debugger"] * case.options.debugger


SERVICE = (
    OracleRule(
        id="no-region",
        path="sagemaker.region",
        verdict=Verdict.REFUSED,
        when=lambda case: case.region is None,
        reason="is required",
        nearest="region here, or AWS_REGION",
        source=_REGIONS,
    ),
    OracleRule(
        id="invalid-region",
        path="sagemaker.region",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.region is not None and re.fullmatch(REGION.regex, case.region) is None
        ),
        reason="AWS_REGION or AWS_DEFAULT_REGION is {case.region!r}, which is not a region",
        nearest="a region such as us-east-1, here or in the environment",
        source=_REGIONS,
    ),
    OracleRule(
        id="spot-without-max-wait",
        path="sagemaker.max_wait",
        verdict=Verdict.REFUSED,
        when=_max_wait_too_short,
        reason="a spot job requires it, at least resources.time_limit "
        "({job.resources.time_limit} s); the SDK does not check",
        nearest="time_limit plus the time to wait for capacity",
        source=_STOPPING,
    ),
    OracleRule(
        id="max-wait-without-spot",
        path="sagemaker.max_wait",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.max_wait is not None and not case.options.spot,
        reason="requires spot: true",
        nearest="remove it",
        source=_STOPPING,
    ),
    OracleRule(
        id="no-checkpoints",
        path="checkpoints",
        verdict=Verdict.ASKED,
        when=lambda case: (
            (case.options.spot or case.job.retries > 0) and case.job.checkpoints is None
        ),
        reason="without it, a job that is interrupted or retried starts from the beginning: "
        "SIGTERM does not reach the program in AWS's containers",
        nearest="checkpoints: s3://{options.bucket}/{options.prefix}/checkpoints/{job.name}",
        source=_SPOT,
    ),
    OracleRule(
        id="retries-of-the-service",
        path="retries",
        verdict=Verdict.OTHER,
        when=lambda case: case.job.retries > 0,
        reason="SageMaker retries a job only after a fault of the service, never after a failure "
        "of the program; time_limit covers all attempts together",
        nearest="checkpoints; the next submit then continues from there",
        source=f"{API}/API_RetryStrategy.html",
    ),
    OracleRule(
        id="spot-in-warm-pool",
        path="sagemaker.keep_alive",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.keep_alive is not None and case.options.spot,
        reason="spot instances cannot be kept in a warm pool",
        nearest="remove keep_alive or spot",
        source=_POOLS,
    ),
    OracleRule(
        id="keep-alive-limit",
        path="sagemaker.keep_alive",
        verdict=Verdict.REFUSED,
        when=lambda case: (case.options.keep_alive or 0) > _LONGEST_KEEP_ALIVE,
        reason="instances can be kept for at most 1h",
        nearest="keep_alive: 1h",
        source=_POOLS,
    ),
    OracleRule(
        id="time-limit",
        path="resources.time_limit",
        verdict=Verdict.REFUSED,
        when=lambda case: case.job.resources.time_limit > _LONGEST_RUN,
        reason="SageMaker runs a job for at most 28 days",
        nearest="time_limit: 28d",
        source=_STOPPING,
    ),
    OracleRule(
        id="long-arguments",
        path="entrypoint.args",
        verdict=Verdict.REFUSED,
        when=_long_arguments,
        reason=f"are {{item}} characters long as JSON; the limit is {_LONGEST_ARGUMENTS}",
        nearest="put them into a file in the source",
        source="https://github.com/aws/sagemaker-training-toolkit",
    ),
    OracleRule(
        id="half-a-network",
        path="sagemaker.{item}",
        verdict=Verdict.REFUSED,
        when=_missing_network_key,
        reason="subnets and security_group_ids must be set together",
        nearest="set both, or neither",
        source=f"{GUIDE}/train-vpc.html",
    ),
    OracleRule(
        id="encryption-on-one-node",
        path="sagemaker.encrypt_inter_container_traffic",
        verdict=Verdict.OTHER,
        when=lambda case: (
            case.options.encrypt_inter_container_traffic
            and case.job.resources.nodes == 1
            and not case.options.instance_groups
        ),
        reason="has no effect on one node",
        nearest="remove it",
        source=_ENCRYPT,
    ),
    OracleRule(
        id="encryption-over-efa",
        path="sagemaker.encrypt_inter_container_traffic",
        verdict=Verdict.UNKNOWN,
        when=lambda case: (
            case.options.encrypt_inter_container_traffic
            and case.job.resources.nodes > 1
            and case.has_efa
        ),
        reason="{case.instance_type} has EFA; whether EFA traffic is encrypted or moved off EFA "
        "is not documented",
        nearest="remove it if no one else uses the VPC; if it is required, measure the throughput",
        source=_ENCRYPT,
    ),
    OracleRule(
        id="source-as-channel",
        path="sagemaker.network_isolation",
        verdict=Verdict.ASKED,
        when=lambda case: case.options.network_isolation,
        reason="the source is provided as a channel named code, because the containers cannot "
        "download it",
        source=f"{SDK}/estimator.py",
        quiet=True,
    ),
    OracleRule(
        id="isolated-remote-debug",
        path="sagemaker.remote_debug",
        verdict=Verdict.UNKNOWN,
        when=lambda case: case.options.remote_debug and case.options.network_isolation,
        reason="the shell uses AWS Systems Manager; it is not known whether its agent can connect "
        "from an isolated container",
        nearest="remove remote_debug or network_isolation",
        source=_REMOTE_DEBUG,
    ),
    OracleRule(
        id="remote-debug-permissions",
        path="sagemaker.remote_debug",
        verdict=Verdict.ASKED,
        when=lambda case: case.options.remote_debug,
        reason="the role needs ssmmessages:CreateControlChannel, CreateDataChannel, "
        "OpenControlChannel and OpenDataChannel",
        source=_REMOTE_DEBUG,
        quiet=True,
    ),
    OracleRule(
        id="profiler-interval",
        path="sagemaker.profiler_interval",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.profiler_interval not in (None, *_INTERVALS),
        reason="is {options.profiler_interval} ms; the service accepts 100, 200, 500, 1000, 5000 "
        "and 60000",
        nearest="profiler_interval: 1000",
        source=f"{API}/API_ProfilerConfig.html",
    ),
    OracleRule(
        id="region-without-profiler",
        path="sagemaker.{item}",
        verdict=Verdict.REFUSED,
        when=_not_in_region,
        reason="is not available in {case.region}",
        nearest="remove it, or choose another region",
        source=_PROFILER,
    ),
    OracleRule(
        id="profiler-on-trainium",
        path="sagemaker.profiler_interval",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.options.profiler_interval is not None and case.instance_type.startswith("ml.trn")
        ),
        reason="the SDK refuses the profiler on Trainium",
        nearest="remove it",
        source=_PROFILER,
    ),
    OracleRule(
        id="debugger-with-checkpoints",
        path="sagemaker.debugger",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.debugger and case.job.checkpoints is not None,
        reason="the SDK silently turns the debugger off if checkpoints are set",
        nearest="remove debugger or checkpoints",
        source=f"{SDK}/estimator.py",
    ),
    OracleRule(
        id="debugger-in-image",
        path="sagemaker.debugger",
        verdict=Verdict.UNKNOWN,
        when=lambda case: case.options.debugger,
        reason="the request enables the hook, but it is not known whether this image has "
        "smdebug; AWS tested it up to PyTorch 2.0",
        nearest="profiler_interval, or torch.profiler in the program",
        source=f"{GUIDE}/debugger-supported-frameworks.html",
    ),
)
