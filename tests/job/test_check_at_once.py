"""`check` reports all problems that can be seen from here at once.

Each bad job file is mended key by key, as the hints say. The loop mends only what a round has
reported, and counts the rounds until no problem is left. A section with a value of the
wrong kind is checked further in the next round.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from deploykit.cli import main as cli
from deploykit.job import file as jobfile
from deploykit.job import machine
from deploykit.job.file import Plain

ROLE = "arn:aws:iam::123456789012:role/training"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker"


class Bad(NamedTuple):
    """A job file, and the value that mends each wrong key; None removes the key.

    `own` are keys whose value only the user knows: the hint does not contain it. `rounds` is 2
    where problems show only once the values are of the right kind.
    """

    backend: str
    text: str
    mends: dict[str, str | None]
    own: tuple[str, ...] = ()
    rounds: int = 2


BAD = {
    "nothing but a section for SageMaker": Bad(
        "sagemaker",
        "entrypoint: {script: trian.py}\nresources: {processes_per_node: 4}\nsagemaker: {}\n",
        {
            "name": "digits",
            "entrypoint.script": "train.py",
            "resources.time_limit": "30m",
            "sagemaker.role": ROLE,
            "sagemaker.bucket": "my-bucket",
            "sagemaker.region": "us-east-1",
            "sagemaker.instance_type": "ml.g5.12xlarge",
            "sagemaker.image_uri": IMAGE,
        },
        rounds=1,
    ),
    "misspelled keys, with wrong values below them": Bad(
        "sagemaker",
        f"""\
name: digits
entrypoint: {{script: train.py}}
resorces: {{time_limit: 10s, nodes: two}}
sagemaker:
  rol: training
  bucket: my-bucket
  region: us-east-1
  instance_type: ml.g5.12xlarge
  image_uri: {IMAGE}
  spot: perhaps
""",
        {
            "resorces": None,
            "resources.time_limit": "90s",
            "resources.nodes": "2",
            "sagemaker.rol": None,
            "sagemaker.role": ROLE,
            "sagemaker.spot": "false",
        },
        own=("resources.time_limit", "resources.nodes"),
        rounds=1,
    ),
    "more GPUs than the type has, and tags that the service refuses": Bad(
        "sagemaker",
        f"""\
name: digits
entrypoint: {{script: train.py}}
resources: {{time_limit: 1h, gpus_per_node: 8}}
env: {{NOTE: "{"x" * 600}"}}
data: {{train: data}}
sagemaker:
  role: {ROLE}
  bucket: my-bucket
  region: us-east-1
  instance_type: ml.g5.12xlarge
  image_uri: {IMAGE}
""",
        {
            "resources.gpus_per_node": "4",
            "resources.processes_per_node": "4",
            "env.NOTE": "short",
            "data.train": "s3://bucket/folder",
        },
        own=("env.NOTE", "data.train"),
        rounds=1,
    ),
    "what this machine does not have": Bad(
        "local",
        """\
name: digits
entrypoint: {module: trainer.trian}
resources: {time_limit: 30, gpus_per_node: 8}
data: {train: dta, test: /nope/test}
local: {python: /nope/python}
""",
        {
            "entrypoint.module": "trainer.train",
            "resources.time_limit": "90s",
            "resources.gpus_per_node": "4",
            "data.train": "data",
            "data.test": "data",
            "local.python": sys.executable,
        },
        own=("data.test", "local.python", "resources.time_limit"),
    ),
    "a module that is not installed, and a Python that is relative": Bad(
        "local",
        """\
name: my job
entrypoint: {module: no_such_module_1}
resources: {time_limit: 1h, nodes: 8, gpus_per_node: 1}
local: {python: .venv/bin/python}
""",
        {
            "name": "my-job",
            "entrypoint.module": "trainer.train",
            "resources.nodes": "4",
            "local.python": sys.executable,
        },
        own=("entrypoint.module", "local.python"),
    ),
    "a login node": Bad(
        "slurm",
        """\
name: digits
entrypoint: {script: train.py, args: --epochs 3}
resources: {time_limit: 1h, memory: 10}
slurm: {host: login1, folder: runs, python: .venv/bin/python, partion: gpu, extra: {time: "1"}}
""",
        {
            "entrypoint.args": '["--epochs", "3"]',
            "resources.memory": "4GiB",
            "slurm.folder": "/shared/runs",
            "slurm.python": "/shared/venv/bin/python",
            "slurm.partion": None,
            "slurm.partition": "gpu",
            "slurm.extra.time": None,
        },
        own=("slurm.folder", "slurm.python", "slurm.partition", "slurm.partion"),
    ),
    "a profile with fewer GPUs": Bad(
        "slurm",
        """\
