"""The user's defaults: what wins over them, and problems of the config file."""

from __future__ import annotations

import json
import re
import stat

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.lib.errors import ConfigError
from deploykit.run import config

ARN = "arn:aws:iam::123456789012:role/training"
FULL = f"""\
backend = "slurm"   # mine

[slurm]
account = "physics"
'partition' = "gpu"

[sagemaker]
role = "{ARN}"
bucket = "my-bucket"
region = "eu-west-1"
"""


@pytest.fixture(autouse=True)
def _no_region(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "DEPLOYKIT_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def write(text):
    """The config file of this test's user."""
    path = paths.config()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def sources(capsys, *argv):
    assert cli.main(["config", "--json", *argv]) == 0, capsys.readouterr()
    rows = json.loads(capsys.readouterr().out)["settings"]
    return {row["key"]: (row["value"], row["source"]) for row in rows}


def directives(capsys, *argv):
    assert cli.main(["submit", "--dry-run", *argv]) == 0, capsys.readouterr()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", capsys.readouterr().out, re.MULTILINE))


def test_the_defaults_are_used(project, capsys):
    write(FULL)
    found = directives(capsys)
    assert (found["account"], found["partition"]) == ("physics", "gpu")
    machine = "sagemaker={instance_type: ml.g5.xlarge, framework_version: 2.8.0}"
    assert cli.main(["submit", "--dry-run", "--backend", "sagemaker", "--set", machine]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["RoleArn"] == ARN
    assert request["OutputDataConfig"]["S3OutputPath"].startswith("s3://my-bucket/")


def test_job_file_and_command_line_win(project, capsys):
    write(FULL)
    with (project / "job.yaml").open("a") as file:
        file.write("slurm: {partition: cpu}\n")
    found = directives(capsys, "--set", "slurm.account=me")
    assert (found["account"], found["partition"]) == ("me", "cpu")
    assert "SBATCH" not in _dry_run(capsys, "--backend", "local")
    with (project / "job.yaml").open("a") as file:
        file.write("backend: local\n")
    assert "SBATCH" not in _dry_run(capsys)


def _dry_run(capsys, *argv):
    assert cli.main(["submit", "--dry-run", *argv]) == 0
    return capsys.readouterr().out


def test_a_key_that_the_job_file_sets_to_nothing_stays_so(project, capsys):
    write(FULL)
    with (project / "job.yaml").open("a") as file:
        file.write("slurm:\n  partition:\n")
    found = directives(capsys)
    assert found["account"] == "physics"
    assert "partition" not in found
    assert sources(capsys)["slurm.partition"] == (None, "job file")


def test_the_environment_wins_over_the_file(project, capsys, monkeypatch):
    write(FULL)
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert "SBATCH" not in _dry_run(capsys)
    found = sources(capsys)
    assert found["backend"] == ("local", "environment")
    assert found["sagemaker.region"] == ("us-west-2", "environment")


def test_a_section_of_defaults_is_no_backend_to_check(project, capsys):
    """`check` without --backend checks those of the job file."""
    write(FULL.replace('backend = "slurm"', ""))
    assert cli.main(["check"]) == 0
    assert capsys.readouterr().out == "job.yaml: no errors for local\n"


def test_the_folder_belongs_to_the_host(project, capsys):
    write('[slurm]\nhost = "login1"\nfolder = "/shared/ada"\n')
    chdir = directives(capsys, "--backend", "slurm")["chdir"]
    assert chdir.startswith("/shared/ada/")
    here = directives(capsys, "--backend", "slurm", "--set", "slurm.host=null")["chdir"]
    assert str(paths.state()) in here
    assert cli.main(["check", "--backend", "slurm", "--set", "slurm.host=other"]) == 65
    assert "slurm.folder: an absolute path on other is required" in capsys.readouterr().err
    same = directives(capsys, "--backend", "slurm", "--set", "slurm.host=login1")["chdir"]
    assert same.startswith("/shared/ada/")


def test_where_each_value_comes_from(project, capsys):
    path = write(FULL)
    with (project / "job.yaml").open("a") as file:
        file.write("slurm:\n  partition: cpu\n")
    argv = ["config", "--set", "sagemaker.bucket=other", "--backend", "local"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines() == [
        "backend\tlocal\tflag: backend=local",
        "max_cost\t-\tdefault",
        "budget\t-\tdefault",
        "notify.to\t-\tdefault",
        "notify.events\t-\tdefault",
        "notify.command\t-\tdefault",
        "local.price\t-\tdefault",
        f"slurm.account\tphysics\tconfig file: {path}, line 4",
        "slurm.partition\tcpu\tjob file: job.yaml, line 8",
        "slurm.host\t-\tdefault",
        "slurm.folder\t-\tdefault",
        "slurm.price\t-\tdefault",
        f"sagemaker.role\t{ARN}\tconfig file: {path}, line 8",
        "sagemaker.bucket\tother\tflag: sagemaker.bucket=other",
        f"sagemaker.region\teu-west-1\tconfig file: {path}, line 10",
    ]


def test_without_any_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("backend\tlocal\tdefault\n")
    assert f"{paths.config()} does not exist" in shown.err
    assert cli.main(["config", "no.yaml"]) == 66


def test_a_new_file_changes_nothing_until_it_is_edited(project, capsys):
    before = sources(capsys)
    assert cli.main(["config", "--init"]) == 0
    path = paths.config()
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sources(capsys) == before
    everything = re.sub(r"^# (\w+ = )", r"\1", path.read_text(), flags=re.MULTILINE)
    assert cli.main(["config", "--init"]) == 64
    assert set(config.read(write(everything)).values) == set(config.SETTINGS)


BROKEN = {
    'backend = "slrum"': (1, "backend", "unknown backend 'slrum'", "did you mean 'slurm'?"),
    'role = "x"': (1, "role", "unknown key", "did you mean 'sagemaker.role'?"),
    '[slurm]\nacount = "x"': (2, "slurm.acount", "unknown key", "did you mean 'slurm.account'?"),
    '[slrum]\nqqq = "x"': (2, "slrum.qqq", "unknown key", "known keys: backend, max_cost"),
    "[slurm]\n\npartition = 3": (3, "slurm.partition", "expected text", 'partition = "..."'),
    'slurm.account = ""': (1, "slurm.account", "expected text", 'account = "..."'),
    'slurm = "x"': (1, "slurm", "unknown key", "did you mean"),
    '[slurm]\nfolder = "/x"': (2, "slurm.folder", "requires slurm.host", "set slurm.host"),
    "[slurm": (1, "", "is not valid TOML", None),
    "\nbackend = local": (2, "", "is not valid TOML", None),
    'backend = "a"\nbackend = "b"': (2, "", "is not valid TOML", None),
}


@pytest.mark.parametrize("text", BROKEN)
def test_every_problem_has_its_line(project, text):
    line, path, message, hint = BROKEN[text]
    with pytest.raises(ConfigError) as caught:
        config.read(write(text))
    (problem,) = caught.value.problems
    assert (problem.line, problem.path) == (line, path)
    assert problem.message.startswith(message)
    assert hint is None or hint in problem.hint


@pytest.mark.parametrize("verb", [["submit"], ["check"], ["config"], ["attach", "a"]])
def test_all_problems_at_once_and_a_code_of_their_own(project, capsys, verb):
    path = write('bakend = "local"\n[slurm]\npartition = 1\n')
    assert cli.main(verb) == 78
    assert capsys.readouterr().err.splitlines() == [
        f"error: {path}: 2 problems",
        "  line 1: bakend: unknown key (did you mean 'backend'?)",
        '  line 3: slurm.partition: expected text (partition = "...")',
    ]


def test_a_value_that_a_job_cannot_have_names_its_file(project, capsys):
    path = write(FULL.replace("my-bucket", "My_Bucket").replace("gpu", "a\\nb"))
    assert cli.main(["check", "--backend", "sagemaker"]) == 65
    shown = capsys.readouterr().err
    assert "sagemaker.bucket: expected a bucket name" in shown
    assert f"set in {path}, line 9" in shown
    assert cli.main(["check", "--backend", "slurm"]) == 65
    assert f"set in {path}, line 5" in capsys.readouterr().err


def test_what_cannot_be_read_is_refused(project, capsys):
    path = write("")
    path.unlink()
    path.symlink_to("/nowhere")
    assert cli.main(["check"]) == 78
    path.unlink()
    path.write_bytes(b"\xff")
    assert cli.main(["check"]) == 78
    path.write_text("#" * 2**21)
    assert cli.main(["check"]) == 78
    assert "unexpected" not in capsys.readouterr().err


def test_a_link_to_ones_own_file_is_followed(project, capsys, tmp_path):
    path = write(FULL)
    path.rename(tmp_path / "dotfile.toml")
    path.symlink_to(tmp_path / "dotfile.toml")
    assert sources(capsys)["backend"] == ("slurm", "config file")


@pytest.mark.parametrize(("base", "used"), [("/etc/xdg", True), ("relative", False), ("", False)])
def test_where_the_file_is(monkeypatch, tmp_path, base, used):
    """A relative path is not valid: https://specifications.freedesktop.org/basedir-spec."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", base)
    top = base if used else tmp_path / ".config"
    assert str(paths.config()) == f"{top}/deploykit/config.toml"


def test_defaults_are_not_written_into_saved_jobs(project, capsys):
    write(FULL)
    assert cli.main(["submit", "--dry-run", "--save", "new.yaml"]) == 0
    saved = (project / "new.yaml").read_text()
    assert "physics" not in saved
    assert "slurm" not in saved
