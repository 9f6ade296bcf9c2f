"""Known vulnerabilities of what the Makefile installs, by pip-audit over constraints.txt.

Ends with 0 when there are none, 1 with each that there is, and 69 where the database of
vulnerabilities (https://osv.dev) cannot be asked: nothing was checked then, and nothing is green.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".venv-audit/bin/pip-audit"
ARGUMENTS = ["--vulnerability-service=osv", "--no-deps", "--disable-pip", "--format=json"]
UNAVAILABLE = 69


def audit(program: Path, pinned: Path) -> tuple[int, str]:
    """Exit code, and what to say."""
    argv = [program, *ARGUMENTS, "--progress-spinner=off", "--requirement", pinned]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
        packages = json.loads(done.stdout)["dependencies"]
    except FileNotFoundError:
        missing = f"{program} is not installed, so no package was checked"
        return UNAVAILABLE, f"{missing}: make .venv-audit/.ready"
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        packages = []
    if not packages:
        return UNAVAILABLE, (
            "the database of vulnerabilities, https://osv.dev, cannot be asked from this machine, "
            "so no package was checked; try again where it can be"
        )
    lines = [line for package in packages for line in _lines(package)]
    known = sum(len(package.get("vulns", ())) for package in packages)
    checked = sum("vulns" in package for package in packages)
    summary = f"{checked} packages checked, {known} known vulnerabilities"
    return int(bool(lines)), "\n".join([*lines, summary])


def _lines(package: Mapping[str, Any]) -> Iterator[str]:
    for one in package.get("vulns", ()):
        fixed = ", ".join(one["fix_versions"]) or "no version yet"
        yield f"{package['name']} {package['version']}: {one['id']}, mended in {fixed}"
    if "skip_reason" in package:
        yield f"{package['name']}: was not checked: {package['skip_reason']}"


if __name__ == "__main__":
    code, said = audit(PROGRAM, ROOT / "constraints.txt")
    print(said)
    sys.exit(code)
