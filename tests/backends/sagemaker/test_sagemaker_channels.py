"""The input channels of a request, from `data` and from `sagemaker.channels`."""

from __future__ import annotations

from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker.options import Channel
from tests.backends.sagemaker.sagemaker_jobs import vary


def rendered(**changes):
    return request.render(*vary(**changes), run="one", bundle="0" * 64)["InputDataConfig"]


def test_a_channel_has_the_settings_that_it_is_given():
    settings = Channel(
        s3_data_type="AugmentedManifestFile",
        s3_distribution="ShardedByS3Key",
        input_mode="Pipe",
        attribute_names=("source-ref", "label"),
        content_type="text/csv",
        compression="Gzip",
        record_wrapping="RecordIO",
        shuffle_seed=0,
        instance_groups=("gpu",),
    )
    source = {
        "S3DataType": "AugmentedManifestFile",
        "S3Uri": "s3://b-b/train",
        "S3DataDistributionType": "ShardedByS3Key",
        "AttributeNames": ["source-ref", "label"],
        "InstanceGroupNames": ["gpu"],
    }
    assert rendered(data={"train": "s3://b-b/train"}, channels={"train": settings}) == [
        {
            "ChannelName": "train",
            "DataSource": {"S3DataSource": source},
            "InputMode": "Pipe",
            "ContentType": "text/csv",
            "CompressionType": "Gzip",
            "RecordWrapperType": "RecordIO",
            "ShuffleConfig": {"Seed": 0},
        }
    ]


def test_channels_beside_data_come_after_it():
    sent = rendered(
        data={"train": "s3://b-b/train", "test": "s3://b-b/test"},
        channels={"extra": Channel(s3="s3://b-b/extra"), "test": Channel(s3="s3://b-b/other")},
    )
    assert sent == [
        request._s3_channel("train", "s3://b-b/train"),
        request._s3_channel("test", "s3://b-b/other"),
        request._s3_channel("extra", "s3://b-b/extra"),
    ]


def test_a_file_system():
    settings = {"file_system_id": "fs-1", "directory_path": "/fsx/a"}
    source = {
        "FileSystemId": "fs-1",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/fsx/a",
        "FileSystemAccessMode": "ro",
    }
    entry = {"ChannelName": "train", "DataSource": {"FileSystemDataSource": source}}
    assert rendered(channels={"train": Channel(**settings)}) == [entry]
    assert rendered(channels={"train": Channel(**settings, content_type="text/csv")}) == [
        entry | {"ContentType": "text/csv"}
    ]
