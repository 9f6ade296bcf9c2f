"""The JSON Schema for editors and the decoder agree about job files."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploykit.backends import base as backend
from deploykit.job import file as jobfile
from deploykit.job import schema
from deploykit.job.decode import DURATION, hints, is_required, split
from deploykit.job.model import JobSpec
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle
from tests.docs_runner import blocks

ROOT = Path(__file__).parents[2]
OPTIONS = {name: backend.find(name).Options for name in ("local", "slurm", "sagemaker")}
SCHEMA = schema.json_schema(OPTIONS)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


class Editor(yaml.SafeLoader):
    """YAML 1.2's core schema, as editors read it: no 1:30:00 as a number, no date, no yes."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's way


for tag, regex, first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    Editor.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{regex})$", re.VERBOSE), first
    )
Editor.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
Editor.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(node.value))


def decoder_accepts(path, text):
    path.write_text(text, encoding="utf-8")
    try:
        tree, _ = jobfile.parse(path)
        lifecycle.load(path, [], [name for name in OPTIONS if name in tree])
    except JobFileError:
        return False
    return True


def complaints(data):
    return [error.message for error in VALIDATOR.iter_errors(data)]


@pytest.fixture(scope="module")
def job_path(tmp_path_factory):
    """A job file beside the files that those in the docs name."""
    folder = tmp_path_factory.mktemp("job")
    for name in ("train.py", "run_clm.py"):
        (folder / name).touch()
    return folder / "job.yaml"


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for pattern in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', json.dumps(SCHEMA)):
        assert "(?" not in json.loads(pattern), "editors know no such groups"


def documented():
    """ci.md, infra.md and sweep.md are about other files."""
    for page in (page for page in PAGES if page.name not in {"ci.md", "infra.md", "sweep.md"}):
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8"))):
            if block.language == "yaml":
                yield pytest.param(block.text, id=f"{page.name}-{number}")


@pytest.mark.parametrize("text", list(documented()))
def test_job_files_of_the_docs_are_accepted_by_both(text, job_path):
    given_here = yaml.safe_load(text)
    job = {"name": "x", "entrypoint": {"script": "train.py"}, "resources": {"time_limit": "5m"}}
    if "time_limit" in (given_here.get("resources") or {}):
        job.pop("resources")
    whole = {key: value for key, value in job.items() if key not in given_here}
    assert decoder_accepts(job_path, f"{text}\n{yaml.safe_dump(whole) if whole else ''}")
    assert complaints({**whole, **given_here}) == []


def test_the_main_job_file_is_accepted_by_both(tmp_path):
    shutil.copytree(ROOT / "entrypoints", tmp_path / "entrypoints")
    text = (ROOT / "job.yaml").read_text(encoding="utf-8")
    assert decoder_accepts(tmp_path / "job.yaml", text)
    assert complaints(yaml.safe_load(text)) == []


def test_the_commented_file_is_accepted_by_both_with_every_key_switched_on(job_path):
    text = schema.commented(OPTIONS)
    assert decoder_accepts(job_path, text)
    assert complaints(yaml.safe_load(text)) == []
    keys = re.compile(r"^( *)# ((?:# )?)(\w+:(?: .*)?)$", re.MULTILINE)
    everything = (
        keys.sub(r"\1\3", text).replace("script:", "# script:").replace("module:", "module: a")
    )
    assert complaints(yaml.safe_load(everything)) == []


def test_a_key_that_is_a_keyword_of_python_is_accepted_by_both(job_path):
    section = "role: arn:aws:iam::123456789012:role/x, bucket: my-bucket, deploy: {async: {}}"
    text = f"name: x\nentrypoint: {{script: train.py}}\nsagemaker: {{{section}}}\n"
    assert decoder_accepts(job_path, text)
    assert complaints(yaml.safe_load(text)) == []
    assert "async_" not in schema.commented(OPTIONS)


