"""MLflow, through its REST API: nothing of it need be installed.

https://mlflow.org/docs/latest/api_reference/rest-api.html; checked against a server of 3.17.
A server knows the last step of each metric of a run, so it is asked, and the run is found by its
tag: a lost memory doubles nothing. Address, service name and header of servers that SageMaker
manages are those of AWS's own plug-in, sagemaker-mlflow 0.5.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import parse, request
from urllib.error import HTTPError

from deploykit.job.decode import from_json
from deploykit.lib.deadline import within
from deploykit.lib.errors import (
    BackendUnavailable,
    DeploykitError,
    NotFound,
    NotPermitted,
    TryAgain,
)
from deploykit.observe.metrics.points import Value
from deploykit.observe.trackers.contract import (
    About,
    Ending,
    Memory,
    ModelVersion,
    Registration,
)

_API = "api/2.0/mlflow"
_FILES = "api/2.0/mlflow-artifacts/artifacts"
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""In one request."""
_MAX_PARAM_LENGTH = 500
"""Characters; later servers take 6000."""
_NOT_IN_NAMES = re.compile(r"[^\w./: -]", re.ASCII)
_TAG = "deploykit.run"
_TAGS = {"commit": "mlflow.source.git.commit"}
"""Those that MLflow shows in a place of their own."""
_HASH, _APPROVAL = "deploykit.package", "approval"
"""Tags of a version of a registered model."""
_PAGE = 100
"""Versions in one answer."""
_HERE = {"localhost", "127.0.0.1", "::1"}
_STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_NUMBERS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def make(where: str, about: About, memory: Memory) -> MLflow:
    """A run at the server `where`: an address, or the ARN of one that SageMaker manages."""
    sign: Sign = _credentials
    base = where.rstrip("/")
    if where.startswith("arn:"):
        base, sign = sagemaker_address(where), SageMakerSigner(where)
    context = tls("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_TRACKING_SERVER_CERT_PATH")
    return MLflow(Client(base, sign, context), base, about, memory)


