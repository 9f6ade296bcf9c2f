"""Malicious job files: each gets a clear error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploykit.backends import base as backend
from deploykit.job import file as jobfile
from deploykit.job.decode import Malformed, from_json
from deploykit.lib.errors import DeploykitError, JobFileError
from deploykit.run import lifecycle

ROOT = Path(__file__).parents[2]
MEMORY = 1 << 30
"""Bytes of address space of the child; one that starts takes a tenth of them."""
GOOD = "name: x\nentrypoint: {script: train.py}\nresources: {time_limit: 1m}\n"
TOML = 'name = "x"\nentrypoint.script = "train.py"\nresources.time_limit = "1m"\n'
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
LONG = f"[&a '{'x' * 300_000}', {'*a, ' * 100_000}]"
YAML_ATTACKS = {
    "brackets": ("a: " + "[" * 30_000, "line 1: is not valid YAML: nested more than 50 deep"),
    "braces": ("a: " + "{a: " * 30_000, "nested more than 50 deep"),
    "hyphens": ("- " * 30_000, "nested more than 50 deep"),
    "indents": ("".join(f"{' ' * n}a:\n" for n in range(900)), "nested more than 50 deep"),
    "laughs": (LAUGHS, "too many values, perhaps through aliases"),
    "long-laughs": (GOOD + f"env: {LONG}", "too many values"),
    "list-of-itself": ("a: &a [*a]", "the alias 'a' contains itself"),
    "section-of-itself": ("a: &a {b: *a}", "the alias 'a' contains itself"),
    "no-anchor": ("a: *b", "the alias 'b' is undefined"),
    "digits": (GOOD + f"retries: {'9' * 4000}", "line 4: retries: expected a whole number"),
    "time": (GOOD.replace("1m", "9" * 4000 + "s"), "resources.time_limit: expected a time"),
    "years": (GOOD.replace("1m", "99999999d"), "resources.time_limit: expected a time"),
    "size": (GOOD + f"max_bundle: {'9' * 5000}GiB", "max_bundle: expected a size"),
    "keys": (GOOD + "".join(f"k{n}: 1\n" for n in range(60_000)), "59980 more unknown keys"),
    "long-key": (f"{'k' * 900}: {{{'k' * 900}: [1, 2]}}", "keys of more than 1000 characters"),
    "two": (f"{GOOD}---\n{GOOD}", "line 4: is not valid YAML: expected a single document"),
    "tag": ("!!python/object/apply:os.system ['touch pwned']", "expected keys with values"),
}
TOML_ATTACKS = {
    "lists": ("a = " + "[" * 30_000, "is nested too deeply"),
    "tables": ("a = " + "{a=" * 30_000, "is nested too deeply"),
    "dots": ("a." * 30_000 + "a = 1", "a key of more than 20 parts"),
    "headers": ("".join(f"[{'a.' * n}a]\n" for n in range(300)), "a key of more than 20 parts"),
    "digits": (f"retries = {'9' * 5000}", "is not valid TOML"),
    "hex": (f"{TOML}retries = 0x{'f' * 9000}", "retries: expected a whole number"),
    "name": (f"name = 0x{'f' * 9000}", "name: expected text, got a number with too many digits"),
    "large": ("# " + "x" * 300_000, "is larger than 256 KiB"),
}
ATTACKS = [
    *((f"{name}.yaml", *attack) for name, attack in YAML_ATTACKS.items()),
    *((f"{name}.toml", *attack) for name, attack in TOML_ATTACKS.items()),
]
SETS = {
    "brackets": ("env=" + "[" * 30_000, 64, "the value is not valid YAML"),
    "itself": ("env=[&a [*a]]", 64, "the value is not valid YAML"),
    "no-text": (os.fsdecode(b"env=[\xff"), 64, "the value is not valid YAML"),
    "no-text-key": (os.fsdecode(b"\xff=1"), 65, "unknown key"),
    "keys": ("a." * 30_000 + "b=1", 65, "unknown key"),
    "digits": ("retries=" + "9" * 5000, 65, "retries: expected a whole number"),
}


def check(folder, *argv):
    """The exit code and the words of a child that may take little memory and a minute."""

    def bound():
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    done = subprocess.run(
        [sys.executable, "-m", "deploykit", "check", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=False,
        preexec_fn=bound,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.parametrize(("name", "text", "said"), ATTACKS, ids=[name for name, *_ in ATTACKS])
def test_a_hostile_file_gets_a_sentence(name, text, said, project):
    (project / name).write_text(text)
    code, shown = check(project, name)
    assert (code, said in shown) == (65, True), shown[:2000]
    assert not (project / "pwned").exists()


@pytest.mark.parametrize(("text", "code", "said"), SETS.values(), ids=SETS)
def test_a_hostile_override_gets_a_sentence(text, code, said, project):
    found, shown = check(project, "--set", text)
    assert (found, said in shown) == (code, True), shown[:2000]


@pytest.mark.parametrize("path", ["/dev/zero", "."])
def test_a_file_without_an_end_gets_a_sentence(path, project):
    code, shown = check(project, path)
    assert (code, "cannot read the job file" in shown) == (66, True)


def test_a_time_beyond_all_calendars_is_no_time(project, capsys):
    from deploykit.cli import main as cli

    assert cli.main(["logs", "--since", "999999999d"]) == 64
    assert "is not a time such as 10m" in capsys.readouterr().err


def test_dots_in_texts_and_comments_of_toml_are_no_keys(tmp_path):
    path = tmp_path / "job.toml"
    many = "10.0.0.1 " * 40
    path.write_text(f"a = \"{many}\"  # {'a.' * 99}\nb = '''\n{many}\n'''\nc = ['{many}']\n")
    assert jobfile.parse(path)[0]["c"] == [many]


def test_aliases_that_are_few_stand_for_their_values(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("a: &x [1, &y two]\nb: *x\nc: {d: *y, &z e: *z}\n")
    tree, lines = jobfile.parse(path)
    assert tree == {"a": ["1", "two"], "b": ["1", "two"], "c": {"d": "two", "e": "e"}}
    assert lines["c.d"] == 3


def test_libyaml_reads_job_files():
    import yaml

    assert jobfile.yaml("a: 1")[0] == {"a": "1"}
    assert yaml.CSafeLoader


PIECES = st.sampled_from(
    [
        *("name", "entrypoint", "resources", "env", "data", "args", "script", "slurm", "sagemaker"),
        *(": ", ":", "- ", "[", "]", "{", "}", ", ", "\n", "\n  ", "\n    ", "\t", "? ", "=", "."),
        *(
            "&a ",
            "*a",
            "!x ",
            "!!int ",
            "|\n",
            ">-\n",
            "'",
            '"',
            "\\",
            "#",
            "---\n",
            "...\n",
            "%YAML",
        ),
        *(
            "<<: ",
            "~",
            "null",
            "1m",
            "9" * 30,
            "0x1",
            "1e999",
            "nan",
            "2026-01-01",
            "true",
            "[[",
            "]]",
        ),
        *(
            '"""',
            "'''",
            "\0",
            "\ufeff",
            "\x85",
            "\u2028",
            "\ud800",
            "\U0001f600",
            "${",
            "secret:env:",
        ),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=40).map("".join)
