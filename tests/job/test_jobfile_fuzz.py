"""Any bytes as a job file, an override or JSON: a value, or an error that says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploykit.backends import base as backend
from deploykit.cli import main as cli
from deploykit.job import file as jobfile
from deploykit.job.decode import Malformed, from_json
from deploykit.lib.errors import DeploykitError, JobFileError
from deploykit.run import lifecycle

GOOD = "name: x\nentrypoint: {script: train.py}\nresources: {time_limit: 1m}\n"
TOML = 'name = "x"\nentrypoint.script = "train.py"\nresources.time_limit = "1m"\n'

WORDS = """
name entrypoint resources env data args script slurm sagemaker & * ! | >- ' " \\ # --- ... %YAML
<< ~ null 1m 0x1 1e999 nan 2026-01-01 true [[ ]] [ ] { } = . ''' ${ secret:env: &a *a
"""
PIECES = st.sampled_from(
    [
        *WORDS.split(),
        *(": ", "- ", ", ", "\n", "\n  ", "\n    ", "\t", "? ", "&a ", "!x ", "!!int "),
        *('"""', "9" * 30, "\0", "\ufeff", "\x85", "\u2028", "\ud800"),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=40).map("".join)
ANYTHING = st.binary(max_size=300) | TEXTS.map(lambda text: text.encode(errors="surrogatepass"))
KEYS = st.sampled_from(["env.A", "entrypoint.args", "resources.nodes", "env", "slurm", "data.x"])


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


@pytest.mark.parametrize("path", ["/dev/zero", "."])
def test_a_path_that_is_no_job_file_gets_a_sentence(path, project, capsys):
    assert cli.main(["check", path]) == 66
    assert "cannot read the job file" in capsys.readouterr().err
