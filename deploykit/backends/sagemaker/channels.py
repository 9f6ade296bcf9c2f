"""The input channels of a request.

Each key of the API: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Channel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.sections import Channel
from deploykit.model import JobSpec


def names(job: JobSpec, options: Options) -> list[str]:
    """All channels: those of `data`, then those of `sagemaker.channels` alone."""
    return [*job.data, *(name for name in options.channels if name not in job.data)]


def settings(options: Options, name: str) -> Channel:
    """How a channel is read."""
    return options.channels.get(name, Channel())


def location(job: JobSpec, options: Options, name: str) -> str | None:
    """The S3 location of a channel; None if the job file names none."""
    return settings(options, name).s3 or job.data.get(name)


def render(job: JobSpec, options: Options) -> Iterator[dict[str, Any]]:
    """The request's entry for each channel. The job must have passed `check`."""
    for name in names(job, options):
        channel = settings(options, name)
        if channel.file_system_id is not None:
            yield _file_system(name, channel)
        else:
            yield _with_settings(s3(name, location(job, options, name) or ""), channel)


def s3(name: str, prefix: str) -> dict[str, Any]:
    """The entry of a channel that copies all objects below `prefix` to every node."""
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": prefix,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _with_settings(entry: dict[str, Any], channel: Channel) -> dict[str, Any]:
    source = entry["DataSource"]["S3DataSource"]
    source["S3DataType"] = channel.s3_data_type
    source["S3DataDistributionType"] = channel.s3_distribution
    if channel.attribute_names:
        source["AttributeNames"] = list(channel.attribute_names)
    if channel.instance_groups:
        source["InstanceGroupNames"] = list(channel.instance_groups)
    return entry | _non_defaults(channel)


def _non_defaults(channel: Channel) -> dict[str, Any]:
    """Fields that the SDK sends only if they differ from the default."""
    fields: dict[str, Any] = {}
    if channel.input_mode != "File":
        fields["InputMode"] = channel.input_mode
    if channel.content_type is not None:
        fields["ContentType"] = channel.content_type
    if channel.compression != "None":
        fields["CompressionType"] = channel.compression
    if channel.record_wrapping != "None":
        fields["RecordWrapperType"] = channel.record_wrapping
    if channel.shuffle_seed is not None:
        fields["ShuffleConfig"] = {"Seed": channel.shuffle_seed}
    return fields


def _file_system(name: str, channel: Channel) -> dict[str, Any]:
    source = {
        "FileSystemId": channel.file_system_id,
        "FileSystemType": channel.file_system_type,
        "DirectoryPath": channel.directory_path,
        "FileSystemAccessMode": channel.file_system_access,
    }
    entry: dict[str, Any] = {
        "ChannelName": name,
        "DataSource": {"FileSystemDataSource": source},
    }
    return entry if channel.content_type is None else {**entry, "ContentType": channel.content_type}
