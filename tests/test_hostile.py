"""Hostile values in every field: each arrives unchanged, or its field is refused by name.

Scripts are not judged by reading them: they are run, with a stand-in for Python and for srun that
records the argument vector and the environment that reached it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploykit.backends import base as backend
from deploykit.job import checks
from deploykit.lib import paths
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle
from tests.backends.slurm.plans import rendered_by_submitit

NASTY = [
    *("$(touch pwned)", "`touch pwned`", "; touch pwned #", "| touch pwned", "&& touch pwned"),
    *("x\n#SBATCH --account=evil", "x\ntouch pwned\n", "\r\n#SBATCH -A evil", "#SBATCH -A evil"),
    *("'", '"', "'\"'\"'", "\\", "\\'", "a'b\"c$d`e", "'; touch pwned; '", '"; touch pwned; "'),
    *("{{ 7 * 7 }}", "{% raw %}", "{# x #}", "{{ run }}", "${HOME}", "$HOME", "~root", "!!", "!x"),
    *("-", "--", "--help", "-rf", "--account=evil", "-c=x", "*", "?", "[a-z]*", "%j", "%%", "a=b"),
    *(
        "",
        " ",
        "\t",
        " a ",
        "a b",
        "ünï",
        "日本語",
        "\U0001f600",
        "\u2028",
        "\x1b[31m",
        "\x07",
        "\x7f",
    ),
    *(
        "EOF",
        "null",
        "true",
        "0x10",
        "1e3",
        "s3://bucket/x",
        "secret:env:X",
        "secret:x",
        "\0",
        "a,b",
    ),
]
TEXT = st.sampled_from(NASTY) | st.text(max_size=12)
NAMES = st.sampled_from(["A", "B_1", "PATH_X"]) | TEXT
SCRIPTS = ["train.py", "a b.py", "it's.py", "$(touch pwned).py", "ü.py", "a\nb.py", "{{ run }}.py"]


def mostly(good):
    """A good value, and now and then a hostile one, so that many jobs get through."""
    # hypothesis prefers the ends of a range
    return st.integers(0, 19).flatmap(lambda n: TEXT if n == 7 else st.just(good))


def section(**fields):
    return st.fixed_dictionaries({}, optional=fields)


SLURM = section(
    **dict.fromkeys(("partition", "account", "qos", "constraint", "reservation"), TEXT),
    nodelist=TEXT,
    exclude=TEXT,
    python=mostly("python3"),
    exclusive=mostly(True),
    gres_style=mostly("gres"),
    signal_seconds=mostly(30),
    extra=st.dictionaries(st.sampled_from(["comment", "bb", "wait-all-nodes"]) | TEXT, TEXT),
)
GOOD_SAGEMAKER = {
    "role": "arn:aws:iam::123456789012:role/x",
    "bucket": "a-bucket",
    "region": "us-east-1",
    "instance_type": "ml.g5.12xlarge",
    "framework_version": "2.8.0",
    "py_version": "py312",
}
SAGEMAKER = st.just(GOOD_SAGEMAKER) | st.fixed_dictionaries(
    {name: mostly(value) for name, value in GOOD_SAGEMAKER.items()},
    optional={
        "prefix": TEXT,
        "distribution": mostly("torch_distributed"),
        "volume_size": mostly(30),
        "spot": mostly(False),
        "max_wait": mostly("2h"),
        "encrypt_inter_container_traffic": mostly(True),
        "keep_alive": mostly("10m"),
        "sender": mostly("boto3"),
        "image_uri": TEXT,
        "tags": st.dictionaries(TEXT, TEXT, max_size=3),
        "subnets": st.lists(TEXT, max_size=2),
        "security_group_ids": st.lists(TEXT, max_size=2),
    },
)
JOB = st.fixed_dictionaries(
    {
        "name": mostly("job"),
        "entrypoint": st.fixed_dictionaries(
            {"args": st.lists(TEXT, max_size=5)},
            optional={},
        ).flatmap(
            lambda entry: (
                st.sampled_from(SCRIPTS).map(lambda s: {**entry, "script": s})
                | mostly("pack.age").map(lambda m: {**entry, "module": m})
            )
        ),
        "resources": st.fixed_dictionaries(
            {"time_limit": mostly("5m")},
            optional={
                **dict.fromkeys(("nodes", "processes_per_node"), mostly(1)),
                **dict.fromkeys(("gpus_per_node", "cpus_per_node"), mostly(2)),
                "memory": mostly("4GiB"),
            },
        ),
    },
    optional={
        "source": mostly(".").filter(lambda it: it != "~root"),  # a folder of any size
        "retries": mostly(1),
        "max_bundle": mostly("1GiB"),
        "env": st.dictionaries(NAMES, TEXT, max_size=4),
        "data": st.dictionaries(mostly("train"), TEXT, max_size=2),
        "metrics": st.dictionaries(TEXT, TEXT, max_size=2),
        "output": TEXT,
        "checkpoints": TEXT,
        "slurm": SLURM,
    },
)

EXAMPLES = max(200, settings.default.max_examples)
"""Jobs for each backend."""
ARRIVED: Counter[str] = Counter()
"""Jobs that were not refused, by backend."""

RECORDER = """#!/bin/sh
{ printf '%s\\0' "$#" "$@"; env -0; } > "$RECORD"
"""


pytestmark = [pytest.mark.xdist_group("hostile"), pytest.mark.slow]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A project, a run folder, and recorders named python3 and srun, alone on PATH."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "project").mkdir()
    for name in SCRIPTS:
        (folder / "project" / name).touch()
    (folder / "bin").mkdir()
    for name in ("python3", "srun"):
        (folder / "bin" / name).write_text(RECORDER)
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("backend", ["local", "slurm", "sagemaker"])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=bool(os.environ.get("CI")),
)
@given(job=JOB, sagemaker=SAGEMAKER)
def test_values_arrive_or_are_refused(bench, backend, job, sagemaker):
    job = {**job, "sagemaker": sagemaker, **_in_s3(job)} if backend == "sagemaker" else job
    job = {**job, "local": {"python": "python3"}} if backend == "local" else job
    path = bench / "project/job.yaml"
    path.write_text(yaml.safe_dump(job, allow_unicode=True), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPLOYKIT_HOME", str(bench / "state"))
        patch.setattr("deploykit.backends.base.missing_data", lambda job: ())  # they do not exist
        try:
            plan = lifecycle.prepare(path, [], backend, "one").plan
        except JobFileError as error:
            refused = [found.path for found in error.problems if found.severity == "error"]
        else:
            refused = None
            CHECKS[backend](bench, plan)
            ARRIVED[backend] += 1
    assert refused is None or (refused and all(_names_a_field(name, job) for name in refused))


def _in_s3(job):
    """Places of the job as addresses, since SageMaker refuses folders."""
    places = {key: f"s3://bucket/{job[key]}" for key in ("output", "checkpoints") if key in job}
    data = {name: f"s3://bucket/{place}" for name, place in job.get("data", {}).items()}
    return {**places, "data": data}


def _names_a_field(path, job):
    """The path of each problem begins with a key of the job, or with a missing key."""
    return path.split(".")[0].split("[")[0] in {*job, "entrypoint", "resources"}


def _run_script(bench, plan, shell):
    folder = paths.run_folder("one")
    (folder / "source").mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (folder / "claim").unlink()
    text, record = bench / "script", bench / "record"
    text.write_text(plan.text)
    record.unlink(missing_ok=True)
    env = {"PATH": f"{bench}/bin:/usr/bin:/bin", "RECORD": str(record), "SLURM_JOB_ID": "7"}
    done = subprocess.run([shell, text], env=env, cwd=bench, capture_output=True, check=False)
    assert done.returncode == 0, done
    assert not (bench / "pwned").exists()
    assert [p.name for p in (folder / "source").iterdir()] == []
    count, *rest = record.read_bytes().decode().split("\0")
    words, environ = rest[: int(count)], rest[int(count) :]
    return words, dict(pair.split("=", 1) for pair in environ if "=" in pair)


def _same_environment(plan, environ):
    for name, value in plan.job.env.items():
        if checks.is_secret(value):
            assert json.loads(environ["DEPLOYKIT_SECRETS"])[name] == value
            assert name not in environ
        else:
            assert environ[name] == value
    for name, place in plan.job.data.items():
        assert environ[f"DEPLOYKIT_DATA_{name.upper()}"] == place.path


def _local(bench, plan):
    words, environ = _run_script(bench, plan, "sh")
    assert words[-len(backend.command(plan.job)) :] == backend.command(plan.job)
    assert words[:2] == [backend.LAUNCH, "--emulated-nodes"]
    _same_environment(plan, environ)


def _slurm(bench, plan):
    words, environ = _run_script(bench, plan, "bash")
    if words[-3:-1] == ["bash", "-c"]:  # the way round srun's own meaning of a lone colon
        words = shlex.split(words[-1])
    assert words[words.index(backend.LAUNCH) + 1 :] == backend.command(plan.job)
    _same_environment(plan, environ)
    assert plan.text == rendered_by_submitit(plan)
    directives = _directives(plan.text)
    for name in ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude"):
        assert directives.get(name) == getattr(plan.options, name)
    for name, value in plan.options.extra.items():
        assert directives[name] == value


def _directives(text):
    """What sbatch reads: the #SBATCH lines before the first line that is no comment."""
    found = {}
    for line in text.split("\n"):
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line.removeprefix("#SBATCH"))
            name, _, value = word.removeprefix("--").partition("=")
            value = value.replace("\\\\", "\\")  # to sbatch, a backslash escapes in quotes too
            assert name not in found
            found[name] = value
        elif line and not line.startswith("#"):
            return found
    return found