ANYTHING = st.binary(max_size=300) | TEXTS.map(lambda text: text.encode(errors="surrogatepass"))


def mutated(good):
    """A good file with some bytes of something else in it."""
    places = st.integers(0, len(good))
    return st.tuples(places, places, ANYTHING).map(
        lambda cut: good.encode()[: cut[0]] + cut[2] + good.encode()[cut[1] :]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("any")
    (place / "train.py").touch()
    return place


def loaded(path, overrides=()):
    """A job, or an error of ours that says what is wrong; anything else fails the test."""
    try:
        file = lifecycle.load(path, overrides, ["local", "slurm", "sagemaker"])
        for name in file.sections:
            list(backend.find(name).check(file.job, file.sections[name]))
    except JobFileError as error:
        said = [problem.message for problem in error.problems]
    except DeploykitError as error:
        said = [str(error)]
    else:
        said = ["a job"]
    assert said
    assert all(said)


# more examples than usual by a profile of hypothesis: none is asked for here
anyhow = settings(deadline=None, suppress_health_check=list(HealthCheck))


@anyhow
@given(data=ANYTHING | mutated(GOOD))
def test_any_bytes_as_yaml_are_a_job_or_an_error_of_ours(folder, data):
    path = folder / "job.yaml"
    path.write_bytes(data)
    loaded(path)


@anyhow
@given(data=ANYTHING | mutated(TOML))
def test_any_bytes_as_toml_are_a_job_or_an_error_of_ours(folder, data):
    path = folder / "job.toml"
    path.write_bytes(data)
    loaded(path)


KEYS = st.sampled_from(["env.A", "entrypoint.args", "resources.nodes", "env", "slurm", "data.x"])


@anyhow
@given(
    overrides=st.lists(st.tuples(KEYS, TEXTS).map("=".join) | ANYTHING.map(os.fsdecode), max_size=3)
)
def test_any_override_is_a_job_or_an_error_of_ours(folder, overrides):
    path = folder / "good.yaml"
    path.write_text(GOOD)
    loaded(path, overrides)


@anyhow
@given(data=ANYTHING)
def test_any_bytes_as_json_are_data_or_malformed(data):
    with contextlib.suppress(Malformed):
        assert repr(from_json(data)) == repr(json.loads(data))  # NaN is unlike itself


def test_the_good_files_are_good(folder):
    """Otherwise the test above would prove little."""
    for name, text in (("good.yaml", GOOD), ("good.toml", TOML)):
        (folder / name).write_text(text)
        assert isinstance(jobfile.parse(folder / name)[0], dict)
