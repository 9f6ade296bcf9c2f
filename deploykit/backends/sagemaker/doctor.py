"""Doctor for SageMaker: collect the facts of the account and network of a job, and judge them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import hardware
from deploykit.backends.sagemaker.options import Options, region
from deploykit.doctor import account, collect, firewall, network, routes
from deploykit.doctor.requirements import EPHEMERAL, ESP, IKE, Flow, Ports, Requirements
from deploykit.job import checks
from deploykit.job.model import JobSpec
from deploykit.lib.errors import NotFound, NotPermitted
from deploykit.lib.finding import Finding, Fix

_TIMEOUT = 20.0
"""Seconds for an answer: there are about 25, and the checks go on without one."""
_MISSHAPEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading saved responses raises if they do not have the shape of AWS's."""


def examine(
    job: JobSpec, options: Options, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the account and the network, live or from a folder of saved responses."""
    where = region(options) or ""
    required = requirements_of(job, options, where)
    try:
        if saved:
            answers = collect.load(saved)
        else:
            client = partial(
                clients.client,
                region=where,
                credentials=options.credentials,
                attempts=2,
                timeout=_TIMEOUT,
            )
            answers = collect.live(required, client, partial(clients.errors, where))
    except NotPermitted as error:
        fix = Fix(error.hint or "log in to AWS")
        yield Finding("credentials", "error", str(error), (f"region {where}",), fix)
        return
    if save:
        collect.save(answers, save)
    with reading(saved):
        yield from findings(network.parse(required, answers))


def findings(facts: network.Network) -> Iterator[Finding]:
    """Everything that would stop or slow the job in this account and network. Pure."""
    yield from collect.findings(facts)
    yield from account.findings(facts)
    yield from routes.subnet_findings(facts)
    yield from firewall.group_findings(facts)
    yield from firewall.acl_findings(facts)
    yield from routes.route_findings(facts)
    yield from routes.endpoint_findings(facts)


@contextlib.contextmanager
def reading(saved: Path | None) -> Iterator[None]:
    """Raise NotFound where saved answers, which may have been edited, are not valid.

    Live answers have the shape that AWS documents: there, an error is one of deploykit's own.
    """
    try:
        yield
    except _MISSHAPEN as error:
        if saved is None:
            raise
        raise NotFound(
            f"the files in {saved} are not valid AWS responses: {error!r:.200}",
            hint="save them with `deploykit doctor --save FOLDER` or `aws ... --output json`",
        ) from error


_TORCHRUN: Ports = (7777, 7777)
"""MASTER_PORT of SageMaker's launcher:
https://github.com/aws/sagemaker-training-toolkit (torch_distributed.py)."""
_SSH: Ports = (22, 22)


def requirements_of(job: JobSpec, options: Options, region: str) -> Requirements:
    written, read = _buckets(job, options)
    services = {value.split(":")[1] for value in job.env.values() if checks.is_secret(value)}
    return Requirements(
        region=region,
        role=options.role,
        instance_type=options.training_type.removeprefix("ml."),
        nodes=job.resources.nodes,
        subnets=options.subnets,
        groups=options.security_group_ids,
        written=written,
        read=read,
        owner=options.owner,
        quota=options.quota,
        efa=hardware.of(options.training_type).efa,
        remote_debug=options.remote_debug,
        keys=_keys(options, region),
        secrets=tuple(sorted(services)),
        peers=_flows_between_nodes(job, options),
    )


def _buckets(job: JobSpec, options: Options) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The buckets that the job writes, and those that it only reads."""
    by_key = {key: location.split("/")[2] for key, location in backend.addresses(job).items()}
    written = {options.bucket}
    written |= {by_key[key] for key in ("output", "checkpoints") if key in by_key}
    return tuple(sorted(written)), tuple(sorted(set(by_key.values()) - written))


def _keys(options: Options, region: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The KMS keys of the output and the disks, with the role's actions on each.

    https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html (CreateTrainingJob)
    """
    named = (
        (options.output_kms_key, ("kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey")),
        (options.volume_kms_key, ("kms:CreateGrant",)),
    )
    account = options.role.split(":")[4]
    return tuple((_key_arn(key, region, account), actions) for key, actions in named if key)


def _key_arn(key: str, region: str, account: str) -> str:
    """The ARN of a key that a policy can name; ``*`` for an alias, which none can."""
    if "alias/" in key:
        return "*"
    return key if key.startswith("arn:") else f"arn:aws:kms:{region}:{account}:key/{key}"


def _flows_between_nodes(job: JobSpec, options: Options) -> tuple[Flow, ...]:
    if job.resources.nodes == 1:
        return ()
    plain = job.entrypoint.launcher == "python"
    launcher = _TORCHRUN if options.by_torchrun or plain else _SSH
    encryption = (IKE, ESP) if options.encrypt_inter_container_traffic else ()
    return (Flow("tcp", (launcher, EPHEMERAL)), *encryption)
