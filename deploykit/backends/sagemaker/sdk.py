"""The only file that uses the SageMaker SDK (2.x): it finds out what an estimator would send.

This runs in a separate process. Importing the SDK probes the instance metadata service, reads
configuration files, prints, and takes seconds; its `fit` sends telemetry to AWS. The child process
has home folders without configuration, no credentials, and sockets that refuse to connect.

Its input is the plain data of `estimator_args.py`.

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
"""What the SDK raises for arguments that it refuses."""
SETTINGS = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""Configuration of a user's session, instead of the SDK's configuration files, which would silently
change requests. The child needs none: it has no such files, and reading this takes seconds."""
_NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def available() -> bool:
    """Whether a version of the SDK with estimators is installed. Does not import it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sagemaker").split(".")[0] == "2"
    except PackageNotFoundError:
        return False


def command(arguments: Path, answer: Path) -> list[str]:
    """The argument vector of the child, which reads `arguments` and writes `answer`."""
    return [sys.executable, "-P", __file__, str(arguments), str(answer)]


def child_environment(folder: Path) -> dict[str, str]:
    """The child's environment: no settings of AWS or the SDK, and `folder` as every home folder."""
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


def session(arguments: Mapping[str, Any]) -> Any:
    """An SDK session with the user's credentials, without telemetry and configuration files."""
    import boto3
    from sagemaker.session import Session

    connection: Any = boto3.Session(region_name=arguments["region"])
    return Session(connection, default_bucket=arguments["bucket"], sagemaker_config=SETTINGS)


def estimator(
    arguments: Mapping[str, Any], sagemaker_session: Any, upload: Callable[[], None]
) -> Any:
    """The `PyTorch` estimator for a job; its `fit()` sends the request of the plan.

    `fit()` calls `upload` for the source, because the SDK would drop the entry point's folder.
    """
    from sagemaker.fw_utils import UploadedCode
    from sagemaker.pytorch.estimator import PyTorch

    class Planned(PyTorch):
        def _stage_user_code_in_s3(self) -> Any:
            upload()
            return UploadedCode(s3_prefix=self.source_dir, script_name=self.entry_point)

        def _script_mode_hyperparam_update(self, code_dir: str, script: str) -> None:
            if arguments["source_is_a_channel"]:  # the SDK does so for isolated containers only
                self.code_uri = arguments["estimator"]["source_dir"]
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
            name = job_name or arguments["run"]
            self.environment = {**self.environment, "DEPLOYKIT_RUN": name}
            return super().fit(
                inputs or _inputs(arguments) or None, wait, logs, name, experiment_config
            )

    return Planned(sagemaker_session=sagemaker_session, **_objects(arguments["estimator"]))


def _objects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's arguments, with the SDK's objects where it requires them."""
    debugger: Any = importlib.import_module("sagemaker.debugger")
    instances: Any = importlib.import_module("sagemaker.instance_group")
    groups = [instances.InstanceGroup(**group) for group in arguments["instance_groups"] or ()]
    objects: dict[str, Any] = {"instance_groups": groups or None}
    distribution = arguments["distribution"]
    if distribution and "instance_groups" in distribution:
        by_name = {group.instance_group_name: group for group in groups}
        training = [by_name[name] for name in distribution["instance_groups"]]
        objects["distribution"] = {**distribution, "instance_groups": training}
    for name, kind in (
        ("profiler_config", debugger.ProfilerConfig),
        ("tensorboard_output_config", debugger.TensorBoardOutputConfig),
    ):
        if arguments[name] is not None:
            objects[name] = kind(**arguments[name])
    return {**arguments, **objects}


def _inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    classes: Any = importlib.import_module("sagemaker.inputs")
    inputs = {}
    for name, options in arguments["inputs"].items():
        settings = dict(options)
        if "shuffle_config" in settings:
            settings["shuffle_config"] = classes.ShuffleConfig(**settings["shuffle_config"])
        s3 = "file_system_id" not in settings
        inputs[name] = (classes.TrainingInput if s3 else classes.FileSystemInput)(**settings)
    return inputs


def intercepted_request(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The request that `PyTorch(...).fit()` would send. Raises one of `REFUSALS`."""
    import boto3
    from sagemaker.session import Session

    requests: list[dict[str, Any]] = []
    unconnected: Any = Session(
        boto3.Session("none", "none", region_name=arguments["region"]),
        default_bucket=arguments["bucket"],
    )
    unconnected._intercept_create_request = lambda request, *_: requests.append(request)  # noqa: SLF001
    estimator(arguments, unconnected, lambda: None).fit(wait=False)
    return requests[0]


def disable_network() -> None:
    """Make every further connection of this process fail. Cannot be undone."""

    def refuse(event: str, _: Any) -> None:
        if event in _NETWORK_EVENTS:
            raise OSError("the SageMaker SDK runs without network here")

    sys.addaudithook(refuse)


def main(arguments: Path, answer: Path) -> None:
    """Write the SDK's request for the arguments, or its refusal, to `answer` as JSON."""
    disable_network()
    os.umask(0o077)  # only the user may read what this process writes
    result: dict[str, Any]
    try:
        result = {"request": intercepted_request(json.loads(arguments.read_text()))}
    except REFUSALS as error:
        result = {"refused": str(error)}
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
