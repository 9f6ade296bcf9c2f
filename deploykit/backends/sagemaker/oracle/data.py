"""Input channels, places and secrets."""

from __future__ import annotations

import re
from collections.abc import Callable

from deploykit import contract
from deploykit.backends.sagemaker import channels
from deploykit.backends.sagemaker.oracle.rule import API, GUIDE, Case, Row, Rule, Sdk, Verdict, sm
from deploykit.backends.sagemaker.sections import S3, Channel

_SOURCES = f"{API}/API_S3DataSource.html"
_CHANNEL = f"{API}/API_Channel.html"
_ACCESS = f"{GUIDE}/model-access-training-data.html"
_SEEN = ("ssm", "secretsmanager")
"""Kinds of secrets that a container can look up."""
_TRAIN = {"data": {"train": "s3://my-bucket/train"}}
_LUSTRE = {"file_system_id": "fs-0123456789abcdef0", "directory_path": "/fsx/train"}
_NETWORK = sm(subnets=["subnet-1"], security_group_ids=["sg-1"])
_AUGMENTED = {"s3_data_type": "AugmentedManifestFile", "attribute_names": ["source-ref"]}


def _each(wrong: Callable[[Channel], object]) -> Callable[[Case], list[str]]:
    """The names of the channels that are `wrong`."""

    def names(case: Case) -> list[str]:
        return [name for name, how in case.options.channels.items() if wrong(how)]

    return names


def _unseen(case: Case) -> list[str]:
    """Places that the machines cannot see, by their path in the job file."""
    elsewhere = {
        f"data.{name}"
        for name, how in case.options.channels.items()
        if how.s3 is not None or how.file_system_id is not None
    }
    places = contract.locations(case.job).items()
    unseen = [path for path, place in places if re.fullmatch(S3.regex, place) is None]
    return [path for path in unseen if path not in elsewhere]


def _nowhere(case: Case) -> list[str]:
    return [
        name
        for name, how in case.options.channels.items()
        if how.file_system_id is None and channels.place(case.job, case.options, name) is None
    ]


def _same_folder(case: Case) -> list[str]:
    """Channels whose variables would be one and the same."""
    names = channels.names(case.job, case.options)
    upper = [name.upper() for name in names]
    return [name for name in case.options.channels if upper.count(name.upper()) > 1]


def _strangers(case: Case) -> list[str]:
    """Groups that channels name and that do not exist."""
    known = {group.name for group in case.options.instance_groups}
    return [name for name, how in case.options.channels.items() if set(how.instance_groups) - known]


def _far_secrets(case: Case) -> list[str]:
    """Secrets that only the machine of the user could look up."""
    return [
        name
        for name, value in case.job.env.items()
        if contract.is_secret(value) and value.split(":")[1] not in _SEEN
    ]


def _channel(**how: object) -> dict[str, object]:
    return _TRAIN | sm(channels={"train": how})


