"""MLflow, through its REST API: nothing of it need be installed.

https://mlflow.org/docs/latest/api_reference/rest-api.html; checked against a server of 3.17.
A server knows the last step of each metric of a run, so it is asked, and the run is found by its
tag: a lost memory doubles nothing.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from deploykit.lib.errors import BackendUnavailable, NotFound
from deploykit.observe.metrics.points import Value
from deploykit.observe.trackers import sagemaker_mlflow
from deploykit.observe.trackers.contract import About, Ending, Memory
from deploykit.observe.trackers.http import Client, Refused, Sign, tls

_API = "api/2.0/mlflow"
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""In one request."""
_LONGEST_PARAM = 500
"""Characters; later servers take 6000."""
_NOT_IN_NAMES = re.compile(r"[^\w./: -]", re.ASCII)
_TAG = "deploykit.run"
_TAGS = {"commit": "mlflow.source.git.commit"}
"""Those that MLflow shows in a place of their own."""
_STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_NUMBERS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def make(where: str, about: About, memory: Memory) -> MLflow:
    """A run at the server `where`: an address, or the ARN of one that SageMaker manages."""
    sign: Sign = _credentials
    base = where.rstrip("/")
    if where.startswith("arn:"):
        base, sign = sagemaker_mlflow.address(where), sagemaker_mlflow.Signer(where)
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
            return self._begin()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BackendUnavailable(
                f"{self._base} does not seem to be an MLflow server", hint="check the address"
            ) from error

    def _begin(self) -> Mapping[str, int]:
        run = self._known() or self._tagged() or self._made()
        info, data = run["info"], run.get("data", {})
        self._send_params({str(one["key"]) for one in data.get("params", ())})
        self._status = info.get("status")
        if info.get("lifecycle_stage") == "deleted":
            raise NotFound(
                f"the run was deleted in MLflow: {self.url}",
                hint="restore it there, or remove `track.mlflow`",
            )
        return {
            str(one["key"]): int(one.get("step", 0))
            for one in data.get("metrics", ())
            if isinstance(one, dict) and "key" in one
        }

    def send(self, values: Sequence[Value]) -> None:
        """Send the values. MLflow keeps one of those that are equal in all fields."""
        for start in range(0, len(values), _MOST_METRICS):
            metrics = [self._metric(one) for one in values[start : start + _MOST_METRICS]]
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

    def _send_params(self, known: Container[str]) -> None:
        """Send the parameters that the run lacks: all of a new one, or after a kill the rest."""
        params = [one for one in self._params() if one["key"] not in known]
        for start in range(0, len(params), _MOST_PARAMS):
            batch = params[start : start + _MOST_PARAMS]
            self._ask("runs/log-batch", run_id=self._memory["id"], params=batch)

    def _params(self) -> Iterator[dict[str, str]]:
        seen = set()
        for name, value in self._about.params.items():
            key = self.clean(name)
            if key not in seen:
                seen.add(key)
                yield {"key": key, "value": value[:_LONGEST_PARAM]}

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
        raise BackendUnavailable(f"{self._base} has no experiment {name}, and did not create it")

    def _ask(self, path: str, **data: Any) -> Any:
        return self._client.post(f"{_API}/{path}", data)
