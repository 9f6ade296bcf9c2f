"""Text printed for pasting: hostile values stay values in sh, YAML and Terraform.

Commands are not judged by reading them: they are run by sh, with recorders for the programs that
they name, and parsed back.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import meta, nodes

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, remote
from deploykit.cli import main as cli
from deploykit.diagnose import cause_rules, placeholders
from deploykit.doctor import collect, fixes, infra, local
from deploykit.doctor.infra import Answers
from deploykit.job import file as jobfile
from deploykit.job.decode import decode
from deploykit.job.model import Entrypoint, JobSpec, Resources
from deploykit.lib import paths, quoting, render, shell
from deploykit.lib.errors import BackendUnavailable
from tests.doctor.terraform import HCL

pytestmark = pytest.mark.slow

NASTY = [
    *(
        "x; touch canary",
        "$(touch canary)",
        "`touch canary`",
        "a\nb; touch canary\n",
        "&& touch canary",
    ),
    *("'", '"', "'; touch canary; '", '"; touch canary; "', "\\", "a b", "*", "!x", "~", "#x", ""),
    *("${x}", "%{x}", "$${x}", "$$$${x}", "%%{x}", "${{x}}", "x: y", "]", "null", "yes", "1e3"),
    *("\x1b]52;c;x\x07", "\b\f\x7f", "\u2028", "\x85", "ü", "\U0001f600", "x - y", "x\n---\ny: z"),
]
ACTS = ["-rf", "--endpoint-url=http://evil", "file:///etc/passwd", "fileb://x", "https://evil/x"]
"""What the AWS CLI takes for an option, or fetches."""
FILLED_IN = re.compile(r"(?<!\$)\$\{|(?<!%)%\{|\$\$\$\{|%%%\{")
"""Where Terraform would fill something in, or might."""
LISTS = {"services", "subnets", "groups", "inside"}
nasty = pytest.mark.parametrize("value", NASTY, ids=ascii)


def run(script, folder):
    """Run by sh; the argument vectors of the programs that it starts."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("aws", "ssh", "deploykit", "pcluster", "python"):
        recorder = programs / name
        recorder.write_text('#!/bin/sh\nprintf "%s\\0" "$#" "${0##*/}" "$@" >> record\n')
        recorder.chmod(0o755)
    (folder / "record").unlink(missing_ok=True)
    env = {"PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", script], cwd=folder, env=env, capture_output=True, check=False)
    assert not (folder / "canary").exists()
    record = folder / "record"
    pieces = iter(record.read_bytes().decode().split("\0")[:-1] if record.exists() else ())
    return [[next(pieces) for _ in range(int(count) + 1)] for count in pieces]


def blocks():
    """The template of each fix, by its name."""
    text = (paths.shipped("templates") / "fixes.j2").read_text()
    found = render._environment(str).parse(text).find_all(nodes.Block)
    return {block.name: nodes.Template(block.body) for block in found}


