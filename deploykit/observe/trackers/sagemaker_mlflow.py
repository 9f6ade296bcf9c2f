"""MLflow servers that SageMaker manages: their address, and requests signed by AWS's rules.

Address, service name and header are those of AWS's own plug-in, sagemaker-mlflow 0.5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from deploykit.lib.errors import NotPermitted

_SERVER = "mlflow-tracking-server"
_HEADERS = {_SERVER: "x-mlflow-sm-tracking-server-arn", "mlflow-app": "x-sm-mlflow-app-arn"}
_SERVICES = {_SERVER: "sagemaker-mlflow", "mlflow-app": "sagemaker"}


def address(arn: str) -> str:
    """Where the server answers, for a user whom its service knows by the signature."""
    kind, region = _parts(arn)
    if kind == _SERVER:
        return f"https://{region}.experiments.sagemaker.aws"
    return f"https://mlflow.sagemaker.{region}.app.aws"


class Signer:
    """Signs requests to a server with the usual credentials of AWS."""

    def __init__(self, arn: str) -> None:
        self._arn = arn
        self._auth: Any = None

    def __call__(self, method: str, url: str, body: bytes) -> Mapping[str, str]:
        """The headers of a request. Raises NotPermitted where there are no credentials."""
        from botocore.awsrequest import AWSRequest  # not for other trackers

        if self._auth is None:
            self._auth = self._new()
        kind, _ = _parts(self._arn)
        headers = {_HEADERS[kind]: self._arn}
        headers["X-Amz-Content-SHA256"] = hashlib.sha256(body).hexdigest()
        if body:
            headers["Content-Type"] = "application/json"
        request = AWSRequest(method=method, url=url, data=body, headers=headers)
        self._auth.add_auth(request)
        return {str(name): str(value) for name, value in request.headers.items()}

    def _new(self) -> Any:
        import boto3
        from botocore.auth import SigV4Auth

        kind, region = _parts(self._arn)
        credentials: Any = boto3.Session().get_credentials()
        if credentials is None:
            raise NotPermitted(
                f"there are no AWS credentials for {self._arn}",
                hint="aws configure, or aws sso login",
            )
        return SigV4Auth(credentials, _SERVICES[kind], region)


def _parts(arn: str) -> tuple[str, str]:
    """The kind of the server, and its region."""
    _, _, _, region, _, resource = arn.split(":", 5)
    return resource.partition("/")[0], region