name: digits
entrypoint: {script: train.py}
resources: {time_limit: 30h, gpus_per_node: 8, nodes: 9}
slurm: {site: SITE, partition: gpus}
""",
        {
            "resources.time_limit": "3600s",
            "resources.gpus_per_node": "4",
            "resources.nodes": "2",
            "slurm.partition": "gpu",
        },
        rounds=1,
    ),
}
SITE = {
    "cluster": "small",
    "version": "22.05.8",
    "created": "2026-11-22T10:00:00+00:00",
    "accounting": False,
    "gpu_style": "gpus-per-node",
    "has_memory": True,
    "pyxis": False,
    "requeue": True,
    "preemption": "preempt/none OFF",
    "max_array_size": 1001,
    "partitions": [
        {
            "name": "gpu",
            "default": True,
            "state": "UP",
            "nodes": 2,
            "max_seconds": 3600,
            "max_nodes": None,
            "min_nodes": 1,
            "accounts": None,
            "qos": None,
            "preemption": "OFF",
        }
    ],
    "node_groups": [
        {
            "partitions": ["gpu"],
            "count": 2,
            "usable": 2,
            "cpus": 64,
            "memory": 256_000,
            "gpus": 4,
            "features": [],
        }
    ],
}


@pytest.fixture
def four_gpus(project, tmp_path, monkeypatch):
    """The project on a machine whose driver lists four GPUs, with a package and a data folder."""
    for number in range(4):
        folder = tmp_path / f"root/proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: a GPU\n")
    monkeypatch.setattr(machine, "_ROOT", tmp_path / "root")
    for name in ("CUDA_VISIBLE_DEVICES", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (project / "trainer").mkdir()
    (project / "trainer/__init__.py").touch()
    (project / "trainer/train.py").touch()
    (project / "data").mkdir()
    (tmp_path / "site.json").write_text(json.dumps(SITE))
    return project


def check(capsys, backend):
    """What one round reports: path -> message and hint. Empty if `check` accepts the file."""
    capsys.readouterr()
    code = cli.main(["check", "--backend", backend, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == (65 if "error" in answer else 0)
    problems = answer["error"]["problems"] if code else []
    return {one["path"]: f"{one['message']} ({one['hint']})" for one in problems}


def mend(tree, path, value):
    *parents, last = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree.pop(last, None)
    if value is not None:
        tree[last] = jobfile.yaml(value)[0]


def plain(value):
    """Parsed YAML as JSON can hold it; numbers and truth values without quotes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Plain) and (value.isdigit() or value in {"true", "false"}):
        return json.loads(value)
    return value


def rounds(bad, capsys):
    """Mend what each round reports until nothing is left; how often that was, and all hints."""
    path, hints = Path("job.yaml"), {}
    for number in range(len(bad.mends) + 2):
        problems = check(capsys, bad.backend)
        hints |= problems
        if not problems:
            return number, hints
        tree, _ = jobfile.parse(path)
        for key in [key for key in bad.mends if any(_is_about(key, one) for one in problems)]:
            mend(tree, key, bad.mends[key])
        path.write_text(json.dumps(plain(tree)))
    raise AssertionError(f"never accepted: {problems}")


def _is_about(key, path):
    """Whether a problem at `path` makes one mend `key`; a misspelled key is replaced as a whole."""
    replaces = {
        "resources": "resorces",
        "sagemaker.role": "sagemaker.rol",
        "slurm.partition": "slurm.partion",
    }
    path = path.replace("resorces.", "resources.")
    return path == key or path == replaces.get(key) or path.startswith(f"{key}[")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_job_file_is_mended_in_one_round_or_two(name, four_gpus, tmp_path, capsys):
    bad = BAD[name]
    (four_gpus / "job.yaml").write_text(bad.text.replace("SITE", str(tmp_path / "site.json")))
    count, hints = rounds(bad, capsys)
    assert count == bad.rounds
    assert [key for key in bad.mends if not any(_is_about(key, path) for path in hints)] == []
    for path, hint in hints.items():
        value = bad.mends.get(path)
        if value is not None and path not in bad.own:
            assert value in hint, f"{path}: {hint} does not lead to {value}"
