"""Input channels as a request describes them.

The API's words for each key: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Channel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.sections import Channel
from deploykit.model import JobSpec


def names(job: JobSpec, options: Options) -> list[str]:
    """All channels: those of `data`, then those that only SageMaker has."""
    return [*job.data, *(name for name in options.channels if name not in job.data)]


def chosen(options: Options, name: str) -> Channel:
    """How the channel is read."""
    return options.channels.get(name, Channel())


def place(job: JobSpec, options: Options, name: str) -> str | None:
    """Where the channel's data lies in S3; None where that is said nowhere."""
    return chosen(options, name).s3 or job.data.get(name)


def render(job: JobSpec, options: Options) -> Iterator[dict[str, Any]]:
    """Each channel. The job must have passed `checks`."""
    for name in names(job, options):
        how = chosen(options, name)
        if how.file_system_id is not None:
            yield _file_system(name, how)
        else:
            yield _with_options(s3(name, place(job, options, name) or ""), how)


def s3(name: str, where: str) -> dict[str, Any]:
    """A channel with all objects below a prefix, copied to every machine."""
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": where,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _with_options(channel: dict[str, Any], how: Channel) -> dict[str, Any]:
    source = channel["DataSource"]["S3DataSource"]
    source["S3DataType"] = how.s3_data_type
    source["S3DataDistributionType"] = how.s3_distribution
    if how.attribute_names:
        source["AttributeNames"] = list(how.attribute_names)
    if how.instance_groups:
        source["InstanceGroupNames"] = list(how.instance_groups)
    return channel | _reading(how)


def _reading(how: Channel) -> dict[str, Any]:
    """What stands in the request only where it differs from the default."""
    found: dict[str, Any] = {}
    if how.input_mode != "File":
        found["InputMode"] = how.input_mode
    if how.content_type is not None:
        found["ContentType"] = how.content_type
    if how.compression != "None":
        found["CompressionType"] = how.compression
    if how.record_wrapping != "None":
        found["RecordWrapperType"] = how.record_wrapping
    if how.shuffle_seed is not None:
        found["ShuffleConfig"] = {"Seed": how.shuffle_seed}
    return found


def _file_system(name: str, how: Channel) -> dict[str, Any]:
    source = {
        "FileSystemId": how.file_system_id,
        "FileSystemType": how.file_system_type,
        "DirectoryPath": how.directory_path,
        "FileSystemAccessMode": how.file_system_access,
    }
    channel = {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}}
    return channel if how.content_type is None else {**channel, "ContentType": how.content_type}
