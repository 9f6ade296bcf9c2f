"""Only a few failed tests run again, and a test that fails twice fails the CI."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("unsteady.py")


def again(folder, names, test="def test_it(): pass"):
    """The exit code and output of the program in a folder where `names` failed."""
    for name in names:
        (folder / name.partition("::")[0]).write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    path = folder / ".pytest_cache/v/cache/lastfailed"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(dict.fromkeys(names, True)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, PROGRAM], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_passes_now_is_named(tmp_path):
    code, out = again(tmp_path, ["test_some.py::test_it@slurm-ssh"])
    assert code == 0
    assert "Unsteady, passed at the second attempt:\n  test_some.py::test_it\n" in out


def test_a_test_that_fails_twice_fails(tmp_path):
    code, out = again(tmp_path, ["test_some.py::test_it"], "def test_it(): assert 0")
    assert code == 1
    assert "Unsteady" not in out


def test_all_tests_of_a_file_run_again(tmp_path):
    names = [f"test_some.py::test_it[{number}]@slurm" for number in range(5)]
    test = "import pytest\n@pytest.mark.parametrize('number', range(5))\ndef test_it(number): pass"
    code, out = again(tmp_path, names, test)
    assert code == 0
    assert "5 passed" in out


@pytest.mark.parametrize("count", [0, 4])
def test_none_or_many_do_not_run_again(tmp_path, count):
    code, out = again(tmp_path, [f"test_{number}.py::test_it" for number in range(count)])
    assert code == 1
    assert f"{count} tests failed in {count} files; those of 1 to 3 are run again" in out


def test_a_test_that_is_gone_fails(tmp_path):
    code, _ = again(tmp_path, ["test_some.py::test_other"])
    assert code != 0