BROKEN = {
    "unknown key": "nmae: x",
    "no name": "name:",
    "name with a blank": "name: a b",
    "name too long": f"name: {'x' * 41}",
    "list for a section": "resources: [1]",
    "time without a unit": "resources: {time_limit: 30}",
    "time with a wrong unit": "resources: {time_limit: 30x}",
    "no nodes": "resources: {time_limit: 5m, nodes: 0}",
    "text for a number": "resources: {time_limit: 5m, nodes: many}",
    "half a process": "resources: {time_limit: 5m, processes_per_node: 1.5}",
    "size without a unit": "resources: {time_limit: 5m, memory: 4}",
    "unknown key below": "resources: {time_limit: 5m, gpus: 1}",
    "text for a list": "entrypoint: {script: train.py, args: --epochs 5}",
    "a list in a list": "entrypoint: {script: train.py, args: [[a]]}",
    "nothing in a list": "entrypoint: {script: train.py, args: [a, null]}",
    "variable with a hyphen": "env: {A-B: c}",
    "empty channel": 'data: {train: ""}',
    "channel with a slash": "data: {a/b: c}",
    "empty output": 'output: ""',
    "too many retries": "retries: 31",
    "unknown style": "slurm: {gres_style: gpus}",
    "option with dashes": "slurm: {extra: {--mail-type: END}}",
    "number for a switch": "slurm: {exclusive: 1}",
    "role by name": "sagemaker: {role: training, instance_type: ml.g5.xlarge, bucket: my-bucket}",
    "no bucket": "sagemaker: {role: arn:aws:iam::123456789012:role/x, instance_type: ml.g5.xlarge}",
    "unknown distribution": "sagemaker: {distribution: ddp}",
    "unknown section": "kubernetes: {}",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_by_both(line, job_path):
    whole = {
        "name": "name: x",
        "entrypoint": "entrypoint: {script: train.py}",
        "resources": "resources: {time_limit: 5m}",
    }
    assert decoder_accepts(job_path, "\n".join(whole.values()))
    whole[line.partition(":")[0]] = line
    text = "\n".join(whole.values())
    assert not decoder_accepts(job_path, text)
    assert complaints(yaml.safe_load(text))
    assert complaints(yaml.load(text, Editor))


# Any file at all, often nearly right: what the decoder takes, an editor must not mark.
PLAIN = st.sampled_from(
    [
        *("x", "a b", "5", "0.10", "1e3", "-1", "+2", "007", "true", "yes", "null", "~", "''"),
        *("2026-01-01", "1:30:00", "10:00:00", "30m", "1h30m", "4GiB", "1.5", "[]", "{}", "[a, 1]"),
        *("{A: b}", "{a: 5}", "train.py", "ml.g5.xlarge", "my-bucket", "torch_distributed", "gres"),
        *("arn:aws:iam::123456789012:role/x", "py312", "2.8.0", "us-east-1", "[sg-1]", ".", "100%"),
    ]
)
TEXT = st.text(max_size=12).map(json.dumps)
NUMBERS = st.integers(-5, 10**6).map(str) | st.sampled_from(["0.10", "1e3", "yes", "1:30:00"])
VALUE = PLAIN | TEXT | NUMBERS


def value(cls, field):
    """Mostly a value that the key is likely to take, sometimes any other."""
    kind, metadata, optional = split(hints(cls)[field.name])
    if dataclasses.is_dataclass(kind):
        return section(kind)
    right = [schema.sample(field, metadata), *RIGHT.get(kind, ()), *get_args(kind)]
    right += ["1:30:00", "1-12:00:00", "90s"] if DURATION in metadata else []
    right += ["null"] if optional else []
    right = [text for text in right if isinstance(text, str) and text]
    return rarely(VALUE, st.sampled_from(right)) if right else VALUE


def rarely(other, usual):
    return st.integers(0, 9).flatmap(lambda number: other if number == 7 else usual)


def section(cls):
    """A section of the file in YAML's flow style: some keys of the class."""
    fields = {field.name: value(cls, field) for field in dataclasses.fields(cls)}
    names = [field.name for field in dataclasses.fields(cls) if is_required(field)]
    wanted = {name: fields.pop(name) for name in names}
    few = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True)
    chosen = few.flatmap(lambda keys: st.fixed_dictionaries(wanted | {k: fields[k] for k in keys}))
    return chosen.map(lambda found: "{" + ", ".join(f"{k}: {v}" for k, v in found.items()) + "}")


RIGHT = {int: ["1", "30", "007"], bool: ["true", "false", "yes", "Off"]}
JOB = {field.name: value(JobSpec, field) for field in dataclasses.fields(JobSpec)}
ANY = JOB | {name: section(cls) for name, cls in OPTIONS.items()}
ARGUMENTS = st.lists(rarely(VALUE, TEXT | NUMBERS | st.just("2026-01-01"))).map(", ".join)


@st.composite
def job_files(draw):
    """Mostly right, with a few keys drawn at random."""
    found = {
        "name": "x",
        "entrypoint": f"{{script: train.py, args: [{draw(ARGUMENTS)}]}}",
        "resources": "{time_limit: 01:30:00}",
    }
    for names in (JOB, OPTIONS):
        name = draw(st.sampled_from(sorted(names)))
        found[name] = draw(ANY[name])
    return "\n".join(f"{key}: {value}" for key, value in found.items())


@pytest.mark.slow
def test_what_the_decoder_accepts_an_editor_does_not_mark(job_path):
    accepted = []

    @settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(job_files())
    def judge(text):
        if decoder_accepts(job_path, text):
            accepted.append(text)
            assert complaints(yaml.load(text, Editor)) == [], text

    judge()
    assert len(accepted) > 100
