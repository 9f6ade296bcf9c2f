"""The wheel: it contains what ships, and works without a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built once."""
    folder = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(argv, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_contains_what_ships(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    kinds = (("templates", "*.j2"), ("templates", "*.sh"), ("templates", "*.py"))
    shipped = (*kinds, ("entrypoints", "*.py"))
    for folder, pattern in shipped:
        for path in (ROOT / folder).rglob(pattern):
            assert f"deploykit/{path.relative_to(ROOT).as_posix()}" in inside
    rules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "deploykit").rglob("*.toml")]
    assert len(rules) > 20
    assert set(rules) <= inside
    assert any(name.endswith(".data/data/share/man/man1/deploykit.1") for name in inside)
    assert {
        "deploykit/cli/main.py",
        "deploykit/py.typed",
        "deploykit/entrypoints/call.py",
    } <= inside
    assert not any(name.startswith(("tests/", "infra/", "entrypoints/")) for name in inside)


def test_a_wheel_works_without_a_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(
        "name: x\nentrypoint: {script: train.py}\nresources: {time_limit: 1m}\n"
    )
    main = (
        "import deploykit.cli.main as c; assert 'site/' in c.__file__; raise SystemExit(c.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", main, "submit", "--backend", "slurm", "--dry-run"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path / "home"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun --nnodes=1" in done.stdout
