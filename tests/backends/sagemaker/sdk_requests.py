"""The real SDK's requests for many jobs, from one process: importing the SDK takes seconds.

``python -P -m tests.backends.sagemaker.sdk_requests QUESTIONS ANSWERS`` is that process.
It has no network, no credentials, and no configuration of AWS or the SDK.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from deploykit.backends.sagemaker import estimator

ROOT = Path(__file__).parents[3]
NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def sdk_requests(folder, jobs, images=()):
    """The SDK's `requests` for `jobs`, and the names of `images`.

    A job is a JobSpec, its options, its request, and arguments of the estimator to replace.
    """
    question, answer = folder / "questions.pickle", folder / "answers.json"
    question.write_bytes(pickle.dumps({"jobs": jobs, "images": images}))
    argv = [sys.executable, "-P", "-m", __name__, question, answer]
    subprocess.run(argv, env=environment(folder), cwd=folder, check=True, capture_output=True)
    return json.loads(answer.read_text())


def environment(folder):
    """No settings of AWS or the SDK, and `folder` as every home folder."""
    settings = ("AWS_", "SAGEMAKER_", "SM_", "XDG_", "MLFLOW_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME"), str(folder))
    own = {"AWS_EC2_METADATA_DISABLED": "true", "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    return {**kept, **homes, **own, "PYTHONPATH": str(ROOT)}


def main(questions, answers):
    disable_network()
    share_clients()
    share_descriptions()
    asked = pickle.loads(Path(questions).read_bytes())
    result = {
        "requests": [_request(*job) for job in asked["jobs"]],
        "images": [_image(*arguments) for arguments in asked["images"]],
    }
    Path(answers).write_text(json.dumps(result))


def disable_network():
    def refuse(event, _):
        if event in NETWORK_EVENTS:
            raise OSError("the SageMaker SDK runs without network here")

    sys.addaudithook(refuse)


def share_clients():
    """Use one client per service and region: creating clients takes most of the time."""
    import boto3

    create = boto3.Session.client
    clients = {}

    def client(self, service, *args, **options):
        key = (self.region_name, service)
        if key not in clients:
            clients[key] = create(self, service, *args, **options)
        return clients[key]

    boto3.Session.client = client


def share_descriptions():
    """Cache botocore's descriptions of services and regions, which each session reads again."""
    from botocore.loaders import JSONFileLoader

    read = JSONFileLoader.load_file
    files = {}

    def load_file(self, path):
        if path not in files:
            files[path] = read(self, path)
        return files[path]

    JSONFileLoader.load_file = load_file


def _request(job, options, planned, replaced):
    import boto3
    from sagemaker.session import Session

    connection = boto3.Session("none", "none", region_name=options.region)
    unconnected = Session(connection, default_bucket=options.bucket)
    try:
        return estimator.intercept(job, options, planned, unconnected, **replaced)[0]
    except estimator.REFUSALS as error:
        return {"refused": str(error)}


def _image(region, version, python, instance_type):
    from sagemaker import image_uris

    return image_uris.retrieve(
        "pytorch",
        region,
        version=version,
        py_version=python,
        instance_type=instance_type,
        image_scope="training",
    )


def parameters(plan, operation):
    """The parameters of a planned request."""
    return next(each.parameters for each in plan.requests if each.operation == operation)


def transform(model, plan, tags):
    """Start the planned batch job by a `Model` of SDK 2 or a `ModelBuilder` of SDK 3."""
    job, batch = parameters(plan, "CreateTransformJob"), plan.options.deploy.batch
    transformer = model.transformer(
        plan.options.deploy.instance_count,
        plan.options.deploy.instance_type,
        strategy=batch.strategy,
        assemble_with=batch.assemble,
        output_path=job["TransformOutput"]["S3OutputPath"],
        max_payload=batch.max_payload,
        tags=tags,
    )
    transformer.transform(
        batch.input,
        content_type=batch.content_type,
        split_type=batch.split,
        compression_type=batch.compression,
        job_name=plan.name,
        wait=False,
        logs=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
