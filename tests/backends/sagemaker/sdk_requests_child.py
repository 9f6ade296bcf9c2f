"""Write what the installed SageMaker SDK would send for each job of a list.

``python -P -m tests.backends.sagemaker.sdk_requests_child QUESTIONS.JSON ANSWERS.JSON``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploykit.backends.sagemaker import estimator


def main(questions, answers):
    estimator.disable_network()
    _share_clients()
    _share_descriptions()
    asked = json.loads(Path(questions).read_text())
    result = {
        "requests": [_request(arguments) for arguments in asked["jobs"]],
        "images": [_image(*arguments) for arguments in asked["images"]],
    }
    Path(answers).write_text(json.dumps(result))


def _share_clients():
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


def _share_descriptions():
    """Cache botocore's descriptions of services and regions, which each session reads again."""
    from botocore.loaders import JSONFileLoader

    read = JSONFileLoader.load_file
    files = {}

    def load_file(self, path):
        if path not in files:
            files[path] = read(self, path)
        return files[path]

    JSONFileLoader.load_file = load_file


def _request(arguments):
    try:
        return estimator.intercepted_request(arguments)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