def _credentials(_method: str, _url: str, _body: bytes) -> Mapping[str, str]:
    """The header that MLflow's own client sends, by the same variables."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        both = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(both.encode()).decode()}"}
    return {}


class MLflow:
    """One run at one server; see `deploykit.observe.trackers.contract.Tracker`."""

    def __init__(self, client: Client, base: str, about: About, memory: Memory) -> None:
        self._client, self._base, self._about, self._memory = client, base, about, memory
        self._status: object = None

    @property
    def url(self) -> str:
        """The page of the run."""
        experiment, run = self._memory.get("experiment"), self._memory.get("id")
        return f"{self._base}/#/experiments/{experiment}/runs/{run}"

    def clean(self, name: str) -> str:
        """A name with only the characters that MLflow takes."""
        return _NOT_IN_NAMES.sub("_", name).strip("/ .") or "_"

    def begin(self) -> Mapping[str, int]:
        """Find the run by its id or its tag, or make it; the steps as the server has them."""
        try:
            run = self._known() or self._tagged() or self._made()
            info, data = run["info"], run.get("data", {})
            self._send_params({str(one["key"]) for one in data.get("params", ())})
            self._status = info.get("status")
            is_deleted = info.get("lifecycle_stage") == "deleted"
            steps = {str(one["key"]): int(one.get("step", 0)) for one in data.get("metrics", ())}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BackendUnavailable(
                f"{self._base} does not appear to be an MLflow server", hint="check the address"
            ) from error
        if is_deleted:
            raise NotFound(
                f"the run was deleted in MLflow: {self.url}",
                hint="restore the run in MLflow, or remove `track.mlflow` from the job file",
            )
        return steps

    def send(self, values: Sequence[Value]) -> None:
        """Send the values. MLflow keeps one of those that are equal in all fields."""
        for start in range(0, len(values), _MAX_METRICS):
            metrics = [self._metric(one) for one in values[start : start + _MAX_METRICS]]
            self._ask("runs/log-batch", run_id=self._memory["id"], metrics=metrics)

    def end(self, ending: Ending | None) -> None:
        """Set the run's status, where it is another: it goes on, or how it ended."""
        status = "RUNNING" if ending is None else _STATES.get(ending.state, "FAILED")
        if status != self._status:
            time = {} if ending is None else {"end_time": int(1000 * ending.time)}
            self._ask("runs/update", run_id=self._memory["id"], status=status, **time)
            self._status = status

    def _metric(self, one: Value) -> dict[str, Any]:
        number = "NaN" if math.isnan(one.value) else _NUMBERS.get(one.value, one.value)
        time = int(1000 * (self._about.started if one.time is None else one.time))
        return {"key": one.name, "value": number, "timestamp": time, "step": one.step}

    def registration(self, model: Registration) -> Mapping[str, Mapping[str, Any]]:
        """The requests that register a model, by their paths; an unknown id or address is null."""
        tags = {_HASH: model.hash, _APPROVAL: model.approval or "pending"}
        tags |= {f"deploykit.{key}": text for key, text in model.facts.items()}
        evaluated = (one for one in model.metrics.items() if one[0].startswith("evaluation "))
        tags |= {f"deploykit.{self.clean(name)}": f"{value:.6g}" for name, value in evaluated}
        return {
            "registered-models/create": {"name": model.name},
            "model-versions/create": {
                "name": model.name,
                "source": None,
                "run_id": self._memory.get("id"),
                "description": model.description,
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
            },
        }

    def register(self, model: Registration) -> ModelVersion:
        """Upload a package to the run's artifacts, and make it a version of a registered model.

        A version that has this package already only gets the approval. `begin` comes first.
        Raises BackendUnavailable if the files cannot be uploaded from here.
        """
        requests = self.registration(model)
        try:
            self._ask("registered-models/create", **requests["registered-models/create"])
        except Refused as refusal:
            if refusal.code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = next(self._versions(model), None)
        is_new = version is None
        if version is None:
            known = self._client.get(f"{_API}/runs/get", run_id=self._memory["id"])["run"]
            source = self._upload(model, str(known["info"]["artifact_uri"]))
            create = {**requests["model-versions/create"], "source": source}
            version = self._ask("model-versions/create", **create)["model_version"]
        number = str(version["version"])
        tags = {tag["key"]: tag["value"] for tag in version.get("tags", ())}
        approval = model.approval or tags.get(_APPROVAL, "pending")
        if tags.get(_APPROVAL) != approval:
            tag = {"key": _APPROVAL, "value": approval}
            self._ask("model-versions/set-tag", name=model.name, version=number, **tag)
        page = f"{self._base}/#/models/{model.name}/versions/{number}"
        return ModelVersion("mlflow", model.name, number, approval, page, is_new)

    def _versions(self, model: Registration) -> Iterator[Any]:
        """The versions that have this package."""
        query = {"filter": f"name='{model.name}'", "max_results": str(_PAGE)}
        while True:
            answer = self._client.get(f"{_API}/model-versions/search", **query)
            for version in answer.get("model_versions", ()):
                if {"key": _HASH, "value": model.hash} in version.get("tags", ()):
                    yield version
            if not answer.get("next_page_token"):
                return
            query["page_token"] = answer["next_page_token"]

    def _upload(self, model: Registration, artifacts: str) -> str:
        """Copy the package to the artifacts of the run, and return where it is then."""
        where = f"{artifacts.rstrip('/')}/models/{model.hash[:12]}"
        address = parse.urlsplit(where)
        names = [path.relative_to(model.package) for path in sorted(model.package.rglob("*"))]
        files = [name for name in names if (model.package / name).is_file()]
        if address.scheme == "mlflow-artifacts":
            for name in files:
                path = parse.quote(f"{address.path.lstrip('/')}/{name.as_posix()}")
                self._client.put(f"{_FILES}/{path}", model.package / name)
        elif address.scheme == "s3":
            prefix = address.path.lstrip("/")
            keys = {model.package / name: f"{prefix}/{name.as_posix()}" for name in files}
            _upload_to_s3(address.netloc, keys)
        elif address.scheme not in {"", "file"} or not self._copy(
            model.package, Path(parse.unquote(address.path) if address.scheme else where)
        ):
            raise BackendUnavailable(
                f"this MLflow server stores artifacts in {artifacts}, where deploykit cannot "
                "write from this machine",
                hint="start the server with --artifacts-destination, so it accepts uploads",
            )
        return where

    def _copy(self, package: Path, folder: Path) -> bool:
        """Copy a package to a folder that the server reads too; return False if it does not.

        A server at a local address may run elsewhere, behind a tunnel of ssh. So it is asked
        whether it sees the first file, and else nothing is left of it.
        """
        if parse.urlsplit(self._base).hostname not in _HERE or not folder.is_absolute():
            return False
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        first = folder / "manifest.json"
        is_seen = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / first.name, first)
            below = {"run_id": str(self._memory["id"]), "path": f"models/{folder.name}"}
            listed = self._client.get(f"{_API}/artifacts/list", **below).get("files", ())
            is_seen = any(str(each["path"]).endswith(f"/{first.name}") for each in listed)
            if is_seen:
                shutil.copytree(package, folder, dirs_exist_ok=True)
        except OSError:
            return False
        finally:
            if new and not is_seen:
                shutil.rmtree(new[-1], ignore_errors=True)
        return is_seen

    def _known(self) -> Any:
        """The run of the remembered id; None where the server has none."""
        if "id" not in self._memory:
            return None
        try:
            return self._client.get(f"{_API}/runs/get", run_id=str(self._memory["id"]))["run"]
        except Refused as refusal:
            if refusal.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _tagged(self) -> Any:
        """The run with the tag of this one; None where there is none yet."""
        query = {"filter": f"tags.`{_TAG}` = '{self._about.run}'", "max_results": 1}
        answer = self._ask("runs/search", experiment_ids=[self._experiment()], **query)
        run = next(iter(answer.get("runs", ())), None)
        return run and self._remembered(run)

    def _made(self) -> Any:
        """A new run, with its tags."""
        tags = {_TAG: self._about.run}
        tags |= {_TAGS.get(key, f"deploykit.{key}"): text for key, text in self._about.tags.items()}
        run = self._ask(
            "runs/create",
            experiment_id=self._experiment(),
            run_name=self._about.run,
            start_time=int(1000 * self._about.started),
            tags=[{"key": key, "value": value} for key, value in tags.items()],
        )["run"]
        return self._remembered(run)

    def _send_params(self, known: set[str]) -> None:
        """Send the parameters that the run lacks: all of a new one, or after a kill the rest."""
        named: dict[str, str] = {}
        for name, value in self._about.params.items():
            named.setdefault(self.clean(name), value[:_MAX_PARAM_LENGTH])
        params = [{"key": k, "value": value} for k, value in named.items() if k not in known]
        for start in range(0, len(params), _MAX_PARAMS):
            batch = params[start : start + _MAX_PARAMS]
            self._ask("runs/log-batch", run_id=self._memory["id"], params=batch)

    def _remembered(self, run: Any) -> Any:
        self._memory["id"] = str(run["info"]["run_id"])
        self._memory["experiment"] = str(run["info"]["experiment_id"])
        return run

    def _experiment(self) -> str:
        """The id of the experiment, which is made where it does not exist."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._about.job
        for first in (True, False):  # another process may make it at the same time
            try:
                answer = self._client.get(f"{_API}/experiments/get-by-name", experiment_name=name)
                return str(answer["experiment"]["experiment_id"])
            except Refused as refusal:
                if refusal.code != "RESOURCE_DOES_NOT_EXIST" or not first:
                    raise
            try:
                return str(self._ask("experiments/create", name=name)["experiment_id"])
            except Refused as refusal:
                if refusal.code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise BackendUnavailable(f"{self._base} could not create the experiment {name}")

    def _ask(self, path: str, **data: Any) -> Any:
        return self._client.post(f"{_API}/{path}", data)


_SERVER = "mlflow-tracking-server"
_ARN_HEADERS = {_SERVER: "x-mlflow-sm-tracking-server-arn", "mlflow-app": "x-sm-mlflow-app-arn"}
_SERVICES = {_SERVER: "sagemaker-mlflow", "mlflow-app": "sagemaker"}


def sagemaker_address(arn: str) -> str:
    """Where the server answers, for a user whom its service knows by the signature."""
    kind, region = _arn_parts(arn)
    if kind == _SERVER:
        return f"https://{region}.experiments.sagemaker.aws"
    return f"https://mlflow.sagemaker.{region}.app.aws"


class SageMakerSigner:
    """Signs requests to a server with the usual credentials of AWS."""

    def __init__(self, arn: str) -> None:
        self._arn = arn
        self._auth: Any = None

    def __call__(self, method: str, url: str, body: bytes) -> Mapping[str, str]:
        """The headers of a request. Raises NotPermitted where there are no credentials."""
        import boto3  # not for other trackers
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        kind, region = _arn_parts(self._arn)
        if self._auth is None:
            credentials: Any = boto3.Session().get_credentials()
            if credentials is None:
                raise NotPermitted(
                    f"no AWS credentials found for {self._arn}",
                    hint="run `aws configure` or `aws sso login`",
                )
            self._auth = SigV4Auth(credentials, _SERVICES[kind], region)
        headers = {_ARN_HEADERS[kind]: self._arn}
        headers["X-Amz-Content-SHA256"] = hashlib.sha256(body).hexdigest()
        if body:
            headers["Content-Type"] = "application/json"
        request = AWSRequest(method=method, url=url, data=body, headers=headers)
        self._auth.add_auth(request)
        return {str(name): str(value) for name, value in request.headers.items()}


def _arn_parts(arn: str) -> tuple[str, str]:
    """The kind of the server, and its region."""
    _, _, _, region, _, resource = arn.split(":", 5)
    return resource.partition("/")[0], region


Sign = Callable[[str, str, bytes], Mapping[str, str]]
"""Headers for a request, by its method, URL and body."""
_READ_SECONDS = 30.0
"""Seconds to wait for the next bytes of an answer."""
_MAX_SECONDS = 60.0
"""Seconds that a request and its answer may take in all."""
_MAX_BYTES = 64 << 20
"""Bytes of an answer."""
_DENIED = {401, 403}
_BUSY = {408, 429, 500, 502, 503, 504}


class Refused(BackendUnavailable):
    """A request that the server refuses; `code` is the name of the error."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def _upload_to_s3(bucket: str, keys: Mapping[Path, str]) -> None:
    """Upload files. Raises BackendUnavailable."""
    try:
        import boto3  # only where artifacts are in S3
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise BackendUnavailable(
            f"this MLflow server stores artifacts in s3://{bucket}, but boto3 is not installed",
            hint="pip install boto3",
        ) from error
    try:
        client = boto3.client("s3")
        for path, key in keys.items():
            client.upload_file(str(path), bucket, key)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise BackendUnavailable(
            f"the model was not uploaded to s3://{bucket}: {error}",
            hint="check the credentials (`aws sts get-caller-identity`), then register it again",
        ) from error


