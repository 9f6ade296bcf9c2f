"""Kill each verb after the training, run the same command again, and see what is there.

    .venv/bin/python benchmarks/kills.py [VERB ...] [--kills 20]

Each kill is a SIGKILL, at points spread over the command: before the nth request to a moto server,
or after it, when the request was carried out and its answer never came; at the nth call of a
function of deploykit; or at a share of the time that the command takes. *doubled* counts what
exists twice after the second call, *left* what should not be there: files that are half or
temporary, endpoints without their schedule, processes. Ends with 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import boto3  # noqa: E402

from deploykit.cli import main as cli  # noqa: E402
from deploykit.lib.errors import NotFound, UsageError  # noqa: E402
from deploykit.run import deployments, export, registry  # noqa: E402
from tests.aws_server import SECTION, moto_server, recorder  # noqa: E402
from tests.model_package import package  # noqa: E402
from tests.ports import free_port  # noqa: E402

MARK = "DEPLOYKIT_KILLS"
"""Variable that all processes of this benchmark have."""
COUNT = "DEPLOYKIT_KILLS_COUNT"
"""Variable with the file to which an uninterrupted command writes its number of calls."""
ROLE = "arn:aws:iam::123456789012:role/training-scheduler"
JOB = f"""\
name: digits
entrypoint: {{script: train.py}}
{SECTION}  deploy:
    name: digits
    instance_type: ml.m5.xlarge
    scheduler_role: {ROLE}
    autoscaling: {{max: 2, target: 9}}
"""
TEMPORARY = (".deploykit-", "tmp")
"""Beginnings of names of temporary files and folders."""
PATIENCE = 300
"""Seconds."""
DEPLOY = ("deploy", "model", "-b", "sagemaker", "--for", "8h")


class Seen(NamedTuple):
    """The outcome of one kill."""

    doubled: Sequence[str]
    left: Sequence[str]
    again: str
    """The outcome of the second call."""


class Point(NamedTuple):
    """The points at which a command is killed."""

    kind: str
    """``before`` or ``after`` a request, ``call`` of a function, or ``time``."""
    at: float


# ------------------------------------------------------------------------------ the killed command


def count_calls(words: Sequence[str], at: int) -> int:
    """Run a command in this process, and kill it at the `at`th call of a function; 0: never."""
    begun, calls = False, 0
    own = str(ROOT / "deploykit") + os.sep

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal begun, calls
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(own):
            return
        begun = begun or (frame.f_code.co_name == "run" and "/cli/" in path)
        calls += begun
        if calls == at != 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)
    try:
        return cli.main(list(words))
    finally:
        sys.setprofile(None)
        if COUNT in os.environ:
            Path(os.environ[COUNT]).write_text(str(calls))


def start(words: Sequence[str], at: int | None = None, **more: str) -> subprocess.Popen[bytes]:
    """Start a command in a process; `at` as `count_calls`."""
    program = ["-m", "deploykit"] if at is None else [__file__, "--at", str(at), "--"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    argv = [sys.executable, *program, *words]
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def here(*words: str) -> tuple[int, str]:
    """Run a command in this process: its exit code, and what it printed."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = cli.main(list(words))
    return code, shown.getvalue()


def do(*words: str) -> str:
    """As `here`, for what must succeed."""
    code, shown = here(*words)
    if code:
        raise RuntimeError(f"{' '.join(words)} ended with {code}: {shown}")
    return shown


def spread(total: float, count: int) -> list[float]:
    """`count` numbers between 0 and a total, evenly."""
    return [total * (number + 0.5) / count for number in range(count)]


def processes() -> list[str]:
    """The command lines of processes that the benchmark started, and that still run."""
    left_behind = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                left_behind += [f"process: {words[:60]}"] * ("moto.server" not in words)
    return left_behind


def temporary(*folders: Path) -> list[str]:
    """Files and folders of killed processes."""
    made = Path(tempfile.gettempdir()).iterdir()
    left_behind = [
        str(path) for path in made if not path.name.startswith("torchelastic_")
    ]  # torch's
    for folder in folders:
        left_behind += [str(each) for each in folder.rglob("*") if each.name.startswith(TEMPORARY)]
    return [f"file: {each}" for each in left_behind]


