"""Secrets in a job file are named, never shown, and with --strict refused."""

from __future__ import annotations

import json
import random
import string

import pytest
import yaml

from deploykit.cli import main as cli
from deploykit.lib.errors import JobFileError

MIXED = random.Random(7).choices(string.ascii_letters + string.digits, k=100)
RANDOM = "a1" + "".join(MIXED)
"""Letters and digits as in a token; no file contains a whole token, for other scanners' sake."""
HEX = "".join(random.Random(8).choices("0123456789abcdef", k=100))

SHAPES = {
    "AWS access key": "AKIA" + RANDOM[:16].upper(),
    "GitHub token": "ghp_" + RANDOM[:36],
    "GitHub fine-grained token": "github_pat_" + RANDOM[:22] + "_" + RANDOM[:59],
    "GitLab token": "glpat-" + RANDOM[:20],
    "Hugging Face token": "hf_" + RANDOM[:34],
    "Slack token": "xoxb-" + "2" * 11 + "-" + RANDOM[:24],
    "OpenAI API key": "sk-proj-" + RANDOM[:74],
    "older OpenAI API key": "sk-" + RANDOM[:48],
    "Anthropic API key": "sk-ant-api03-" + RANDOM[:93] + "AA",
    "Google API key": "AIza" + RANDOM[:35],
    "NVIDIA API key": "nvapi-" + RANDOM[:64],
    "Azure storage key": "AccountKey=" + RANDOM[:86] + "==",
    "Azure client secret": "abc8Q~" + RANDOM[:34],
    "Stripe key": "sk_live_" + RANDOM[:24],
    "PyPI token": "pypi-AgEIcHlwaS5vcmc" + RANDOM[:60],
    "npm token": "npm_" + RANDOM[:36],
    "JSON web token": f"eyJ{RANDOM[:20]}.eyJ{RANDOM[20:50]}.{RANDOM[50:90]}",
    "Databricks token": "dapi" + HEX[:32],
    "Weights & Biases API key": f"WANDB_API_KEY={HEX[:40]}",
    "AWS secret key": f"aws_secret_access_key = {RANDOM[:40]}",
    "private key": "-----BEGIN PRIVATE KEY-----\\n" + RANDOM[:64] + "\\n-----END PRIVATE KEY-----",
}


@pytest.fixture
def job(project):
    """Write a job file with these keys more."""
    base = yaml.safe_load((project / "job.yaml").read_text())

    def write(**more):
        (project / "job.yaml").write_text(yaml.safe_dump(base | more))

    return write


def told(capsys, *argv, code=0):
    assert cli.main(list(argv)) == code
    return capsys.readouterr()


def problems(capsys, *argv):
    """The warnings about the job file itself, by path."""
    found = json.loads(told(capsys, "check", "--json", *argv).out)["warnings"]
    return {one["path"]: one for one in found if one["path"] != "source"}


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_in_env_or_args_is_named_and_not_shown(job, capsys, name):
    value = SHAPES[name]
    args = ["--token", value, f"--token={value}"]
    job(env={"PLAIN": value}, entrypoint={"script": "train.py", "args": args})
    found = problems(capsys)
    assert set(found) == {"env.PLAIN", "entrypoint.args[1]", "entrypoint.args[2]"}
    assert "secret:env:PLAIN" in found["env.PLAIN"]["hint"]
    assert name.split()[0].removeprefix("older") in found["env.PLAIN"]["message"] + "older"
    assert found["env.PLAIN"]["line"] is not None
    said = told(capsys, "check")
    assert value[-10:] not in said.out + said.err
    assert value[5:15] not in said.out + said.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "not-of-a-known-shape"),
        ("AWS_SECRET_ACCESS_KEY", "short"),
        ("WANDB_API_KEY", HEX[:40]),
        ("OPENAI_APIKEY", "q#7"),
        ("PGPASSWORD", "hunter2"),
        ("MLFLOW_TRACKING_PASSWORD", "12345678"),
        ("KAGGLE_KEY", HEX[:32]),
        ("DATABASE_URL", "postgres://ada:hunter2@db/x"),
        ("PIP_INDEX_URL", f"https://ci:{RANDOM[:20]}@example.org/simple"),
        ("GITHUB_TOKEN_OF_CI", RANDOM[:30]),
    ],
)
def test_a_secret_by_its_variable(job, capsys, name, value):
    job(env={name: value})
    found = problems(capsys)
    assert list(found) == [f"env.{name}"]
    assert value not in json.dumps(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "secret:env:HF_TOKEN"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("PAD_TOKEN", "<|pad|>"),
        ("MAX_TOKENS", "1024"),
        ("NEW_TOKEN", "100"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/token"),
        ("HF_TOKEN_PATH", "/home/ada/token"),
        ("WANDB_API_KEY", ""),
        ("LABEL_KEY", "label"),
        ("SORT_KEY", "created_at_desc"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("OMP_NUM_THREADS", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("HF_ENDPOINT", "https://hf-mirror.example.org:8443/a@b"),
        ("MLFLOW_TRACKING_URI", "http://tracking.example.org:5000"),
        ("GIT_COMMIT", HEX[:40]),
    ],
)
def test_what_is_no_secret(job, capsys, name, value):
    job(env={name: value}, entrypoint={"script": "train.py", "args": [value or "x", "--x"]})
    assert problems(capsys) == {}


def test_a_token_in_a_section_of_a_backend(job, capsys):
    job(slurm={"setup": [f"export HF_TOKEN={SHAPES['Hugging Face token']}"]})
    assert list(problems(capsys)) == ["slurm.setup[0]"]


def test_strict_refuses_what_is_only_a_warning(job, capsys):
    job(env={"HF_TOKEN": "not-of-a-known-shape"})
    for argv in (["check"], ["submit", "--backend", "local", "--dry-run"]):
        told(capsys, *argv)
        said = told(capsys, *argv, "--strict", code=JobFileError.exit_code)
        assert "env.HF_TOKEN" in said.err
        assert "not-of-a-known-shape" not in said.err + said.out
        assert "warnings are errors because of `strict`" in said.err
        assert said.out == ""


def test_strict_has_nothing_against_a_job_without_warnings(job, capsys):
    job(env={"HF_TOKEN": "secret:env:HF_TOKEN"})
    told(capsys, "check", "--strict")
    said = told(capsys, "submit", "--backend", "local", "--dry-run", "--strict")
    assert "secret:env:HF_TOKEN" in said.out


def test_strict_refuses_a_key_or_a_token_among_the_files(job, project, capsys):
    job()
    (project / "settings.py").write_text(f"TOKEN = '{SHAPES['GitHub token']}'\n")
    said = told(capsys, "check")
    assert "settings.py, line 1: looks like a GitHub token" in said.err
    told(capsys, "check", "--strict", code=JobFileError.exit_code)
