from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deploykit.lib import paths
from deploykit_node import environment
from deploykit_node.cluster import BadEnvironment

ENTRYPOINTS = paths.shipped("entrypoints")


def resolve(references, **env):
    return environment.secrets({**env, "DEPLOYKIT_SECRETS": json.dumps(references)})


def test_nothing_to_resolve():
    assert environment.secrets({}) == {}


def test_a_variable_and_a_file(tmp_path):
    path = tmp_path / "to:ken"
    path.write_text("from file é\n\n")
    path.chmod(0o600)
    got = resolve({"A": "secret:env:OTHER", "B": f"secret:file:{path}"}, OTHER="x\ny")
    assert got == {"A": "x\ny", "B": "from file é\n"}


def test_a_file_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text("k")
    (tmp_path / "key").chmod(0o400)
    assert resolve({"A": "secret:file:~/key"}) == {"A": "k"}


def test_every_failure_is_reported_and_no_value_is_shown(tmp_path):
    public = tmp_path / "public"
    public.write_text("hush")
    public.chmod(0o644)
    references = {
        "A": "secret:env:NOWHERE",
        "B": f"secret:file:{public}",
        "C": f"secret:file:{tmp_path}/absent",
        "D": "secret:vault:x",
        "E": "secret:env:GOOD",
        "F": "secret:file:~who/key",
    }
    with pytest.raises(BadEnvironment) as error:
        resolve(references, GOOD="hush")
    text = str(error.value)
    for part in (
        "A (secret:env:NOWHERE): the variable NOWHERE is not set",
        f"run: chmod 600 -- {public}",
        "absent cannot be read (No such file or directory)",
        "~who/key cannot be read (No such file or directory)",
        "D (secret:vault:x): write secret:KIND:NAME",
    ):
        assert part in text
    assert "hush" not in text


def test_the_light_kinds_never_import_boto3():
    code = "import sys; from deploykit_node import environment\n"
    code += "environment.secrets({}); sys.exit('boto3' in sys.modules)"
    env = {"PYTHONPATH": str(ENTRYPOINTS)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


@pytest.fixture
def aws(monkeypatch):
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with moto.mock_aws():
        yield lambda service: boto3.client(service, region_name="eu-west-1")


@pytest.mark.aws
def test_parameter_store_and_secrets_manager(aws):
    aws("ssm").put_parameter(Name="/team/token", Value="p", Type="SecureString")
    aws("secretsmanager").create_secret(Name="a:b", SecretString="s")
    aws("secretsmanager").create_secret(Name="raw", SecretBinary=b"x")
    references = {"A": "secret:ssm:/team/token", "B": "secret:secretsmanager:a:b"}
    assert resolve(references, AWS_REGION="eu-west-1") == {"A": "p", "B": "s"}
    with pytest.raises(BadEnvironment) as error:
        resolve({"A": "secret:ssm:/none", "B": "secret:secretsmanager:raw"}, AWS_REGION="eu-west-1")
    assert "AWS returned ParameterNotFound; the node's role requires ssm:GetParameter" in str(
        error.value
    )
    assert "the secret is binary" in str(error.value)


@pytest.mark.aws
def test_no_region_is_a_sentence(aws, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(BadEnvironment, match="request to AWS failed: You must specify a region"):
        resolve({"A": "secret:ssm:/team/token"})