# ------------------------------------------------------------------------------- verbs of SageMaker


class OnAws:
    """A verb against a moto server behind a proxy that records."""

    words: Sequence[str] = ()

    def __init__(self, folder: Path, moto: int, proxy: Any) -> None:
        self.folder, self.moto, self.proxy = folder, moto, proxy
        self.number = 0

    def prepare(self) -> None:
        """A fresh account and home, with what the verb needs."""
        self.number += 1
        ask(self.moto, "POST", "/moto-api/reset")
        ask(self.moto, "PUT", "/my-bucket", {"Host": "s3.amazonaws.com"})
        self.home = self.folder / f"{self.words[0]}-{self.words[1]}-{self.number}"
        os.environ["DEPLOYKIT_HOME"] = str(self.home)
        self.before()
        self.proxy.requests.clear()

    def before(self) -> None:
        """Create the state that the verb needs."""

    def points(self, count: int) -> list[Point]:
        self.prepare()
        written = self.folder / "count"
        done = start(self.words, 0, **{COUNT: str(written)})
        _, errors = done.communicate(timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(errors.decode())
        requests = len(self.proxy.requests)
        every = [Point(when, at) for at in range(1, requests + 1) for when in ("before", "after")]
        chosen = [every[int(at)] for at in spread(len(every), min(count // 2, len(every)))]
        calls = spread(int(written.read_text()), count - len(chosen))
        return chosen + [Point("call", int(at) + 1) for at in calls]

    def kill(self, point: Point) -> None:
        self.prepare()
        left = int(point.at)

        def respond(_: Any, forward: Callable[[], Any]) -> Any:
            nonlocal left
            left -= 1
            if left:
                return alone(_, forward)
            if point.kind == "after":
                alone(_, forward)
            process.kill()
            return None

        if point.kind != "call":
            self.proxy.respond = respond
        process = start(self.words, int(point.at) if point.kind == "call" else None)
        _, errors = process.communicate(timeout=PATIENCE)
        self.proxy.respond = alone
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"not killed at {point}: {process.returncode}\n{errors.decode()}")

    def seen(self) -> Seen:
        unscheduled = without_schedule()
        self.proxy.requests.clear()
        code, shown = here(*self.words)
        sent = [one for one in self.proxy.requests if changes(one)]
        self.proxy.requests.clear()
        again = "sent nothing" if not sent else "sent what was missing"
        if code == NotFound.exit_code:
            again = "nothing was there anymore"
        elif code:
            again = f"exit code {code}: {shown.splitlines()[-1]}"
        doubled, left = self.check()
        left += [*unscheduled, *temporary(self.home), *processes()]
        return Seen(doubled, left, again)

    def check(self) -> tuple[list[str], list[str]]:
        """Return duplicates and leftovers after the second call."""
        raise NotImplementedError


def ask(port: int, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    """The status of an answer from this machine. Raises OSError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        answer.read()
        return answer.status


ONE_AT_A_TIME = threading.Lock()


def alone(_: Any, forward: Callable[[], Any]) -> Any:
    """Carry out a request while no other one is."""
    with ONE_AT_A_TIME:
        return forward()


def changes(one: Any) -> bool:
    """Return whether a recorded request modifies anything."""
    names = ("Create", "Update", "Delete", "Register", "Deregister", "Put", "Stop")
    return one.action.startswith(names) or one.method in {"PUT", "DELETE"}


def client(name: str) -> Any:
    return boto3.client(name, "us-east-1")


def counts() -> dict[str, int]:
    """How many of each thing the account has."""
    sagemaker, scaling = client("sagemaker"), client("application-autoscaling")
    stored = client("s3").list_objects_v2(Bucket="my-bucket").get("Contents", ())
    uploads = client("s3").list_multipart_uploads(Bucket="my-bucket").get("Uploads", ())
    targets = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    policies = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    return {
        "endpoint": len(sagemaker.list_endpoints()["Endpoints"]),
        "configuration": len(sagemaker.list_endpoint_configs()["EndpointConfigs"]),
        "model": len(sagemaker.list_models()["Models"]),
        "schedule": len(client("scheduler").list_schedules()["Schedules"]),
        "scalable target": len(targets),
        "scaling policy": len(policies) if targets else 0,  # moto leaves them, AWS does not
        "archive": sum(one["Key"].endswith("model.tar.gz") for one in stored),
        "upload": len(uploads),
    }


def compared(wanted: dict[str, int]) -> tuple[list[str], list[str]]:
    """Duplicates, and what is missing or left over."""
    exist = counts()
    more = [f"{exist[name]} {name}s" for name in exist if exist[name] > wanted.get(name, 0) > 0]
    left = [f"{name}: {exist[name]}" for name in exist if exist[name] > 0 == wanted.get(name, 0)]
    missing = [f"no {name}" for name in exist if exist[name] < wanted.get(name, 0)]
    return more, left + missing


def without_schedule() -> list[str]:
    """Endpoints that no schedule deletes."""
    schedules = {one["Name"] for one in client("scheduler").list_schedules()["Schedules"]}
    endpoints = client("sagemaker").list_endpoints()["Endpoints"]
    names = {one["EndpointName"] for one in endpoints}
    return [f"{name} has no schedule" for name in names - schedules]


ONE_EACH = dict.fromkeys(
    ("endpoint", "configuration", "model", "schedule", "scalable target", "scaling policy"), 1
) | {"archive": 1}
TWO = ONE_EACH | {"configuration": 2, "model": 2, "archive": 2}


class Deploy(OnAws):
    words = DEPLOY

    def check(self) -> tuple[list[str], list[str]]:
        doubled, left = compared(ONE_EACH)
        rows = deployments.current()
        doubled += [f"{len(rows)} rows"] * (len(rows) > 1)
        do("endpoint", "rm", "digits")
        return doubled, left + [f"after rm: {each}" for each in compared({"archive": 1})[1]]


class Remove(OnAws):
    words = ("endpoint", "rm", "digits")

    def before(self) -> None:
        do(*DEPLOY)

    def check(self) -> tuple[list[str], list[str]]:
        doubled, left = compared({"archive": 1})
        return doubled, left + [row.name for row in deployments.current()]


class ScaleUp(OnAws):
    words = ("endpoint", "scale", "digits", "--min", "2", "--max", "5")

    def before(self) -> None:
        do(*DEPLOY)

    def check(self) -> tuple[list[str], list[str]]:
        doubled, left = compared(ONE_EACH)
        scaling = client("application-autoscaling")
        (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")[
            "ScalableTargets"
        ]
        limits = (target["MinCapacity"], target["MaxCapacity"])
        most = deployments.get("digits").machine_list[0].most
        return doubled, left + [f"limits {limits}, {most}"] * ((*limits, most) != (2, 5, 5))


class Rollback(OnAws):
    """Completed rollbacks return to the later deployment: then `again` says so."""

    words = ("endpoint", "rollback", "digits")

    def before(self) -> None:
        do(*DEPLOY)
        self.first = deployments.get("digits").config
        do("deploy", "better", *DEPLOY[2:])

    def seen(self) -> Seen:
        row = deployments.get("digits")
        result = super().seen()
        is_back = row.config == self.first
        return result._replace(again="returned to the later one" if is_back else result.again)

    def check(self) -> tuple[list[str], list[str]]:
        do("endpoint", "wait", "digits")
        doubled, left = compared(TWO)
        row = deployments.get("digits")
        served = client("sagemaker").describe_endpoint(EndpointName="digits")
        if served["EndpointConfigName"] != row.config:
            left.append(f"serves {served['EndpointConfigName']}, recorded {row.config}")
        return doubled, left


class Register(OnAws):
    words = ("register", "model", "-b", "sagemaker", "--name", "vision")

    def check(self) -> tuple[list[str], list[str]]:
        doubled, left = compared({"archive": 1})
        sagemaker = client("sagemaker")
        groups = sagemaker.list_model_package_groups()["ModelPackageGroupSummaryList"]
        listed = sagemaker.list_model_packages(ModelPackageGroupName="vision")
        versions = listed["ModelPackageSummaryList"]
        doubled += [f"{len(groups)} groups"] * (len(groups) != 1)
        return doubled + [f"{len(versions)} versions"] * (len(versions) != 1), left


@contextlib.contextmanager
def account(folder: Path) -> Iterator[tuple[int, Any]]:
    """The moto server, the proxy, and a project with two packages as the current folder."""
    project = folder / "project"
    project.mkdir()
    (project / "job.yaml").write_text(JOB)
    (project / "train.py").touch()
    package(project / "model", "exp-1")
    package(project / "better", "exp-2", b"better")
    os.chdir(project)
    for name in [name for name in os.environ if name.startswith(("AWS_", "SAGEMAKER_"))]:
        del os.environ[name]
    os.environ.update(
        AWS_ACCESS_KEY_ID="testing",
        AWS_SECRET_ACCESS_KEY="testing",  # noqa: S106 - moto's
        AWS_EC2_METADATA_DISABLED="true",
    )
    with moto_server() as moto, recorder(moto) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        direct = boto3.client("sagemaker", "us-east-1", endpoint_url=f"http://127.0.0.1:{moto}")

        def update_endpoint(body: dict[str, Any]) -> dict[str, str]:
            """Operations that moto does not implement."""
            names = {key: body[key] for key in ("EndpointName", "EndpointConfigName")}
            direct.delete_endpoint(EndpointName=body["EndpointName"])
            direct.create_endpoint(**names)
            return {"EndpointArn": "arn"}

        proxy.respond, proxy.answers["UpdateEndpoint"] = alone, update_endpoint
        yield moto, proxy


# --------------------------------------------------------------------------- verbs on this machine


PROGRAMS = {
    "train.py": """\
import os, pathlib
pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"], "weights.bin").write_text("1")
""",
    "evaluate.py": """\
import os, pathlib, time
print("evaluating", flush=True)
time.sleep(1)
pathlib.Path(os.environ["DEPLOYKIT_OUTPUT_DIR"], "evaluation.json").write_text('{"error": 0.5}')
""",
    "inference.py": """\
def model_fn(folder): return 1
def input_fn(body, content_type): return body
def predict_fn(data, model): return data
def output_fn(prediction, accept): return prediction
""",
}


class Here:
    """A verb on a trained run on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    @property
    def words(self) -> Sequence[str]:
        raise NotImplementedError

    def points(self, count: int) -> list[Point]:
        written, began = self.folder / "count", time.monotonic()
        done = start(self.words, 0, **{COUNT: str(written)})
        if done.wait(PATIENCE):
            raise RuntimeError(done.stderr and done.stderr.read().decode())
        took = time.monotonic() - began
        calls = spread(int(written.read_text()), count // 2)
        times = spread(took, count - len(calls))
        return [Point("call", int(at) + 1) for at in calls] + [Point("time", at) for at in times]

    def kill(self, point: Point) -> None:
        self.number += 1
        process = start(self.words, int(point.at) if point.kind == "call" else None)
        if point.kind == "time":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(point.at)
            process.kill()
        process.communicate(timeout=PATIENCE)


class Export(Here):
    @property
    def words(self) -> Sequence[str]:
        return ("export", "trained", "--to", f"model-{self.number}")

    def seen(self) -> Seen:
        target = Path(f"model-{self.number}")
        was = target.exists()
        code, shown = here(*self.words)
        again = "wrote the package"
        if was:
            again = (
                "exists already" if code == UsageError.exit_code else f"exit code {code}: {shown}"
            )
        left = [*temporary(Path.cwd(), Path(os.environ["DEPLOYKIT_HOME"])), *processes()]
        with contextlib.suppress(OSError):
            left += changed_files(target)
        return Seen([], left + [f"no {target}"] * (not target.is_dir()), again)


def changed_files(target: Path) -> list[str]:
    """Files of a package that differ from its manifest."""
    files = json.loads((target / "manifest.json").read_text())["files"]
    actual = {name: list(each) for name, each in export.checksums(target).items()}
    return [f"{target}: {name}" for name in files if actual.get(name) != list(files[name])]


class Evaluate(Here):
    @property
    def words(self) -> Sequence[str]:
        return ("evaluate", "trained", "--run", f"ev-{self.number}", "--wait")

    def seen(self) -> Seen:
        name = f"ev-{self.number}"
        known = registry.lookup(name).get(name)
        again = "submitted it" if known is None else "waited for the run that was there"
        code, shown = here(*self.words)
        if code:
            again = f"exit code {code}: {shown}"
        row = registry.get(name)
        folder = Path(row.folder)
        results = list(folder.rglob("evaluation.json"))
        starts = Path(folder, "logs/node-0.log").read_text().count("evaluating")
        doubled = [f"{len(results)} results"] * (len(results) != 1)
        doubled += [f"{starts} starts"] * (starts != 1)
        left = [*temporary(Path(os.environ["DEPLOYKIT_HOME"], "bundles")), *processes()]
        return Seen(doubled, left + [row.state] * (row.state != "succeeded"), again)


class Serve(Here):
    """The server is killed while it starts, and while it answers."""

    port = 0

    @property
    def words(self) -> Sequence[str]:
        return ("deploy", "served", "--port", str(self.port))

    def points(self, count: int) -> list[Point]:
        do("export", "trained", "--to", "served")
        self.port = free_port()
        began = time.monotonic()
        server = start(self.words)
        self.answered(server)
        took = time.monotonic() - began
        self.stop(server)
        return [Point("time", at) for at in spread(took * 1.2, count)]

    def answered(self, server: subprocess.Popen[bytes]) -> None:
        """Wait until the server is healthy."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and server.poll() is None:
            with contextlib.suppress(OSError):
                if ask(self.port, "GET", "/ping") == http.HTTPStatus.OK:
                    return
            time.sleep(0.1)
        server.kill()
        raise RuntimeError(server.communicate()[1].decode())

    def stop(self, server: subprocess.Popen[bytes]) -> None:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=PATIENCE)

    def seen(self) -> Seen:
        end = time.monotonic() + 30
        while (left := processes()) and time.monotonic() < end:
            time.sleep(0.1)  # replicas end by themselves
        server = start(self.words)
        self.answered(server)
        self.stop(server)
        return Seen([], [*left, *temporary(Path.cwd()), *processes()], "serves at the same port")


def trained(folder: Path) -> None:
    """A project as the current folder, with a run whose model needs no torch: that takes longer."""
    project = folder / "own"
    project.mkdir()
    os.chdir(project)
    os.environ["DEPLOYKIT_HOME"] = str(folder / "home")
    (project / "job.yaml").write_text(
        "name: own\nentrypoint: {script: train.py, launcher: python}\n"
    )
    for name, text in PROGRAMS.items():
        (project / name).write_text(text)
    do("submit", "-b", "local", "--run", "trained", "--wait")


ON_AWS = {
    "deploy": Deploy,
    "scale": ScaleUp,
    "rollback": Rollback,
    "rm": Remove,
    "register": Register,
}
LOCAL = {"export": Export, "evaluate": Evaluate, "serve": Serve}


def measure(name: str, verb: Any, count: int) -> bool:
    """Kill a verb, and print a row of the table. Return whether something was wrong."""
    doubled, left, again = list[str](), list[str](), Counter[str]()
    points = verb.points(count)
    for point in points:
        verb.kill(point)
        seen = verb.seen()
        doubled += [f"{each} ({point})" for each in seen.doubled]
        left += [f"{each} ({point})" for each in seen.left]
        again[seen.again] += 1
    did = ", ".join(f"{text} {times}x" for text, times in again.most_common())
    print(f"| {name} | {len(points)} | {len(doubled)} | {len(left)} | {did} |", flush=True)
    for each in [*doubled, *left]:
        print(f"    {each}", flush=True)
    return bool(doubled or left)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("verbs", nargs="*", metavar="VERB", help=", ".join([*ON_AWS, *LOCAL]))
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    chosen = args.verbs or [*ON_AWS, *LOCAL]
    os.environ[MARK] = uuid.uuid4().hex
    print("| verb | kills | doubled | left | the second call |\n|---|---|---|---|---|", flush=True)
    wrong = False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        if set(chosen) & set(ON_AWS):
            with account(folder) as (moto, proxy):
                for name in chosen:
                    if name in ON_AWS:
                        wrong |= measure(name, ON_AWS[name](folder, moto, proxy), args.kills)
        if set(chosen) & set(LOCAL):
            trained(folder)
            for name in chosen:
                if name in LOCAL:
                    wrong |= measure(name, LOCAL[name](folder), args.kills)
        os.chdir(ROOT)
    return int(wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--at"]:
        sys.exit(count_calls(sys.argv[4:], int(sys.argv[2])))
    sys.exit(main())
