"""What `ModelBuilder` of the SageMaker SDK 3 sends to deploy a model.

A process of that SDK's environment calls `main`. It sends to the server of ``AWS_ENDPOINT_URL``,
which records the requests.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from tests.backends.sagemaker import sdk_requests


def main(path):
    sdk_requests.share_clients()
    sdk_requests.share_descriptions()
    for plan in pickle.loads(Path(path).read_bytes()):
        _send(plan)


def _send(plan):
    import boto3
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training.configs import Networking
    from sagemaker.serve.model_builder import ModelBuilder

    options, deploy = plan.options, plan.options.deploy
    container = sdk_requests.parameters(plan, "CreateModel")["PrimaryContainer"]
    tags = [{"Key": key, "Value": value} for key, value in options.tags.items()] or None
    session = Session(boto3.Session(region_name=options.region), default_bucket=options.bucket)
    network = Networking(
        subnets=list(options.subnets) or None,
        security_group_ids=list(options.security_group_ids) or None,
        enable_network_isolation=options.network_isolation or None,
    )
    builder = ModelBuilder(
        image_uri=container["Image"],
        s3_model_data_url=container["ModelDataUrl"],
        env_vars=container["Environment"],
        role_arn=options.role,
        instance_type=deploy.instance_type,
        network=network,
        sagemaker_session=session,
    )
    builder.build(model_name=plan.model, tags=tags)
    if deploy.batch is not None:
        sdk_requests.transform(builder, plan, tags)
        return
    builder.deploy(
        endpoint_name=plan.name,
        initial_instance_count=deploy.instance_count,
        inference_config=_inference_config(plan),
        container_startup_health_check_timeout=deploy.startup_timeout,
        volume_size=deploy.volume_size,
        kms_key=deploy.volume_kms_key,
        wait=False,
    )


def _inference_config(plan):
    from sagemaker.core.inference_config import AsyncInferenceConfig, ServerlessInferenceConfig

    deploy = plan.options.deploy
    if deploy.serverless is not None:
        chosen = deploy.serverless
        return ServerlessInferenceConfig(chosen.memory * 1024, chosen.max_concurrency)
    if deploy.async_ is None:
        return None
    config = sdk_requests.parameters(plan, "CreateEndpointConfig")
    output = config["AsyncInferenceConfig"]["OutputConfig"]
    return AsyncInferenceConfig(
        output_path=output["S3OutputPath"],
        failure_path=output["S3FailurePath"],
        max_concurrent_invocations_per_instance=deploy.async_.max_concurrency,
        notification_config=output["NotificationConfig"],
    )
