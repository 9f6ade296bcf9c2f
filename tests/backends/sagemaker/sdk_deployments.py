"""What the SageMaker SDK 2 sends to deploy a model, from one process: importing it takes seconds.

``python -P -m tests.backends.sagemaker.sdk_deployments QUESTIONS ANSWERS`` is that process. It has
no network, and its client records requests instead of sending them.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

from tests.backends.sagemaker import sdk_requests


def sdk_deployments(folder, plans):
    """The requests of each plan as the SDK sends them: plan name -> operation -> parameters."""
    question, answer = folder / "questions.pickle", folder / "answers.json"
    question.write_bytes(pickle.dumps(plans))
    argv = [sys.executable, "-P", "-m", __name__, question, answer]
    done = subprocess.run(
        argv,
        env=sdk_requests.environment(folder),
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text())


def main(questions, answers):
    sdk_requests.disable_network()
    plans = pickle.loads(Path(questions).read_bytes())
    result = {name: _sent(plan) for name, plan in plans.items()}
    Path(answers).write_text(json.dumps(result))


class _Client:
    """In place of boto3's client: records what would be sent."""

    def __init__(self):
        self.sent = {}

    def __getattr__(self, name):
        def call(**parameters):
            operation = "".join(part.title() for part in name.split("_"))
            if operation.startswith("Create"):
                self.sent[operation] = parameters
            return {"ModelArn": "arn", "EndpointConfigArn": "arn", "EndpointArn": "arn"}

        return call


def _sent(plan):
    import boto3
    from sagemaker.async_inference import AsyncInferenceConfig
    from sagemaker.pytorch import PyTorchModel
    from sagemaker.serverless import ServerlessInferenceConfig
    from sagemaker.session import Session

    options, deploy, client = plan.options, plan.options.deploy, _Client()
    connection = boto3.Session("none", "none", region_name=options.region)
    session = Session(connection, sagemaker_client=client, default_bucket=options.bucket)
    PyTorchModel._upload_code = _has_code
    vpc = {"Subnets": list(options.subnets), "SecurityGroupIds": list(options.security_group_ids)}
    model = PyTorchModel(
        model_data=plan.archive,
        role=options.role,
        entry_point="inference.py",
        framework_version="2.6.0",
        py_version="py312",
        name=plan.model,
        env=dict(plan.options.deploy.env),
        vpc_config=vpc if options.subnets else None,
        enable_network_isolation=options.network_isolation or None,
        sagemaker_session=session,
    )
    tags = [{"Key": key, "Value": value} for key, value in options.tags.items()] or None
    if deploy.batch is not None:
        sdk_requests.transform(model, plan, tags)
        return client.sent
    settings = {}
    if deploy.serverless is not None:
        memory = deploy.serverless.memory * 1024
        settings["serverless_inference_config"] = ServerlessInferenceConfig(
            memory, deploy.serverless.max_concurrency
        )
    else:
        settings |= {
            "instance_type": deploy.instance_type,
            "initial_instance_count": deploy.instance_count,
            "container_startup_health_check_timeout": deploy.startup_timeout,
            "volume_size": deploy.volume_size,
        }
    if deploy.async_ is not None:
        config = sdk_requests.parameters(plan, "CreateEndpointConfig")
        output = config["AsyncInferenceConfig"]["OutputConfig"]
        settings["async_inference_config"] = AsyncInferenceConfig(
            output_path=output["S3OutputPath"],
            failure_path=output["S3FailurePath"],
            max_concurrent_invocations_per_instance=deploy.async_.max_concurrency,
            notification_config=output["NotificationConfig"],
        )
    model.deploy(
        endpoint_name=plan.name, kms_key=deploy.volume_kms_key, tags=tags, wait=False, **settings
    )
    return client.sent


def _has_code(model, *_, **__):
    """In place of repacking the archive with the code, which a package has already."""
    from sagemaker.fw_utils import UploadedCode

    model.repacked_model_data = model.model_data
    model.uploaded_code = UploadedCode(s3_prefix=model.model_data, script_name=model.entry_point)


if __name__ == "__main__":
    main(*sys.argv[1:])