def values_of(kind, value):
    """Every value of a template, hostile where it is a text."""
    template = blocks()[kind]
    template.environment = render._environment(str)
    names = meta.find_undeclared_variables(template)
    document = {"Version": "2012-10-17", "Statement": [{"Action": value, "Resource": value}]}
    special = {
        "policy": document,
        "trust": document,
        "outbound": True,
        "number": 7,
        "value": 8.0,
        "kind": "role",
        "option": "--enable-dns-support",
        "entries": [{"number": 7, "protocol": "6", "low": 1, "high": 2, "block": value}],
        "permissions": [
            {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": value}], "IpRanges": []},
        ],
        **{name: [value, value] for name in LISTS},
    }
    return {name: special.get(name, value) for name in names - {"cli", "json", "region"}} | {
        "region": "us-east-1"
    }


@pytest.mark.parametrize("kind", blocks())
def test_a_fix_of_doctor_holds_values_as_commands(kind, tmp_path):
    for value in NASTY[:12]:
        fix = fixes.make(kind, "do it", **values_of(kind, value))
        vectors = run(fix.cli, tmp_path)
        words = {word for vector in vectors for word in vector}
        assert {vector[0] for vector in vectors} == {"aws"}
        assert any(value in word or json.dumps(value)[1:-1] in word for word in words)


@pytest.mark.parametrize("kind", blocks())
def test_a_fix_of_doctor_holds_values_as_terraform(kind):
    for value in NASTY:
        text = fixes.make(kind, "do it", **values_of(kind, value)).terraform
        for literal in re.findall(r'"(?:[^"\\\n]|\\.)*"', text):
            assert FILLED_IN.findall(literal.replace("${each.key}", "")) == []


@pytest.mark.skipif(HCL is None, reason="a parser of Terraform is not installed")
@pytest.mark.parametrize(
    "kind",
    [
        "iam_policy",
        *(
            pytest.param(kind, marks=pytest.mark.nightly)
            for kind in ("endpoints", "tenancy", "acl_entry")
        ),
    ],
)
def test_terraform_reads_the_snippets(kind):
    for value in NASTY:
        text = fixes.make(kind, "do it", **values_of(kind, value)).terraform
        done = subprocess.run(
            [HCL, "--quiet"], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        assert json.loads(done.stdout).keys() == {"resource"}


@pytest.mark.parametrize("value", ACTS)
@pytest.mark.parametrize("kind", ["iam_policy", "subnet", "endpoints", "bucket"])
def test_a_value_that_the_cli_would_act_on_is_in_no_command(kind, value):
    fix = fixes.make(kind, "do it", **values_of(kind, value))
    assert (fix.cli, fix.terraform) == ("", "")
    assert repr(value) in fix.summary


@nasty
def test_settings_are_read_back_as_they_were(value, tmp_path):
    settings = fixes.job_file("say", one=value, two=[value, "subnet-1", value]).settings
    tree = {}
    for key, text in settings.items():
        jobfile._override(tree, f"{key}={text}")
    assert tree["sagemaker"]["two"] == [value, "subnet-1", value]
    path = tmp_path / "job.yaml"
    path.write_text("".join(f"{key}: {text}\n" for key, text in settings.items()))
    assert list(jobfile.parse(path)[0].values()) == [value, [value, "subnet-1", value]]


@nasty
def test_a_hint_on_a_list_is_yaml(value, tmp_path):
    if not value:
        return
    _, (problem, *_) = decode(Entrypoint, {"args": value})
    try:
        words = shlex.split(value)
    except ValueError:  # a quote that is not closed
        words = [value]
    assert jobfile.yaml(problem.hint.removeprefix("write "))[0] == words


@nasty
def test_the_python_of_saved_facts_is_one_word(value, tmp_path):
    found = local.LocalMachine(
        python=value,
        torch="",
        cuda="",
        import_error="x",
        visible_gpus=0,
        gpus=0,
        shm_free=1 << 40,
        max_open_files=-1,
        max_processes=-1,
        max_locked_memory=-1,
        has_infiniband=False,
        interfaces_up=("lo",),
        host_address="x",
    )
    job = JobSpec("one", Entrypoint("train.py"), Resources(600))
    torchless = dataclasses.replace(found, import_error="", torch="2", gpus=1)
    for machine_, words in (
        (found, ["install", "torch"]),
        (torchless, ["install", "--force-reinstall", "torch"]),
    ):
        (one,) = local.findings(job, machine_)
        assert shlex.split(one.fix.cli) == [value, "-m", "pip", *words]
        run(one.fix.cli, tmp_path)


@nasty
def test_the_ssh_hint_is_one_host(value, tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BackendUnavailable) as caught:
        remote.run(value, "true")
    command = caught.value.hint.removeprefix("check `").removesuffix(
        "`, then run the same command again"
    )
    assert run(command, tmp_path) == [["ssh", "--", value, "true"]]


@nasty
def test_the_hint_on_a_folder_there_is_one_host(value, tmp_path):
    job = JobSpec("one", Entrypoint("train.py"), Resources(600))
    hints = [p.hint for p in slurm.check(job, Options(host=value)) if p.path == "slurm.folder"]
    command = hints[0].removeprefix("for example the output of `").removesuffix("`")
    assert run(command, tmp_path) == [["ssh", "--", value, "echo ~/.local/state/deploykit"]]


@nasty
def test_the_region_of_facts_that_are_missing_is_one_word(value, tmp_path):
    fix = collect._not_saved(SimpleNamespace(region=value), ["get-role"]).fix
    assert run(fix.cli, tmp_path)[0][-1] == f"sagemaker.region={value}"


@pytest.mark.parametrize("value", [value for value in NASTY if value and "/" not in value] + ["-x"])
def test_the_file_that_advise_wrote_is_one_word(value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = "--gpu a100-80gb --batch-size 8 --sequence 128 --layers 2 --width 64"
    assert cli.main(["advise", *asked.split(), f"--write={value}"]) == 0
    said = capsys.readouterr().out.partition("; next: `")[2]
    ((name, verb, path),) = run(said.rstrip("\n").removesuffix("`"), tmp_path)
    assert (name, verb, Path(path)) == ("deploykit", "check", Path(value))
    assert not path.startswith("-")


def test_the_name_of_a_gpu_stays_in_its_comment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, end in enumerate(("\n", "\r", "\x85", "\u2028")):
        argv = ["--gpu", f"x{end}env: {{A: b}}", "--gpu-memory", "80GiB", "--layers", "2"]
        argv += ["--batch-size", "8", "--sequence", "128", "--width", "64"]
        assert cli.main(["advise", *argv, "--write", f"{number}.yaml"]) == 0
        assert "env" not in jobfile.parse(Path(f"{number}.yaml"))[0]


@nasty
def test_the_commands_of_infra_hold_names(value, tmp_path):
    answers = Answers(value, value, "z", "bucket", "m@x.y", 1)
    vectors = run("\n".join(infra.commands(answers)), tmp_path)
    assert [vector[:3] for vector in vectors] == [
        ["aws", "cloudformation", "deploy"],
        ["aws", "cloudformation", "describe-stacks"],
    ]
    for vector in vectors:
        assert vector[3:7] == ["--region", value, "--stack-name", value]
    assert "Stacks[0].Outputs" in vectors[1]


@nasty
def test_the_file_of_a_secret_is_one_word(value, tmp_path, monkeypatch):
    from deploykit_node import environment

    if not value or "/" in value or value == "~":
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / value).write_text("x")
    (tmp_path / value).chmod(0o644)
    with pytest.raises(environment.Unresolved) as caught:
        environment._file(value, {})
    command = str(caught.value).partition("run: ")[2]
    subprocess.run(["sh", "-c", command.rpartition("run: ")[2]], cwd=tmp_path, check=False)
    assert not (tmp_path / "canary").exists()


@nasty
def test_fixes_of_causes_hold_no_hostile_value(value):
    for cause in cause_rules.load().causes:
        names = placeholders.names(cause.fix)
        text = placeholders.render(cause.fix, dict.fromkeys(names, f"a{value}"))
        harmless = re.fullmatch(r"[\w.:/@+=,%-]*", value) is not None
        assert harmless or not names or f"a{value}" not in text


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_a_command_is_parsed_back(words):
    assert shlex.split(shell.command(*words)) == words


def test_a_path_in_a_command_is_not_an_option():
    assert shell.command("check", Path("-rf a"), "-f") == "check './-rf a' -f"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_yaml_is_parsed_back(text):
    for loader in (yaml.SafeLoader, yaml.CSafeLoader):
        assert yaml.load(f"[{quoting.data(text)}]", loader) == [text]
    assert jobfile.yaml(f"a: [{quoting.yaml(text)}]")[0] == {"a": [text]}


@given(st.text(st.sampled_from('${}%"\\\n\b\fx\U0001f600')))
def test_terraform_fills_nothing_in(text):
    written = quoting.terraform(text)
    assert FILLED_IN.findall(written) == []
    plain = re.sub(r"\\U0001f600", "\U0001f600", written)
    assert json.loads(plain.replace("$${", "${").replace("%%{", "%{")) == text
