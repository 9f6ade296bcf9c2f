"""Run a few failed tests once more, one at a time, and name those that pass now as unsteady.

The CI calls it after a suite that failed. A test over a real cluster or real processes can fail
because the machine stood still at the wrong moment; one such test should not hold back a change.
It is a defect all the same: the names are printed for the next person to mend. Failures in more
files than `MOST`, or a suite that did not run to its end, fail at once.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

MOST = 3
"""Files with failures that are run again; more of them have another cause than chance.

The tests of a file that share a cluster fail together, where it did not come up.
"""
FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""Where pytest keeps the names of the tests that failed."""


def failed_tests(path=FAILED):
    """The tests that failed in the last run, as pytest names them.

    Raises SystemExit if there are none to run again, or too many.
    """
    names = sorted(json.loads(path.read_text())) if path.exists() else []
    names = [re.sub(r"@[\w-]+$", "", name) for name in names]  # the group that xdist adds
    files = {name.partition("::")[0] for name in names}
    if not names or len(files) > MOST:
        where = f"in {len(files)} files; those of 1 to {MOST} are run again"
        raise SystemExit(f"{len(names)} tests failed {where}")
    path.unlink()  # a test that passes now would stay in it under its other name
    return names


def main():
    names = failed_tests()
    print("These tests failed and run once more, one at a time:", *names, sep="\n  ", flush=True)
    argv = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", *names]
    code = subprocess.run(argv, check=False).returncode
    if code == 0:
        print("Unsteady, passed at the second attempt:", *names, sep="\n  ")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
