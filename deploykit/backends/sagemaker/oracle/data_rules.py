"""Input channels, locations of data, and secrets."""

from __future__ import annotations

import re
from collections.abc import Callable

from deploykit import backend
from deploykit.backends.sagemaker import channels
from deploykit.backends.sagemaker.oracle.oracle_rule import Case, OracleRule, Verdict
from deploykit.backends.sagemaker.oracle.sources import API, GUIDE
from deploykit.backends.sagemaker.sections import S3, Channel

_SOURCES = f"{API}/API_S3DataSource.html"
_CHANNEL = f"{API}/API_Channel.html"
_ACCESS = f"{GUIDE}/model-access-training-data.html"
_SECRETS = "https://docs.aws.amazon.com/secretsmanager/latest/userguide/retrieving-secrets.html"
_REACHABLE = ("ssm", "secretsmanager")
"""Kinds of secrets that a container can look up."""


def _channels(case: Case, matches: Callable[[Channel], object]) -> list[str]:
    """The names of the channels that match."""
    return [name for name, channel in case.options.channels.items() if matches(channel)]


def _not_in_s3(case: Case) -> list[str]:
    """Locations that the nodes cannot reach, by their path in the job file."""
    replaced = {
        f"data.{name}"
        for name, channel in case.options.channels.items()
        if channel.s3 is not None or channel.file_system_id is not None
    }
    return [
        path
        for path, location in backend.locations(case.job).items()
        if re.fullmatch(S3.regex, location) is None and path not in replaced
    ]


def _without_location(case: Case) -> list[str]:
    return [
        name
        for name, channel in case.options.channels.items()
        if channel.file_system_id is None
        and channels.location(case.job, case.options, name) is None
    ]


def _same_variable(case: Case) -> list[str]:
    """Channels whose environment variables would have the same name."""
    upper = [name.upper() for name in case.channels]
    return [name for name in case.options.channels if upper.count(name.upper()) > 1]


def _bad_file_system(channel: Channel) -> bool:
    return channel.file_system_id is not None and (
        channel.s3 is not None or channel.input_mode != "File" or channel.directory_path is None
    )


def _unknown_groups(case: Case) -> list[str]:
    known = {group.name for group in case.options.instance_groups}
    return _channels(case, lambda channel: set(channel.instance_groups) - known)


def _secrets(case: Case) -> dict[str, str]:
    """Variable -> secret reference."""
    return {name: value for name, value in case.job.env.items() if backend.is_secret(value)}


DATA = (
    OracleRule(
        id="not-in-s3",
        path="{item}",
        verdict=Verdict.REFUSED,
        when=_not_in_s3,
        reason="SageMaker cannot reach this location",
        nearest="an S3 prefix, such as s3://bucket/folder",
        source=_ACCESS,
    ),
    OracleRule(
        id="channel-without-location",
        path="sagemaker.channels.{item}",
        verdict=Verdict.REFUSED,
        when=_without_location,
        reason="the location of its data is missing",
        nearest="data.{item}, or s3, or file_system_id",
        source=_CHANNEL,
    ),
    OracleRule(
        id="same-variable",
        path="sagemaker.channels.{item}",
        verdict=Verdict.REFUSED,
        when=_same_variable,
        reason="its environment variable is the same as another channel's: names are upper-cased",
        nearest="a name that differs in more than case",
        source=_CHANNEL,
    ),
    OracleRule(
        id="code-channel",
        path="sagemaker.channels.code",
        verdict=Verdict.REFUSED,
        when=lambda case: "code" in case.channels and case.options.source_is_a_channel,
        reason="with network_isolation or image_entrypoint, the name is reserved for the source",
        nearest="another name for the channel",
        source=_CHANNEL,
    ),
    OracleRule(
        id="manifest-without-pipe",
        path="sagemaker.channels.{item}.s3_data_type",
        verdict=Verdict.REFUSED,
        when=lambda case: _channels(
            case,
            lambda channel: (
                channel.s3_data_type == "AugmentedManifestFile" and channel.input_mode != "Pipe"
            ),
        ),
        reason="an augmented manifest can be read in Pipe mode only",
        nearest="input_mode: Pipe",
        source=_SOURCES,
    ),
    OracleRule(
        id="manifest-attributes",
        path="sagemaker.channels.{item}.attribute_names",
        verdict=Verdict.REFUSED,
        when=lambda case: _channels(
            case,
            lambda channel: (
                (channel.s3_data_type == "AugmentedManifestFile") != bool(channel.attribute_names)
            ),
        ),
        reason="is required for an augmented manifest, and allowed for nothing else",
        nearest="attribute_names with s3_data_type: AugmentedManifestFile, or neither",
        source=_SOURCES,
    ),
    OracleRule(
        id="pipe-mode",
        path="sagemaker.channels.{item}.input_mode",
        verdict=Verdict.OTHER,
        when=lambda case: _channels(case, lambda channel: channel.input_mode == "Pipe"),
        reason="the program finds no folder but one FIFO per epoch: the value of DEPLOYKIT_DATA_"
        "... followed by _0, _1, ...",
        nearest="input_mode: FastFile, which streams plain files",
        source=_ACCESS,
    ),
    OracleRule(
        id="pipe-mode-only",
        path="sagemaker.channels.{item}",
        verdict=Verdict.REFUSED,
        when=lambda case: _channels(
            case,
            lambda channel: (
                channel.input_mode != "Pipe"
                and (channel.compression != "None" or channel.record_wrapping != "None")
            ),
        ),
        reason="compression and record_wrapping require Pipe mode",
        nearest="None for both, or input_mode: Pipe",
        source=_CHANNEL,
    ),
    OracleRule(
        id="file-system-without-vpc",
        path="sagemaker.channels.{item}.file_system_id",
        verdict=Verdict.REFUSED,
        when=lambda case: _channels(
            case, lambda channel: channel.file_system_id and not case.options.subnets
        ),
        reason="a file system is reachable only from your VPC",
        nearest="subnets and security_group_ids that reach it",
        source=_ACCESS,
    ),
    OracleRule(
        id="file-system-keys",
        path="sagemaker.channels.{item}",
        verdict=Verdict.REFUSED,
        when=lambda case: _channels(case, _bad_file_system),
        reason="a file system requires directory_path and File mode, and excludes s3",
        nearest="file_system_id with directory_path only",
        source=f"{API}/API_FileSystemDataSource.html",
    ),
    OracleRule(
        id="unknown-groups",
        path="sagemaker.channels.{item}.instance_groups",
        verdict=Verdict.REFUSED,
        when=_unknown_groups,
        reason="names a group that is not in instance_groups",
        nearest="one of instance_groups, or remove it",
        source=_SOURCES,
    ),
    OracleRule(
        id="unreachable-secret",
        path="env.{item}",
        verdict=Verdict.REFUSED,
        when=lambda case: [
            name
            for name, reference in _secrets(case).items()
            if reference.split(":")[1] not in _REACHABLE
        ],
        reason="SageMaker cannot look up a secret of this kind",
        nearest="a secret of kind ssm or secretsmanager",
        source=_SECRETS,
    ),
    OracleRule(
        id="isolated-secret",
        path="env.{item}",
        verdict=Verdict.REFUSED,
        when=lambda case: list(_secrets(case)) if case.options.network_isolation else [],
        reason="an isolated container cannot look up a secret",
        nearest="network_isolation: false, or no secret",
        source=f"{GUIDE}/mkt-algo-model-internet-free.html",
    ),
)