class Client:
    """Sends requests to one server."""

    def __init__(self, base: str, sign: Sign, context: ssl.SSLContext | None = None) -> None:
        self._base, self._sign = base, sign
        self._opener = request.build_opener(_NoRedirect(), request.HTTPSHandler(context=context))

    def get(self, path: str, /, **values: str) -> Any:
        """The answer to a GET. Raises Refused, NotPermitted, TryAgain or BackendUnavailable."""
        query = parse.urlencode(values, quote_via=parse.quote)
        return self._ask("GET", f"{self._base}/{path}?{query}", b"")

    def post(self, path: str, data: Mapping[str, Any]) -> Any:
        """The answer to a POST of JSON. Raises as `get`."""
        return self._ask("POST", f"{self._base}/{path}", json.dumps(data).encode())

    def put(self, path: str, file: Path) -> None:
        """Upload a file. Raises as `get`."""
        url = f"{self._base}/{path}"
        headers = {"Content-Length": str(file.stat().st_size), **self._sign("PUT", url, b"")}
        headers["Content-Type"] = "application/octet-stream"
        with file.open("rb") as content:
            self._answer(request.Request(url, content, headers, method="PUT"))  # noqa: S310 - checked

    def _ask(self, method: str, url: str, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"} if body else {}
        headers |= self._sign(method, url, body)
        message = request.Request(url, body or None, headers, method=method)  # noqa: S310 - checked
        return self._in_time(partial(self._answer, message))

    def _in_time(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns or raises. Raises TryAgain if it takes longer than `_MAX_SECONDS`.

        The timeout of a socket is that of a single read, so a thread waits, and is abandoned.
        """
        try:
            return within(_MAX_SECONDS, ask)
        except TimeoutError:
            raise TryAgain(
                f"{self._base} did not complete its response within {_MAX_SECONDS:g} s",
                hint="run `deploykit sync` later to send the data",
            ) from None

    def _answer(self, message: request.Request) -> Any:
        try:
            with self._opener.open(message, timeout=_READ_SECONDS) as answer:
                content = answer.read(_MAX_BYTES) or b"{}"
        except HTTPError as refusal:
            with refusal:
                raise self._meaning(refusal) from refusal
        except (HTTPException, OSError, ValueError) as problem:
            reason = getattr(problem, "reason", None) or problem
            raise BackendUnavailable(
                f"{self._base} cannot be reached: {reason}",
                hint="check the address and the network; nothing is lost",
            ) from problem
        try:
            return from_json(content)
        except ValueError as problem:
            raise BackendUnavailable(f"{self._base} sent a response that is not JSON") from problem

    def _meaning(self, refusal: HTTPError) -> DeploykitError:
        """The error for an answer that is none of 2xx."""
        if address := refusal.headers.get("Location"):
            return BackendUnavailable(f"{self._base} redirects to {address}; use that address")
        try:
            data = from_json(refusal.read(_MAX_BYTES))
        except (OSError, ValueError):
            data = {}
        data = data if isinstance(data, dict) else {}
        reason = str(data.get("message") or refusal.reason)[:500]
        message = f"{self._base} returned status {refusal.code}: {reason}"
        if refusal.code in _DENIED:
            return NotPermitted(message, hint="check the credentials in the environment")
        if refusal.code in _BUSY:
            return TryAgain(message, hint="run `deploykit sync` later to send the data")
        return Refused(message, str(data.get("error_code", refusal.code)))


class _NoRedirect(request.HTTPRedirectHandler):
    """Refuses redirects, which would take credentials to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None: ...


def tls(insecure: str, certificates: str) -> ssl.SSLContext | None:
    """How to check a server, by the variables of these names; None: as usual."""
    if os.environ.get(insecure, "").lower() in {"1", "true"}:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    path = os.environ.get(certificates)
    return ssl.create_default_context(cafile=path) if path else None
