"""Job files: how they are read, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from deploykit.backends import local, sagemaker
from deploykit.job import file as jobfile
from deploykit.job.model import InputChannel
from deploykit.lib.errors import JobFileError, NotFound, UsageError

BACKENDS = ["local", "slurm", "sagemaker"]


def load(path, *overrides):
    draft = jobfile.read(path, overrides)
    return jobfile.load(draft, options={"local": local.Options}, backends=lambda: BACKENDS)


def problems(path, *overrides):
    with pytest.raises(JobFileError) as caught:
        load(path, *overrides)
    return [(p.line, p.path, p.message, p.hint) for p in caught.value.problems]


def add(project, text):
    path = project / "job.yaml"
    path.write_text(path.read_text() + text)
    return path


def test_unquoted_scalars_keep_their_text(project):
    args = "[--lr, 0.10, -x, 1e-3, 010, yes, 1_000, 2026-01-01, '', \"a b\", 'it''s', ~user]"
    job = load(project / "job.yaml", f"entrypoint.args={args}").job
    expected = ("--lr", "0.10", "-x", "1e-3", "010", "yes", "1_000", "2026-01-01")
    assert job.entrypoint.args == (*expected, "", "a b", "it's", "~user")


def test_toml_is_read_too(project):
    (project / "job.toml").write_text(
        'name = "hello"\n[entrypoint]\nscript = "train.py"\nargs = ["--epochs", "5"]\n'
        '[resources]\nnodes = 2\ntime_limit = "5m"\n[local]\npython = "python3"\n'
    )
    file = load(project / "job.toml")
    assert (file.job.resources.nodes, file.sections["local"].python) == (2, "python3")


def test_every_problem_has_its_line_and_path(project):
    path = add(project, "  nodse: 2\n  nodes: 0\nspurce: .\n")
    assert problems(path) == [
        (7, "resources.nodse", "unknown key", "did you mean 'nodes'?"),
        (8, "resources.nodes", "must be at least 1, got 0", None),
        (9, "spurce", "unknown key", "did you mean 'source'?"),
    ]


def test_key_given_twice(project):
    assert problems(add(project, "name: other\n")) == [(7, "name", "duplicate key", None)]


def test_sections_of_other_backends_are_allowed_but_misspelled_ones_are_not(project):
    path = add(project, "slurm: {partition: gpu}\nsagemakr: {}\n")
    assert problems(path) == [
        (8, "sagemakr", "unknown key", "did you mean 'sagemaker'?"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected a mapping such as `name: digits`"),
        ("name: [a\n", "is not valid YAML: did not find expected ',' or ']'"),
        ("a: &a [*a]\n", "is not valid YAML: an alias refers to itself"),
        ("a: *b\n", "is not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML: found another document"),
        ("!!python/object/apply:os.system [ls]\n", "expected a mapping"),
        ("? [a, b]\n: c\n", "is not valid YAML: a key must be plain text"),
    ],
)
def test_broken_files(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    (found,) = problems(path)
    assert found[2].startswith(message)


def test_aliases_stand_for_their_values(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("a: &x [1, &y two]\nb: *x\nc: {d: *y, e: *y}\n")
    tree, lines = jobfile.parse(path)
    assert tree == {"a": ["1", "two"], "b": ["1", "two"], "c": {"d": "two", "e": "two"}}
    assert lines["c.d"] == 3


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (2**20 + 1), None])
def test_unreadable_files(tmp_path, content):
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NotFound, match="cannot read the job file"):
        load(path)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("resources.nodes=3", lambda job: job.resources.nodes == 3),
        ("env.A=1=2", lambda job: job.env == {"A": "1=2"}),
        ("env.A=", lambda job: job.env == {"A": ""}),
        ("env.A= a: {b", lambda job: job.env == {"A": " a: {b"}),
        ('env.A="null"', lambda job: job.env == {"A": "null"}),
        ("entrypoint.args=[-v, 'a, b']", lambda job: job.entrypoint.args == ("-v", "a, b")),
        ("resources.memory=null", lambda job: job.resources.memory is None),
        ("entrypoint={module: this.that}", None),
    ],
)
def test_overrides(project, override, read):
    file = load(project / "job.yaml", override)
    assert file.job.entrypoint.module == "this.that" if read is None else read(file.job)


@pytest.mark.parametrize("override", ["nodes", "=3", "a..b=3", "entrypoint.args=[a", "env={A: 'x}"])
def test_bad_overrides(project, override):
    with pytest.raises(UsageError, match="--set"):
        load(project / "job.yaml", override)


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("entrypoint.script=trian.py", "entrypoint.script", "did you mean 'train.py'?"),
        ("entrypoint.script=../x.py", "entrypoint.script", "for example train.py"),
        ("entrypoint.script=-x.py", "entrypoint.script", "for example train.py"),
        ("entrypoint.module=a", "entrypoint", None),
        ("source=nowhere", "source", None),
        (
            "env.RANK=0",
            "env.RANK",
            "remove it; the trainer reads the launcher's value",
        ),
        ("env.A=secret:vault:x", "env.A", "for example secret:env:HF_TOKEN"),
        ("env.A=secret:env:", "env.A", "for example secret:env:HF_TOKEN"),
    ],
)
def test_what_does_not_go_together(project, override, path, hint):
    ((_, found_path, _, found_hint),) = problems(project / "job.yaml", override)
    assert (found_path, found_hint) == (path, hint)


def test_locations_are_relative_to_the_file(project, monkeypatch):
    monkeypatch.chdir("/")
    job = load(project / "job.yaml", "data.train=data/x", "output=s3://b/out", "data.home=~/y").job
    assert job.source == str(project)
    assert job.data["train"].path == str(project / "data/x")
    assert job.output == "s3://b/out"
    assert job.data["home"].path.endswith("no home/y")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--epochs 3", ("--epochs", "3")),
        ("--name 'a b' --flag", ("--name", "a b", "--flag")),
        ("it's", ("it's",)),
    ],
)
def test_a_list_written_as_text_is_answered_with_the_list(project, text, words):
    ((*_, hint),) = problems(project / "job.yaml", f"entrypoint.args={text}")
    suggested = hint.removeprefix("write ")
    assert load(project / "job.yaml", f"entrypoint.args={suggested}").job.entrypoint.args == words


def test_a_name_that_is_not_allowed_is_answered_with_one_that_is(project):
    ((*_, hint),) = problems(project / "job.yaml", "name=_my job__2_")
    assert hint == "for example my-job-2"
    assert load(project / "job.yaml", "name=my-job-2").job.name == "my-job-2"


def test_a_tab_is_called_a_tab(project):
    assert problems(add(project, "env:\n\tA: b\n")) == [
        (8, "", "is not valid YAML: found a tab; indent with spaces", None)
    ]


@pytest.mark.parametrize("stage", ["node", None])
def test_a_key_of_a_channel_can_be_set_where_the_file_has_only_its_path(project, stage):
    path = add(project, "data: {train: s3://my-bucket/train}\n")
    job = load(path, f"data.train.stage={stage or 'null'}").job
    assert job.data == {"train": InputChannel("s3://my-bucket/train", stage)}


def test_a_job_that_is_never_restarted_has_no_retries(project):
    add(project, "retries: 3\n")
    assert load(project / "job.yaml").job.retries == 3
    assert load(project / "job.yaml", "restarts.policy=never").job.retries == 0


def test_bounds_have_units(project):
    ((*_, message, _),) = problems(project / "job.yaml", "resources.time_limit=25s")
    assert message == "must be at least 60 s, got '25s'"


def test_subnets_and_security_groups_in_each_other_s_place(project):
    section = "sagemaker:\n  subnets: [sg-0a1b2c3d]\n  security_group_ids: [subnet-0a1b2c3d]\n"
    draft = jobfile.read(add(project, section), ())
    with pytest.raises(JobFileError) as caught:
        jobfile.load(draft, options={"sagemaker": sagemaker.Options}, backends=lambda: BACKENDS)
    messages = {p.path: p.message for p in caught.value.problems}
    expected = "expected an ID such as subnet-0a1b2c3d; got 'sg-0a1b2c3d'"
    assert messages["sagemaker.subnets[0]"] == expected
    expected = "expected an ID such as sg-0a1b2c3d; got 'subnet-0a1b2c3d'"
    assert messages["sagemaker.security_group_ids[0]"] == expected
