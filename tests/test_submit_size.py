"""What `submit` says of how much travels, and the bar while it packs and sends."""

from __future__ import annotations

import os
import re

import pytest

from deploykit.bundle import archive as bundle
from deploykit.cli import main as cli
from deploykit.lib import progress, shell
from tests.cli.test_terminal import on_terminal

LIMIT = 1 << 30
RUN = ["submit", "--backend", "print", "--run", "one"]


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    """The backend of the examples, which starts nothing."""
    site = tmp_path / "site"
    info = site / "paper-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deploykit.backends]\nprint = backend_print\n")
    examples = os.path.join(os.path.dirname(__file__), "..", "examples")  # noqa: PTH118, PTH120
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(examples)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{examples}")


@pytest.fixture
def large(project):
    """A source of more than 10 MB, most of it in two of its files."""
    (project / "data").mkdir()
    (project / "data/train.bin").write_bytes(bytes(9_000_000))
    (project / "demo.mp4").write_bytes(bytes(1_500_000))
    return project


def test_a_submit_says_how_much_travels(project, capsys):
    size = sum(path.stat().st_size for path in project.iterdir())
    assert cli.main(RUN) == 0
    shown = capsys.readouterr()
    assert f"source: 2 files, {size} B\n" in shown.err
    assert "source" not in shown.out


def test_a_large_source_is_explained_before_it_is_sent(large, capsys):
    assert cli.main([*RUN, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "train.py --epochs 5\n"
    assert "source: 4 files, 10.5 MB" in shown.err
    assert "largest: data/train.bin (9.0 MB), demo.mp4 (1.5 MB)\n" in shown.err
    assert ".deploykitignore" in shown.err
    (large / ".deploykitignore").write_text("/data/\n")
    assert cli.main([*RUN, "--dry-run"]) == 0
    assert "source" not in capsys.readouterr().err


def test_json_is_the_same_for_a_large_source(large, capsys):
    assert cli.main([*RUN, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_packing_is_reported_up_to_the_last_byte(large, monkeypatch):
    told = []
    packed = bundle.scan(large, LIMIT)
    with progress.shown_by(lambda *step: told.append(step)):
        bundle.store(packed)
    assert {(what, total) for what, _, total in told} == {("packing", packed.size)}
    done = [step[1] for step in told]
    assert done == sorted(done)
    assert done[-1] == packed.size
    assert len(done) > 10  # a large file in pieces
    assert progress.show is None


def test_what_goes_through_ssh_is_reported():
    """ssh gets it as standard input, as any program does."""
    told, data = [], os.urandom(3_000_000)
    with progress.shown_by(lambda *step: told.append(step)):
        assert shell.raw(["cat"], data=data)[1] == data
    assert told[-1] == ("sending", len(data), len(data))
    assert len(told) > 10


def test_a_terminal_shows_a_bar_and_a_pipe_none(large, capsys, monkeypatch):
    cli.main(RUN)
    assert "packing" not in "".join(capsys.readouterr())
    (large / "new").write_text("another bundle")
    monkeypatch.setenv("COLUMNS", "100")
    code, shown = on_terminal("submit", "--backend", "local", "--run", "two")
    cli.main(["cancel", "two"])
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"packing .*11\.\d/11\.\d MB", plain)
    assert "two: " in plain.rpartition("packing")[2]


def test_a_small_source_has_no_bar(project):
    shown = on_terminal("submit", "--backend", "local", "--run", "two")[1]
    cli.main(["cancel", "two"])
    assert "packing" not in shown
