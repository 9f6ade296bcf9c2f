"""What `sagemaker.deploy` becomes: the requests, their names, and what is refused before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.backends.deployment import Package, recorded
from deploykit.backends.sagemaker import service_model
from deploykit.backends.sagemaker.deployment import check_deployment, plan_deployment
from deploykit.backends.sagemaker.options import Options
from deploykit.job.decode import decode
from tests.backends.sagemaker.sdk_deployments import sdk_deployments

BASE = {
    "role": "arn:aws:iam::123456789012:role/training",
    "bucket": "my-bucket",
    "region": "us-east-1",
}
PACKAGE = Package(Path("model"), "ab" * 32, "exp-1", "2.6.0+cpu")
TOPIC = "arn:aws:sns:us-east-1:123456789012:answers"
VPC = {"subnets": ["subnet-0a1b2c3d"], "security_group_ids": ["sg-0a1b2c3d"]}
CPU = {"instance_type": "ml.m5.xlarge"}
CONFIGURATIONS = {
    "real-time": ({}, {"instance_type": "ml.g5.xlarge", "instance_count": 2}),
    "own VPC, keys and tags": (
        {**VPC, "network_isolation": True, "tags": {"team": "vision"}, "output_kms_key": "a-key"},
        {**CPU, "volume_kms_key": "a-key", "volume_size": 50, "startup_timeout": "10m"},
    ),
    "autoscaling": ({}, {**CPU, "autoscaling": {"max": 4, "target": 600, "min": 1}}),
    "serverless": ({}, {"serverless": {"memory": 4, "max_concurrency": 20}}),
    "asynchronous": (
        {},
        {
            **CPU,
            "async": {
                "failures": "s3://my-bucket/failures",
                "success_topic": TOPIC,
                "error_topic": TOPIC,
                "max_concurrency": 4,
            },
            "autoscaling": {"max": 4, "target": 5, "min": 0},
        },
    ),
    "batch": (
        {},
        {
            **CPU,
            "instance_count": 3,
            "batch": {
                "input": "s3://my-bucket/requests",
                "content_type": "application/jsonlines",
                "split": "Line",
                "strategy": "MultiRecord",
                "assemble": "Line",
                "max_payload": 6,
            },
        },
    ),
    "captured canary": (
        {},
        {
            **CPU,
            "variant": "new",
            "weight": 1,
            "variants": [{"name": "stable", "model": "digits-0a1b2c3d4e", "weight": 9}],
            "capture": {"percent": 10},
        },
    ),
    "shadow": (
        {},
        {
            **CPU,
            "variant": "new",
            "shadow": True,
            "variants": [{"name": "stable", "model": "digits-0a1b2c3d4e"}],
            "env": {"MODEL_SERVER_WORKERS": "2"},
            "request": {"ProductionVariant": {"ModelDataDownloadTimeoutInSeconds": 600}},
        },
    ),
}


def options(section=None, deploy=None):
    value, problems = decode(Options, {**BASE, **(section or {}), "deploy": deploy}, "sagemaker")
    assert problems == []
    return value


def planned(*configuration, **more):
    chosen = options(*configuration)
    assert list(check_deployment(chosen, PACKAGE)) == []
    return plan_deployment(chosen, PACKAGE, name="digits", **more)


def parameters(plan, operation):
    (request,) = (each for each in plan.requests if each.operation == operation)
    return request.parameters


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_botocore_accepts_every_request(name):
    """By its own validator, which knows types and required fields, and by patterns and ranges."""
    plan = planned(*CONFIGURATIONS[name])
    update = planned(*CONFIGURATIONS[name], exists=True, earlier=recorded(plan, 0.0))
    assert len({each.operation for each in [*plan.requests, *update.requests]}) >= 2
    for each in [*plan.requests, *update.requests]:
        known = service_model.shapes(each.service)
        shape = f"{each.operation}Input"
        shape = shape if shape in known else f"{each.operation}Request"
        assert list(service_model.type_errors(shape, each.parameters, each.service)) == []
        assert list(service_model.violations(shape, each.parameters, each.service)) == []


def test_the_service_model_finds_what_is_wrong():
    """So that the test above can fail."""
    wrong = {"EndpointName": 3}
    assert len(list(service_model.type_errors("CreateEndpointInput", wrong))) == 2
    target = {"ServiceNamespace": "sagemakr", "ResourceId": "e", "ScalableDimension": "x"}
    shape, service = "RegisterScalableTargetRequest", "application-autoscaling"
    assert len(list(service_model.violations(shape, target, service))) == 2


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_same_deployment_has_the_same_names_and_another_one_others(name):
    plan = planned(*CONFIGURATIONS[name])
    assert planned(*CONFIGURATIONS[name]) == plan
    other = plan_deployment(plan.options, PACKAGE._replace(hash="cd" * 32), name="digits")
    assert other.model != plan.model
    assert other.config != plan.config
    assert other.archive != plan.archive
    assert other.name == plan.name or plan.mode == "batch"
    section, deploy = CONFIGURATIONS[name]
    changed = planned(section, {**deploy, "env": {"OTHER": "1"}})
    assert (changed.model, changed.config) != (plan.model, plan.config)


def test_names_are_at_most_63_characters():
    chosen = options({}, CPU)
    plan = plan_deployment(chosen, PACKAGE, name="n" * 63)
    assert len(plan.model) == len(plan.config) == 63
    assert plan.name == "n" * 63


def test_a_batch_job_has_the_name_that_was_chosen():
    section, deploy = CONFIGURATIONS["batch"]
    assert planned(section, {**deploy, "name": "monday"}).name == "monday"
    assert planned(section, deploy).name.startswith("digits-")


def test_modes():
    modes = [planned(*each).mode for each in CONFIGURATIONS.values()]
    assert modes == [
        *("real-time", "real-time", "real-time", "serverless"),
        *("asynchronous", "batch", "real-time", "real-time"),
    ]


def test_machines():
    machines = [tuple(map(tuple, planned(*each).machines)) for each in CONFIGURATIONS.values()]
    assert machines[0] == (("ml.g5.xlarge", 2, 2, 0),)
    assert machines[2] == (("ml.m5.xlarge", 1, 4, 0),)
    assert machines[3] == (("", 0, 20, 4096),)
    assert machines[5] == (("ml.m5.xlarge", 3, 3, 0),)
    assert machines[6] == (("ml.m5.xlarge", 1, 1, 0), ("ml.m5.xlarge", 1, 1, 0))


def test_a_canary_beside_the_earlier_model():
    plan = planned(*CONFIGURATIONS["captured canary"])
    variants = parameters(plan, "CreateEndpointConfig")["ProductionVariants"]
    assert [(each["VariantName"], each["ModelName"]) for each in variants] == [
        ("new", plan.model),
        ("stable", "digits-0a1b2c3d4e"),
    ]
    assert [each["InitialVariantWeight"] for each in variants] == [1.0, 9.0]


def test_a_shadow_of_the_earlier_model():
    config = parameters(planned(*CONFIGURATIONS["shadow"]), "CreateEndpointConfig")
    assert [each["VariantName"] for each in config["ProductionVariants"]] == ["stable"]
    (shadow,) = config["ShadowProductionVariants"]
    assert shadow["VariantName"] == "new"
    assert shadow["ModelDataDownloadTimeoutInSeconds"] == 600


def test_network_keys_and_tags_reach_the_requests():
    plan = planned(*CONFIGURATIONS["own VPC, keys and tags"])
    model, config = parameters(plan, "CreateModel"), parameters(plan, "CreateEndpointConfig")
    assert model["VpcConfig"] == {
        "SecurityGroupIds": ["sg-0a1b2c3d"],
        "Subnets": ["subnet-0a1b2c3d"],
    }
    assert model["EnableNetworkIsolation"] is True
    assert config["KmsKeyId"] == "a-key"
    for each in plan.requests:
        own = [{"Key": "deploykit:run", "Value": "exp-1"}]
        tags = [{"Key": "team", "Value": "vision"}]
        tags += own if each.operation == "CreateEndpoint" else []
        assert each.parameters["Tags"] == tags


def test_autoscaling_starts_once_the_endpoint_is_in_service():
    plan = planned(*CONFIGURATIONS["asynchronous"])
    later = [each for each in plan.requests if each.later]
    assert [each.operation for each in later] == ["RegisterScalableTarget", "PutScalingPolicy"]
    assert later[0].parameters["MinCapacity"] == 0
    policy = later[1].parameters["TargetTrackingScalingPolicyConfiguration"]
    assert (
        policy["CustomizedMetricSpecification"]["MetricName"] == "ApproximateBacklogSizePerInstance"
    )


def test_an_update_keeps_the_autoscaling_of_the_same_machines():
    earlier = recorded(planned(*CONFIGURATIONS["autoscaling"]), 0.0)
    section, deploy = CONFIGURATIONS["autoscaling"]
    same = planned(section, {**deploy, "env": {"A": "1"}}, exists=True, earlier=earlier)
    operations = [each.operation for each in same.requests]
    assert operations == [
        *("CreateModel", "CreateEndpointConfig", "UpdateEndpoint"),
        *("RegisterScalableTarget", "PutScalingPolicy"),
    ]
    assert parameters(same, "UpdateEndpoint")["RetainAllVariantProperties"] is True


@pytest.mark.parametrize("change", [{"instance_type": "ml.c5.xlarge"}, {"autoscaling": None}])
def test_an_update_first_ends_the_autoscaling_of_other_machines(change):
    earlier = recorded(planned(*CONFIGURATIONS["autoscaling"]), 0.0)
    section, deploy = CONFIGURATIONS["autoscaling"]
    plan = planned(section, {**deploy, **change}, exists=True, earlier=earlier)
    operations = [each.operation for each in plan.requests]
    assert operations.index("DeregisterScalableTarget") + 1 == operations.index("UpdateEndpoint")
    assert "RetainAllVariantProperties" not in parameters(plan, "UpdateEndpoint")


REFUSED = [
    ({}, None, "", "sagemaker.deploy: is required"),
    ({}, {}, "", "instance_type: is required"),
    (
        {"region": "eu-north-9"},
        CPU,
        "",
        "image_uri: the AWS account that hosts the images in eu-north-9 is",
    ),
    ({"subnets": ["subnet-1"]}, CPU, "", "sagemaker.security_group_ids: subnets and"),
    ({}, {"instance_type": "ml.g5.xlagre"}, "", "instance_type: SageMaker: 'ml.g5.xlagre' is not"),
    ({}, {**CPU, "framework_version": "2.8.0"}, "", "no inference image with PyTorch 2.8.0"),
    ({}, CPU, "2.14.0", "the package's PyTorch version, 2.14.0"),
    (
        {},
        {**CPU, "framework_version": "2.6.0", "image_uri": "a/b:c"},
        "",
        "cannot be combined with",
    ),
    ({}, {**CPU, "image_uri": "a/pytorch-inference:2.6.0-gpu-py312"}, "", "is a GPU image"),
    ({}, {"instance_type": "ml.p6-b200.48xlarge"}, "", "does not support ml.p6-b200.48xlarge"),
    ({}, {"serverless": {}, "instance_type": "ml.g5.xlarge"}, "", "no instances or GPUs"),
    ({}, {"serverless": {}, "image_uri": "a/b:1-gpu-x"}, "", "is a GPU image, but serverless"),
    (VPC, {"serverless": {}}, "", "sagemaker.subnets: is not supported with `serverless`"),
    ({}, {"serverless": {}, "capture": {"percent": 1}}, "", "capture: is not supported with"),
    (
        {},
        {"serverless": {"max_concurrency": 2, "provisioned_concurrency": 3}},
        "",
        "provisioned_concurrency: must be at most max_concurrency, which is 2",
    ),
    ({}, {**CPU, "serverless": {}, "async": {}}, "", "async: cannot be combined with `serverless`"),
    ({}, {**CPU, "autoscaling": {"max": 4, "target": 1, "min": 5}}, "", "min: must be at most"),
    ({}, {**CPU, "autoscaling": {"max": 4, "target": 1, "min": 0}}, "", "0 requires `async`"),
    ({}, {**CPU, "instance_count": 9, "autoscaling": {"max": 4, "target": 1}}, "", "1 to 4"),
    (
        {},
        {**CPU, "batch": {"input": "s3://my-bucket/a"}, "autoscaling": {"max": 2, "target": 1}},
        "",
        "autoscaling: is not supported with `batch`",
    ),
    ({}, {**CPU, "shadow": True}, "", "shadow: a shadow variant needs exactly one other variant"),
    ({}, {**CPU, "weight": 0}, "", "weight: at least one variant"),
    (
        {},
        {**CPU, "variants": [{"name": "AllTraffic", "model": "m"}]},
        "",
        "variants[0].name: duplicate variant name AllTraffic",
    ),
    (
        {},
        {**CPU, "env": {"KEY": "secret:ssm:key"}},
        "",
        "env.KEY: secrets are resolved only for training",
    ),
    (
        {},
        {"instance_type": "ml.g5.xlarge", "volume_kms_key": "a-key"},
        "",
        "volume_kms_key: is not supported on ml.g5.xlarge",
    ),
    (
        {},
        {**CPU, "request": {"CreateModel": {"PrimaryContainer": {"Image": "x"}}}},
        "",
        "CreateModel.PrimaryContainer.Image: is set by deploykit; use sagemaker.deploy.image",
    ),
    (
        {},
        {**CPU, "request": {"CreateEndpointConfig": {"ProductionVariants": []}}},
        "",
        "ProductionVariants: is set by deploykit",
    ),
    ({}, {**CPU, "request": {"CreateEndpont": {}}}, "", "did you mean 'CreateEndpoint'?"),
    (
        {},
        {**CPU, "request": {"CreateModel": {"EnableNetworkIsolaton": True}}},
        "",
        "is not supported by the installed botocore",
    ),
    (
        {},
        {**CPU, "request": {"CreateModel": {"InferenceExecutionConfig": {"Mode": 3}}}},
        "",
        "CreateModel: Invalid type",
    ),
]


@pytest.mark.parametrize(("section", "deploy", "torch", "message"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_created(section, deploy, torch, message):
    package = PACKAGE._replace(torch=torch or PACKAGE.torch)
    problems = [str(each) for each in check_deployment(options(section, deploy), package)]
    assert any(message in each for each in problems), problems


def test_all_problems_are_reported_at_once():
    chosen = options(
        {}, {"serverless": {}, "shadow": True, "weight": 0, "framework_version": "9.9.9"}
    )
    problems = list(check_deployment(chosen, PACKAGE))
    assert {each.path.removeprefix("sagemaker.deploy.") for each in problems} >= {
        *("shadow", "weight", "framework_version"),
    }


def test_serverless_memory_is_at_most_6_gb():
    _, (problem,) = decode(Options, {**BASE, "deploy": {"serverless": {"memory": 8}}}, "sagemaker")
    assert str(problem) == "sagemaker.deploy.serverless.memory: must be at most 6 GB, got 8"


def test_another_pytorch_than_the_package_s_is_a_warning():
    chosen = options({}, {**CPU, "framework_version": "2.5.1"})
    (problem,) = check_deployment(chosen, PACKAGE)
    assert problem.severity == "warning"
    assert "built with PyTorch 2.6.0, but the image has 2.5.1" in problem.message


SDK = {
    name: CONFIGURATIONS[name]
    for name in ("real-time", "own VPC, keys and tags", "serverless", "asynchronous", "batch")
}
"""Those that `PyTorchModel.deploy` and `transformer` of the SDK can express."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*SageMaker Python SDK v2")
def test_the_sdk_sends_the_same(tmp_path):
    """`PyTorchModel` 2.257.7 with the same settings, except for three things.

    Ours tags the endpoint with its run. The SDK gives the configuration the name of the endpoint,
    so a second deployment fails; and it sends an endpoint without tags an empty list of them.
    """
    plans = {name: planned(*each) for name, each in SDK.items()}
    sent = sdk_deployments(tmp_path, plans)
    for name, plan in plans.items():
        own = {each.operation: each.parameters for each in plan.requests if not each.later}
        by_sdk = json.loads(json.dumps(sent[name]).replace('"Tags": []', '"Tags": null'))
        assert own.keys() == by_sdk.keys(), name
        for operation, request in by_sdk.items():
            if "EndpointConfigName" in request:
                assert request["EndpointConfigName"] == plan.name
                request["EndpointConfigName"] = plan.config
            known = {key: value for key, value in request.items() if value is not None}
            ours = json.loads(json.dumps(own[operation]))
            if operation == "CreateEndpoint":
                own_tag = ours["Tags"].pop()
                assert own_tag == {"Key": "deploykit:run", "Value": "exp-1"}
                ours = {key: value for key, value in ours.items() if value}
            assert ours == known, (name, operation)


def test_a_gradual_update_is_expressed_by_request():
    """Traffic moves in two steps, and back if an alarm goes off."""
    size = {"Type": "CAPACITY_PERCENT", "Value": 10}
    routing = {"Type": "CANARY", "WaitIntervalInSeconds": 600, "CanarySize": size}
    guarded = {
        "BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing},
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": "errors"}]},
    }
    deploy = {**CPU, "request": {"UpdateEndpoint": {"DeploymentConfig": guarded}}}
    plan = planned({}, deploy, exists=True)
    assert parameters(plan, "UpdateEndpoint")["DeploymentConfig"] == guarded
    wrong = {**guarded, "AutoRollbackConfiguration": {"Alarms": [{"AlarmNam": "errors"}]}}
    chosen = options({}, {**CPU, "request": {"UpdateEndpoint": {"DeploymentConfig": wrong}}})
    (problem,) = check_deployment(chosen, PACKAGE)
    assert "is not supported by the installed botocore (did you mean 'AlarmName'?)" in str(problem)
