"""Spot, retries, warm pools, time, the network, and what looks into a job."""

from __future__ import annotations

import re

from deploykit.backends.sagemaker import machines, request
from deploykit.backends.sagemaker.oracle.rule import (
    API,
    GUIDE,
    SDK,
    Case,
    Row,
    Rule,
    Sdk,
    Verdict,
    sm,
)
from deploykit.backends.sagemaker.sections import REGION
from deploykit.contract import command

_SPOT = f"{GUIDE}/model-managed-spot-training.html"
_POOLS = f"{GUIDE}/train-warm-pools.html"
_STOPPING = f"{API}/API_StoppingCondition.html"
_VPC = f"{GUIDE}/train-vpc.html"
_ENCRYPT = f"{GUIDE}/train-encrypt.html"
_DEBUGGER = f"{SDK}/fw_utils.py"
_LONGEST_RUN = 28 * 24 * 3600
_LONGEST_KEEP_ALIVE = 3600
_LONGEST_ARGUMENTS = 50_000
"""Characters; the container's toolkit puts them into single variables of at most 128 KiB."""
_INTERVALS = (100, 200, 500, 1000, 5000, 60000)
_UNWATCHED = (
    *("us-iso-east-1", "us-isob-east-1", "ap-southeast-3", "ap-southeast-4", "eu-south-2"),
    *("me-central-1", "ap-south-2", "eu-central-2", "us-gov-east-1"),
)
"""Regions where the SDK knows no profiler and no debugger."""
_CHECKPOINTS = {"checkpoints": "s3://my-bucket/checkpoints"}
_SPOT_JOB = sm(spot=True, max_wait="2h") | _CHECKPOINTS


def _impatient(case: Case) -> bool:
    wait = case.options.max_wait
    return case.options.spot and (wait is None or wait < case.job.resources.time_limit)


def _arguments(case: Case) -> list[str]:
    length = sum(map(len, request.pieces(command(case.job)).values()))
    return [str(length)] if length > _LONGEST_ARGUMENTS else []


def _half_a_network(case: Case) -> list[str]:
    if bool(case.options.subnets) == bool(case.options.security_group_ids):
        return []
    return ["security_group_ids" if case.options.subnets else "subnets"]


def _bad_region(case: Case) -> bool:
    return case.region is not None and re.fullmatch(REGION.regex, case.region) is None


def _watched(case: Case) -> list[str]:
    """What looks into the job, by its key."""
    chosen = {
        "profiler_interval": case.options.profiler_interval is not None,
        "debugger": case.options.debugger,
    }
    return [name for name, on in chosen.items() if on]


