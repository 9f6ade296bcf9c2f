"""The only file that knows the SageMaker SDK (2.x): it asks what an estimator would send.

The question is put to a process of its own. Importing the SDK probes the machine's metadata
service, reads configuration files, prints and takes seconds, and its `fit` reports to AWS. The
child has homes without configuration, no credentials, and sockets that refuse to connect.

The question is the plain data of `sdk_terms.py`.

As a program: ``python -P sdk.py arguments.json request.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REFUSALS = (ValueError, RuntimeError)
"""What the SDK raises for arguments that it does not want."""
SETTINGS = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""For a user's own session: in the place of the SDK's configuration files, which would change
requests silently. Reading them costs seconds, and the child has none anyway."""
_TALK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def available() -> bool:
    """Whether the SDK is installed, in a version that still has estimators. Imports nothing."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sagemaker").split(".")[0] == "2"
    except PackageNotFoundError:
        return False


def command(asked: Path, answer: Path) -> list[str]:
    """The program that reads `asked` and writes `answer`."""
    return [sys.executable, "-P", __file__, str(asked), str(answer)]


def surroundings(folder: Path) -> dict[str, str]:
    """The child's environment: nothing of AWS or the SDK, and `folder` for every home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "SAGEMAKER_", "SM_", "XDG_", "MLFLOW_"))
    }
    return {
        **kept,
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(folder),
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "XDG_CONFIG_DIRS": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }


def session(asked: Mapping[str, Any]) -> Any:
    """The SDK's session with the user's credentials, without the SDK's reports and files."""
    import boto3
    from sagemaker.session import Session

    connection: Any = boto3.Session(region_name=asked["region"])
    return Session(connection, default_bucket=asked["bucket"], sagemaker_config=SETTINGS)


def estimator(asked: Mapping[str, Any], talk: Any, upload: Callable[[], None]) -> Any:
    """The `PyTorch` estimator for `asked`; its `fit()` sends the request of the plan.

    `upload` puts our bundle in its place: the SDK would drop the folder of the entry point.
    """
    from sagemaker.fw_utils import UploadedCode
    from sagemaker.pytorch.estimator import PyTorch

    class Planned(PyTorch):
        def _stage_user_code_in_s3(self) -> Any:
            upload()
            return UploadedCode(s3_prefix=self.source_dir, script_name=self.entry_point)

        def _script_mode_hyperparam_update(self, code_dir: str, script: str) -> None:
            if asked["source_is_a_channel"]:  # the SDK knows this only for isolated containers
                self.code_uri = asked["estimator"]["source_dir"]
                code_dir = self.CONTAINER_CODE_CHANNEL_SOURCEDIR_PATH
            super()._script_mode_hyperparam_update(code_dir, script)

        def fit(
            self,
            inputs: Any = None,
            wait: bool = True,  # noqa: FBT001, FBT002
            logs: Any = "All",
            job_name: str | None = None,
            experiment_config: Any = None,
        ) -> Any:
            name = job_name or asked["run"]
            self.environment = {**self.environment, "DEPLOYKIT_RUN": name}
            return super().fit(
                inputs or _inputs(asked) or None, wait, logs, name, experiment_config
            )

    return Planned(sagemaker_session=talk, **_objects(asked["estimator"]))


def _objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's arguments, with the SDK's objects where it wants them."""
    debugger: Any = importlib.import_module("sagemaker.debugger")
    machines: Any = importlib.import_module("sagemaker.instance_group")
    groups = [machines.InstanceGroup(**one) for one in given["instance_groups"] or ()]
    made: dict[str, Any] = {"instance_groups": groups or None}
    distribution = given["distribution"]
    if distribution and "instance_groups" in distribution:
        named = {group.instance_group_name: group for group in groups}
        wanted = [named[name] for name in distribution["instance_groups"]]
        made["distribution"] = {**distribution, "instance_groups": wanted}
    for name, kind in (
        ("profiler_config", debugger.ProfilerConfig),
        ("tensorboard_output_config", debugger.TensorBoardOutputConfig),
    ):
        if given[name] is not None:
            made[name] = kind(**given[name])
    return {**given, **made}


def _inputs(asked: Mapping[str, Any]) -> dict[str, Any]:
    kinds: Any = importlib.import_module("sagemaker.inputs")
    found = {}
    for name, given in asked["inputs"].items():
        options = dict(given)
        if "shuffle_config" in options:
            options["shuffle_config"] = kinds.ShuffleConfig(**options["shuffle_config"])
        kind = kinds.FileSystemInput if "file_system_id" in options else kinds.TrainingInput
        found[name] = kind(**options)
    return found


def intercepted(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The request that `PyTorch(...).fit()` would send. Raises what the SDK refuses with."""
    import boto3
    from sagemaker.session import Session

    caught: list[dict[str, Any]] = []
    talk: Any = Session(
        boto3.Session("none", "none", region_name=asked["region"]),
        default_bucket=asked["bucket"],
    )
    talk._intercept_create_request = lambda request, *_: caught.append(request)  # noqa: SLF001
    estimator(asked, talk, lambda: None).fit(wait=False)
    return caught[0]


def cut_off() -> None:
    """Let this process reach nobody from here on. Cannot be undone."""

    def refuse(event: str, _: Any) -> None:
        if event in _TALK:
            raise OSError("the SageMaker SDK is only asked, and may not talk to anybody")

    sys.addaudithook(refuse)


def main(asked: Path, answer: Path) -> None:
    cut_off()
    os.umask(0o077)  # a process of its own: all that it leaves is the user's alone
    result: dict[str, Any]
    try:
        result = {"request": intercepted(json.loads(asked.read_text()))}
    except REFUSALS as error:
        result = {"refused": str(error)}
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