RULES = (
    Rule(
        "{item}",
        Verdict.REFUSED,
        _unseen,
        "SageMaker's machines cannot see this place",
        "an S3 prefix, such as s3://bucket/folder",
        _ACCESS,
        (
            Row({"data": {"train": "/data/train"}}, Sdk.UNASKED, cure=_TRAIN),
            Row(
                {"checkpoints": "/shared/checkpoints"},
                cure={"checkpoints": "s3://my-bucket/checkpoints"},
            ),
            Row({"output": "/shared/results"}, Sdk.UNASKED, cure={"output": None}),
        ),
    ),
    Rule(
        "sagemaker.channels.{item}",
        Verdict.REFUSED,
        _nowhere,
        "says nowhere where its data is",
        "data.{item}, or s3, or file_system_id",
        _CHANNEL,
        (Row(sm(channels={"train": {}}), Sdk.UNASKED, cure=_TRAIN),),
    ),
    Rule(
        "sagemaker.channels.{item}",
        Verdict.REFUSED,
        _same_folder,
        "has the same variable as another channel, but for upper and lower case",
        "a name that differs in more",
        _CHANNEL,
        (
            Row(
                _TRAIN | sm(channels={"Train": {"s3": "s3://my-bucket/other"}}),
                cure=sm(channels={"other": {"s3": "s3://my-bucket/other"}}),
            ),
        ),
    ),
    Rule(
        "sagemaker.channels.code",
        Verdict.REFUSED,
        lambda case: (
            case.options.source_is_a_channel and "code" in channels.names(case.job, case.options)
        ),
        "with network_isolation or image_entrypoint the source comes by this name",
        "another name for the channel",
        _CHANNEL,
        (
            Row(
                {"data": {"code": "s3://my-bucket/code"}} | sm(network_isolation=True),
                Sdk.REFUSES,
                says="Duplicate channel code",
                cure={"data": {"codes": "s3://my-bucket/code"}},
            ),
            Row(
                {"data": {"code": "s3://my-bucket/code"}} | sm(image_entrypoint=["bash"]),
                Sdk.REFUSES,
                says="Duplicate channel code",
                cure={"data": {"codes": "s3://my-bucket/code"}},
            ),
        ),
    ),
    Rule(
        "sagemaker.channels.{item}.s3_data_type",
        Verdict.REFUSED,
        _each(lambda how: how.s3_data_type == "AugmentedManifestFile" and how.input_mode != "Pipe"),
        "an augmented manifest can only be read in Pipe mode",
        "input_mode: Pipe",
        _SOURCES,
        (
            Row(
                _channel(**_AUGMENTED),
                cure=_channel(**_AUGMENTED, input_mode="Pipe"),
            ),
            Row(
                _channel(**_AUGMENTED, input_mode="FastFile"),
                cure=_channel(**_AUGMENTED, input_mode="Pipe"),
            ),
        ),
    ),
    Rule(
        "sagemaker.channels.{item}.attribute_names",
        Verdict.REFUSED,
        _each(
            lambda how: (how.s3_data_type == "AugmentedManifestFile") != bool(how.attribute_names)
        ),
        "an augmented manifest needs the names of the attributes to read, and nothing else has any",
        "attribute_names with s3_data_type: AugmentedManifestFile, or neither",
        _SOURCES,
        (
            Row(
                _channel(s3_data_type="AugmentedManifestFile", input_mode="Pipe"),
                cure=_channel(**_AUGMENTED, input_mode="Pipe"),
            ),
            Row(_channel(attribute_names=["source-ref"]), cure=_channel()),
        ),
    ),
    Rule(
        "sagemaker.channels.{item}.input_mode",
        Verdict.OTHER,
        _each(lambda how: how.input_mode == "Pipe"),
        "the program will find no folder but a FIFO for each epoch: the value of DEPLOYKIT_DATA_"
        "... with _0, _1, ... after it",
        "input_mode: FastFile, which streams too, as plain files",
        _ACCESS,
        (Row(_channel(input_mode="Pipe"), cure=_channel(input_mode="FastFile")),),
    ),
    Rule(
        "sagemaker.channels.{item}",
        Verdict.REFUSED,
        _each(
            lambda how: (
                how.input_mode != "Pipe"
                and (how.compression != "None" or how.record_wrapping != "None")
            )
        ),
        "compression and record_wrapping are for Pipe mode only",
        "None for both, or input_mode: Pipe",
        _CHANNEL,
        (Row(_channel(compression="Gzip"), cure=_channel()),),
    ),
    Rule(
        "sagemaker.channels.{item}.file_system_id",
        Verdict.REFUSED,
        lambda case: [] if case.options.subnets else _each(lambda how: how.file_system_id)(case),
        "a file system is reached through your VPC only",
        "subnets and security_group_ids that reach it",
        _ACCESS,
        (Row(sm(channels={"train": _LUSTRE}), cure=_NETWORK),),
    ),
    Rule(
        "sagemaker.channels.{item}",
        Verdict.REFUSED,
        _each(
            lambda how: (
                how.file_system_id is not None
                and (how.s3 is not None or how.input_mode != "File" or how.directory_path is None)
            )
        ),
        "a file system needs directory_path, File mode, and no place in S3 beside it",
        "file_system_id with directory_path alone",
        f"{API}/API_FileSystemDataSource.html",
        (
            Row(
                _NETWORK | sm(channels={"train": {"file_system_id": "fs-0123456789abcdef0"}}),
                Sdk.UNASKED,
                cure=sm(channels={"train": _LUSTRE}),
            ),
        ),
    ),
    Rule(
        "sagemaker.channels.{item}.instance_groups",
        Verdict.REFUSED,
        _strangers,
        "names a group that is none of instance_groups",
        "one of instance_groups, or leave it out",
        _SOURCES,
        (Row(_channel(instance_groups=["gpu"]), cure=_channel()),),
    ),
    Rule(
        "env.{item}",
        Verdict.REFUSED,
        _far_secrets,
        "SageMaker's machines cannot see a secret of this kind",
        "a secret of kind ssm or secretsmanager",
        "https://docs.aws.amazon.com/secretsmanager/latest/userguide/retrieving-secrets.html",
        (
            Row(
                {"env": {"TOKEN": "secret:env:TOKEN"}},
                Sdk.UNASKED,
                cure={"env": {"TOKEN": "secret:ssm:/team/token"}},
            ),
        ),
    ),
    Rule(
        "env.{item}",
        Verdict.REFUSED,
        lambda case: (
            [name for name, value in case.job.env.items() if contract.is_secret(value)]
            if case.options.network_isolation
            else []
        ),
        "an isolated container cannot look up a secret",
        "network_isolation: false, or no secret",
        f"{GUIDE}/mkt-algo-model-internet-free.html",
        (
            Row(
                {"env": {"TOKEN": "secret:ssm:/team/token"}} | sm(network_isolation=True),
                Sdk.UNASKED,
                cure=sm(network_isolation=False),
            ),
        ),
    ),
)