RULES = (
    Rule(
        "sagemaker.region",
        Verdict.REFUSED,
        lambda case: case.region is None,
        "no region is chosen",
        "region here, or AWS_REGION",
        "https://docs.aws.amazon.com/general/latest/gr/sagemaker.html",
        (Row(sm(region=None), Sdk.UNASKED, cure=sm(region="us-east-1")),),
    ),
    Rule(
        "sagemaker.region",
        Verdict.REFUSED,
        _bad_region,
        "AWS_REGION or AWS_DEFAULT_REGION is {case.region!r}, which is no region",
        "a region such as us-east-1, here or there",
        "https://docs.aws.amazon.com/general/latest/gr/sagemaker.html",
        (),
    ),
    Rule(
        "sagemaker.max_wait",
        Verdict.REFUSED,
        _impatient,
        "a spot job needs it, at least resources.time_limit ({job.resources.time_limit} s); the "
        "SDK sends the job without",
        "time_limit and the patience to wait for machines, together",
        _STOPPING,
        (
            Row(sm(spot=True) | _CHECKPOINTS, cure=sm(max_wait="2h")),
            Row(sm(spot=True, max_wait="30m") | _CHECKPOINTS, cure=sm(max_wait="1h")),
        ),
    ),
    Rule(
        "sagemaker.max_wait",
        Verdict.REFUSED,
        lambda case: case.options.max_wait is not None and not case.options.spot,
        "has a meaning only with spot: true",
        "remove it",
        _STOPPING,
        (Row(sm(max_wait="2h"), cure=sm(max_wait=None)),),
    ),
    Rule(
        "checkpoints",
        Verdict.ASKED,
        lambda case: (case.options.spot or case.job.retries > 0) and case.job.checkpoints is None,
        "without it a job that is interrupted or retried begins again from nothing: SIGTERM does "
        "not reach the program in AWS's containers",
        "checkpoints: s3://{options.bucket}/{options.prefix}/checkpoints/{job.name}",
        _SPOT,
        (
            Row(sm(spot=True, max_wait="2h"), cure=_CHECKPOINTS),
            Row({"retries": 2}, cure=_CHECKPOINTS),
        ),
    ),
    Rule(
        "retries",
        Verdict.OTHER,
        lambda case: case.job.retries > 0,
        "SageMaker starts a job again only after a fault of its own, never after the program's; "
        "time_limit counts all attempts together",
        "checkpoints, and the next submit goes on from there",
        f"{API}/API_RetryStrategy.html",
        (Row({"retries": 2} | _CHECKPOINTS, cure={"retries": 0}),),
    ),
    Rule(
        "sagemaker.keep_alive",
        Verdict.REFUSED,
        lambda case: case.options.keep_alive is not None and case.options.spot,
        "spot machines cannot be kept",
        "drop one of the two",
        _POOLS,
        (Row(_SPOT_JOB | sm(keep_alive="10m"), cure=sm(keep_alive=None)),),
    ),
    Rule(
        "sagemaker.keep_alive",
        Verdict.REFUSED,
        lambda case: (case.options.keep_alive or 0) > _LONGEST_KEEP_ALIVE,
        "machines can be kept for 1h at most",
        "keep_alive: 1h",
        _POOLS,
        (Row(sm(keep_alive="2h"), cure=sm(keep_alive="1h")),),
    ),
    Rule(
        "resources.time_limit",
        Verdict.REFUSED,
        lambda case: case.job.resources.time_limit > _LONGEST_RUN,
        "SageMaker runs a job for 28 days at most",
        "time_limit: 28d",
        _STOPPING,
        (Row({"resources.time_limit": "29d"}, cure={"resources.time_limit": "28d"}),),
    ),
    Rule(
        "entrypoint.args",
        Verdict.REFUSED,
        _arguments,
        f"take {{item}} characters as JSON; a container takes {_LONGEST_ARGUMENTS}",
        "put them into a file that travels with the source",
        "https://github.com/aws/sagemaker-training-toolkit",
        (Row({"entrypoint.args": ["x" * 60_000]}, cure={"entrypoint.args": []}),),
    ),
    Rule(
        "sagemaker.{item}",
        Verdict.REFUSED,
        _half_a_network,
        "subnets and security groups go together",
        "both or none",
        _VPC,
        (
            Row(
                sm(subnets=["subnet-1"]),
                Sdk.REFUSES,
                says="both subnets and security_group_ids",
                cure=sm(security_group_ids=["sg-1"]),
            ),
            Row(
                sm(security_group_ids=["sg-1"]),
                Sdk.REFUSES,
                says="both subnets and security_group_ids",
                cure=sm(subnets=["subnet-1"]),
            ),
        ),
    ),
    Rule(
        "sagemaker.encrypt_inter_container_traffic",
        Verdict.OTHER,
        lambda case: (
            case.options.encrypt_inter_container_traffic
            and case.job.resources.nodes == 1
            and not case.options.instance_groups
        ),
        "has nothing to encrypt on one machine",
        "remove it",
        _ENCRYPT,
        (
            Row(
                {"resources.nodes": 1} | sm(encrypt_inter_container_traffic=True),
                cure=sm(encrypt_inter_container_traffic=False),
            ),
        ),
    ),
    Rule(
        "sagemaker.encrypt_inter_container_traffic",
        Verdict.UNKNOWN,
        lambda case: (
            case.options.encrypt_inter_container_traffic
            and case.job.resources.nodes > 1
            and machines.efa(case.type)
        ),
        "whether traffic over EFA, which {case.type} has, is encrypted or only forced off EFA, AWS "
        "says nowhere that we know of",
        "leave it out where the VPC is yours alone, and measure the speed where it must stand",
        _ENCRYPT,
        (
            Row(
                sm(encrypt_inter_container_traffic=True, instance_type="ml.p4d.24xlarge"),
                cure=sm(encrypt_inter_container_traffic=False),
            ),
        ),
    ),
    Rule(
        "sagemaker.network_isolation",
        Verdict.ASKED,
        lambda case: case.options.network_isolation,
        "the source comes as a channel named code, since the containers cannot fetch it",
        None,
        f"{SDK}/estimator.py",
        (
            Row(
                sm(network_isolation=True),
                sends={"sagemaker_submit_directory": '"/opt/ml/input/data/code/sourcedir.tar.gz"'},
            ),
        ),
        quiet=True,
    ),
    Rule(
        "sagemaker.remote_debug",
        Verdict.UNKNOWN,
        lambda case: case.options.remote_debug and case.options.network_isolation,
        "the shell comes through AWS Systems Manager, and whether its agent reaches out of an "
        "isolated container cannot be known from here",
        "drop one of the two",
        f"{GUIDE}/train-remote-debugging.html",
        (
            Row(
                sm(remote_debug=True, network_isolation=True),
                cure=sm(network_isolation=False),
            ),
        ),
    ),
    Rule(
        "sagemaker.remote_debug",
        Verdict.ASKED,
        lambda case: case.options.remote_debug,
        "the role needs ssmmessages:CreateControlChannel, CreateDataChannel, OpenControlChannel "
        "and OpenDataChannel",
        None,
        f"{GUIDE}/train-remote-debugging.html",
        (Row(sm(remote_debug=True)),),
        quiet=True,
    ),
    Rule(
        "sagemaker.profiler_interval",
        Verdict.REFUSED,
        lambda case: case.options.profiler_interval not in (None, *_INTERVALS),
        "is {options.profiler_interval} ms; the service knows 100, 200, 500, 1000, 5000 and 60000",
        "profiler_interval: 1000",
        f"{API}/API_ProfilerConfig.html",
        (Row(sm(profiler_interval=300), cure=sm(profiler_interval=500)),),
    ),
    Rule(
        "sagemaker.{item}",
        Verdict.REFUSED,
        lambda case: _watched(case) if case.region in _UNWATCHED else [],
        "is not to be had in {case.region}",
        "leave it out there",
        _DEBUGGER,
        (
            Row(
                sm(
                    profiler_interval=1000,
                    region="eu-central-2",
                    image_uri="380420809688.dkr.ecr.eu-central-2.amazonaws.com/"
                    "pytorch-training:2.10.0-gpu-py313",
                ),
                Sdk.REFUSES,
                says="disable_profiler",
                cure=sm(profiler_interval=None),
            ),
        ),
    ),
    Rule(
        "sagemaker.profiler_interval",
        Verdict.REFUSED,
        lambda case: case.options.profiler_interval is not None and case.type.startswith("ml.trn"),
        "the SDK refuses the profiler on Trainium",
        "remove it",
        _DEBUGGER,
        (
            Row(
                sm(
                    profiler_interval=1000,
                    instance_type="ml.trn1.32xlarge",
                    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/neuron:1",
                ),
                Sdk.REFUSES,
                says="disable_profiler",
                cure=sm(profiler_interval=None),
            ),
        ),
    ),
    Rule(
        "sagemaker.debugger",
        Verdict.REFUSED,
        lambda case: case.options.debugger and case.job.checkpoints is not None,
        "the SDK switches the debugger off, silently, where checkpoints are kept",
        "drop one of the two",
        f"{SDK}/estimator.py",
        (Row(sm(debugger=True) | _CHECKPOINTS, cure=sm(debugger=False)),),
    ),
    Rule(
        "sagemaker.debugger",
        Verdict.UNKNOWN,
        lambda case: case.options.debugger,
        "the request will hold the hook, but whether smdebug is in this image cannot be known from "
        "here; AWS has tested it up to PyTorch 2.0",
        "profiler_interval, or torch.profiler in the program",
        f"{GUIDE}/debugger-supported-frameworks.html",
        (Row(sm(debugger=True), cure=sm(debugger=False)),),
    ),
)