def _sagemaker(bench, plan):
    request = json.loads(plan.text)
    pieces = request["HyperParameters"]
    numbers = sorted(
        int(m[1]) for m in (re.fullmatch(r"deploykit_argv_(\d+)", k) for k in pieces) if m
    )
    text = "".join(json.loads(pieces[f"deploykit_argv_{number}"]) for number in numbers)
    assert json.loads(text) == backend.command(plan.job)
    environ = request["Environment"]
    for name, value in plan.job.env.items():
        if not checks.is_secret(value):
            assert environ[name] == value


CHECKS = {"local": _local, "slurm": _slurm, "sagemaker": _sagemaker}


def test_enough_jobs_get_through():
    """Were nearly all refused, the test above would prove little."""
    assert min(ARRIVED[backend] for backend in CHECKS) > EXAMPLES // 10, ARRIVED


def test_the_recorder_records(bench, monkeypatch):
    """Were the stand-ins not called, or PATH to fail, the test above would prove nothing."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(bench / "state"))
    path = Path(bench / "project/job.yaml")
    job = {"name": "x", "entrypoint": {"script": "train.py", "args": ["$(touch pwned)", ""]}}
    job |= {"resources": {"time_limit": "5m"}, "env": {"A": "`id`"}}
    job |= {"local": {"python": "python3"}, "slurm": {"python": "python3"}}
    path.write_text(yaml.safe_dump(job))
    for name, shell in (("local", "sh"), ("slurm", "bash")):
        plan = lifecycle.prepare(path, [], name, "one").plan
        words, environ = _run_script(bench, plan, shell)
        assert words[-2:] == ["$(touch pwned)", ""]
        assert environ["A"] == "`id`"
