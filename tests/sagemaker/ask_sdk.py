"""What the installed SageMaker SDK would send for each job of a list, in one process.

``python -P ask_sdk.py SDK.PY QUESTIONS.JSON ANSWERS.JSON``; SDK.PY is deploykit's own file.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path


def main(module, questions, answers):
    ours = runpy.run_path(module)
    intercepted = ours["intercepted"]
    ours["cut_off"]()
    _keep_clients()
    _keep_files()
    asked = json.loads(Path(questions).read_text())
    requests = [_or_refusal(intercepted, one, ours["REFUSALS"]) for one in asked["jobs"]]
    result = {"requests": requests, "images": [_image(*one) for one in asked["images"]]}
    Path(answers).write_text(json.dumps(result))


def _keep_clients():
    """One client a service and region: building them is most of the time."""
    import boto3

    build = boto3.Session.client
    clients = {}

    def client(self, service, *args, **options):
        key = (self.region_name, service)
        if key not in clients:
            clients[key] = build(self, service, *args, **options)
        return clients[key]

    boto3.Session.client = client


def _keep_files():
    """Botocore reads its descriptions of services and regions anew for each session."""
    from botocore.loaders import JSONFileLoader

    read = JSONFileLoader.load_file
    files = {}

    def load_file(self, path):
        if path not in files:
            files[path] = read(self, path)
        return files[path]

    JSONFileLoader.load_file = load_file


def _or_refusal(intercepted, asked, refusals):
    try:
        return intercepted(asked)
    except refusals as error:
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
