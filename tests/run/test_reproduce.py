"""`reproduce`: exactly the same bytes again, or a clear refusal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
from deploykit.cli import main as cli
from deploykit.job.decode import as_data
from deploykit.lib import paths
from deploykit.run import registry
from tests.run.test_rerun import sent  # noqa: F401 - the plans that were sent


def reproduce(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(["reproduce", *words]) == code
    return capsys.readouterr()


def git(*words):
    who = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


def test_the_same_bytes_job_and_arguments(project, sent, capsys):  # noqa: F811
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    (project / "train.py").write_text("print('changed')\n")
    more = ["--set", "env.A=1", "--", "--lr", "a b\té"]
    assert cli.main(["submit", "--run", "first", *more]) == 0
    (project / "train.py").write_text("other")
    (project / "job.yaml").unlink()
    shown = reproduce(capsys, "first", "--run", "second", "--json")
    old, new = sent
    assert json.loads(shown.out)["run"] == "second"
    assert new.bundle.hash == old.bundle.hash
    assert new.text.replace("second", "first") == old.text
    assert as_data(new.job) == {**as_data(old.job), "source": new.job.source}
    assert "to compare them later: deploykit compare first second\n" in shown.err
    first, second = registry.known("first"), registry.known("second")
    assert first.revision == second.revision is not None
    for name in ("source.json", "uncommitted.diff"):
        kept = Path(second.folder, name).read_bytes()
        assert kept == Path(first.folder, name).read_bytes() != b""
    assert reproduce(capsys, "second", "--run", "third").err.count("of second") == 1
    assert sent[2].bundle.hash == old.bundle.hash


def test_it_neither_resumes_nor_replaces(project, sent, capsys):  # noqa: F811
    places = ["--set", "output=results", "--set", "checkpoints=saved/"]
    assert cli.main(["submit", "--run", "first", *places]) == 0
    shown = reproduce(capsys, "first", "--run", "second")
    assert sent[1].job.output == f"{project}/results/second"
    assert sent[1].job.checkpoints == f"{project}/saved/second"
    assert shown.err.startswith(f"output: {project}/results/second\ncheckpoints: ")


def test_a_dry_run_is_the_plan_of_the_run(project, sent, capsys):  # noqa: F811
    assert cli.main(["submit", "--run", "first"]) == 0
    shown = reproduce(capsys, "--run", "first", "--dry-run")
    assert shown.out == (paths.run_folder("first") / "plan.sh").read_text()
    assert len(sent) == 1


def test_another_backend_gets_the_same_bytes(project, sent, capsys):  # noqa: F811
    assert cli.main(["submit", "--run", "first"]) == 0
    there = ["--backend", "slurm", "--dry-run", "--json"]
    found = json.loads(reproduce(capsys, "first", *there).out)
    assert (found["backend"], found["bundle"]["hash"]) == ("slurm", sent[0].bundle.hash)


def test_another_launcher_has_to_be_accepted(project, sent, capsys, monkeypatch):  # noqa: F811
    assert cli.main(["submit", "--run", "first"]) == 0
    plane = {**node_plane.node_plane(), f"{node_plane.FOLDER}/new.py": b"1"}
    monkeypatch.setattr(node_plane, "node_plane", lambda: plane)
    said = reproduce(capsys, "first", code=64).err
    assert said.startswith("error: this version's launcher differs from the one that first sent\n")
    assert len(sent) == 1
    reproduce(capsys, "first", "--new-launcher")
    assert sent[1].bundle.hash != sent[0].bundle.hash
    files = [[one for one in plan.bundle.entries if one.content is None] for plan in sent]
    assert files[0] == files[1]


def test_files_that_would_not_be_bundled_again(project, sent, capsys, monkeypatch):  # noqa: F811
    assert cli.main(["submit", "--run", "first"]) == 0
    real = bundle.unpack

    def unpack(archive, target):
        real(archive, target)
        (target / "train.py").chmod(0o755)
        (target / "train.py").write_text("longer than before, and other")

    monkeypatch.setattr(bundle, "unpack", unpack)
    said = reproduce(capsys, "first", "--new-launcher", code=66).err
    assert said.startswith("error: the files of first can no longer be bundled")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("env", {"A": 1}, "first in env"),
        ("resources", {"time_limit": "1m"}, "first in resources"),
    ],
)
def test_a_job_that_would_differ_is_refused(project, sent, capsys, key, value, told):  # noqa: F811
    """As where its record was written by hand, or decodes to something else today."""
    assert cli.main(["submit", "--run", "first"]) == 0
    path = paths.run_folder("first") / backend.JOB
    job = json.loads(path.read_text())
    job[key] = {**job[key], **value} if key == "resources" else value
    path.write_text(json.dumps(job))
    assert told in reproduce(capsys, "first", code=64).err
