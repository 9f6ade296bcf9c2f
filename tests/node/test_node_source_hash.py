"""launch.py hashes the unpacked source, and starts nothing if it is not the planned one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deploykit.bundle import archive as bundles
from deploykit.bundle import node_plane
from deploykit.lib import paths

LIMIT = 10**7
SAYS = "import os; print('ran', 'DEPLOYKIT_BUNDLE' in os.environ)\n"


@pytest.fixture
def unpacked(bundle, tmp_path):
    """A source that was bundled, stored and unpacked where `bundle` starts its launch.py."""
    source = tmp_path / "mine"
    (source / "data").mkdir(parents=True)
    (source / "train.py").write_text(SAYS)
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "data/current").symlink_to("../train.py")
    packed = bundles.scan(source, LIMIT)
    bundles.unpack(bundles.store(packed), bundle.source)
    bundle.planned = packed.hash
    return bundle


@pytest.fixture
def start(unpacked, as_rank, tmp_path):
    """Start a rank as SageMaker's launcher would; containers have folders for notes."""

    def run(container="one", **changes):
        notes = tmp_path / f"tmp of {container}"
        notes.mkdir(exist_ok=True)
        given = {**as_rank, "DEPLOYKIT_BUNDLE": unpacked.planned, "TMPDIR": notes, **changes}
        return unpacked.run("--", "train.py", **given)

    return run


def test_a_source_as_planned_is_started(start):
    done = start()
    assert (done.code, done.said["rank 3"]) == (0, ["ran False"]), done.log


def rewrite(path, text):
    path.unlink()
    path.write_text(text)


def hide_train(source):
    """Another program, removed from the list so that it is not compared."""
    (source / "train.py").write_text("print('evil')\n")
    listing = source / node_plane.FILES
    listed = json.loads(listing.read_text())
    del listed["train.py"]
    listing.write_text(json.dumps(listed, sort_keys=True))


TAMPERED = {
    "content": (lambda s: (s / "train.py").write_text(SAYS.replace("ran", "bad")), "SHA-256 is"),
    "mode": (lambda s: (s / "run.sh").chmod(0o644), "): 'run.sh'. The"),
    "absent": (lambda s: (s / "run.sh").unlink(), "): 'run.sh'. The"),
    "link": (lambda s: rewrite(s / "data/current", SAYS), "): 'data/current'. The"),
    "launcher": (
        lambda s: (s / ".deploykit/deploykit_node/supervisor.py").write_text("def run(*_): pass"),
        "): '.deploykit/deploykit_node/supervisor.py'. The",
    ),
    "off the list": (hide_train, "SHA-256 is"),
    "no list": (lambda s: (s / node_plane.FILES).unlink(), "files.json cannot be used"),
}


@pytest.mark.parametrize(("tamper", "says"), TAMPERED.values(), ids=TAMPERED)
def test_another_source_is_not_started(unpacked, start, tamper, says):
    tamper(unpacked.source)
    done = start()
    assert done.code == 78, done.log
    assert "is not the one that was submitted" in done.log
    assert says in done.log
    assert "Traceback" not in done.log
    assert "ran" not in done.said.get("rank 3", [])


def test_no_secret_is_looked_up_for_another_source(unpacked, start):
    (unpacked.source / "train.py").write_text("print('evil')")
    done = start(DEPLOYKIT_SECRETS=json.dumps({"TOKEN": "secret:env:NOT_THERE"}))
    assert done.code == 78
    assert "NOT_THERE" not in done.log


def test_what_came_later_does_not_count(unpacked, start):
    """Caches of Python, and what an installation leaves, are in no bundle."""
    (unpacked.source / "mine.egg-info").mkdir()
    (unpacked.source / "mine.egg-info/PKG-INFO").write_text("x")
    (unpacked.source / "snapshot.pt").write_bytes(bytes(10**6))
    assert start().code == 0


def test_a_program_may_change_its_own_folder_before_the_last_rank_starts(unpacked, start):
    (unpacked.source / "run.sh").write_text("changed")
    assert start(container="new").code == 78
    (unpacked.source / "run.sh").write_text("#!/bin/sh\n")
    assert start(RANK=0, LOCAL_RANK=0).code == 0
    (unpacked.source / "run.sh").write_text("changed by rank 0")
    assert start(RANK=1, LOCAL_RANK=1).code == 0
    assert start(container="new").code == 78
    assert start(DEPLOYKIT_RUN="another").code == 78


ODD = {
    "ü ' \n.txt": "1",
    "a" * 120 + "/" + "b" * 200: "long",
    "back\\slash": "2",
    "empty": "",
    "deep/er/é/x.py": "3",
}
DIGEST = """\
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from deploykit_node import source_hash
folder = Path(sys.argv[2])
names = sorted(json.loads((folder / ".deploykit/files.json").read_text()))
print(source_hash.digest(folder, [*names, ".deploykit/files.json"])[0])
"""


def check_digest(tmp_path, python):
    source, names = tmp_path / "odd", dict(ODD)
    names[os.fsdecode(b"not utf-8 \xff")] = "4"
    for name, content in names.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (source / "link").symlink_to("deep/er/é")
    packed = bundles.scan(source, LIMIT)
    bundles.unpack(bundles.store(packed), tmp_path / "out")
    argv = [python, "-c", DIGEST, str(paths.shipped("entrypoints")), str(tmp_path / "out")]
    done = subprocess.run(argv, env={"LC_ALL": "C"}, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (packed.hash, "")


def test_both_planes_hash_any_tree_alike(tmp_path):
    check_digest(tmp_path, sys.executable)


def test_both_planes_hash_any_tree_alike_on_the_oldest_python(tmp_path, old_python):
    check_digest(tmp_path, old_python)
