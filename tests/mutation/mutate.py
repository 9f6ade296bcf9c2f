"""Mutation tests of the central modules: errors that the tests would not notice.

    make mutation                 # all five, an hour or two
    python tests/mutation/mutate.py decode

Each module is changed in one place at a time, in a copy of the checkout, and its tests run; a
change that no test notices has survived, and is printed. Mutants of ``X | None`` are left out: an
annotation is never evaluated. https://cosmic-ray.readthedocs.io
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv-mutation" / "bin"
MODULES = {
    "decode": ("deploykit/decode.py", "tests/test_decode.py tests/test_jobfile.py"),
    "states": ("deploykit/backends/slurm/states.py", "tests/slurm/test_slurm_states.py"),
    "request": (
        "deploykit/backends/sagemaker/request.py",
        "tests/sagemaker/test_sagemaker_request.py tests/sagemaker/test_sagemaker_sdk.py",
    ),
    "ranking": (
        "deploykit/diagnosis/ranking.py",
        "tests/test_diagnosis.py tests/test_diagnosis_corpus.py",
    ),
    "checkpoint": ("entrypoints/trainer/checkpoint.py", "tests/trainer/test_checkpoint.py"),
}
CONFIG = """\
[cosmic-ray]
module-path = "{module}"
timeout = 300.0
test-command = "{python} -m pytest -x -q -n0 -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]
"""


def mutate(name: str, copy: Path) -> None:
    """Print how many mutants of one module survived, and what each of them changed."""
    module, tests = MODULES[name]
    config, session = copy.parent / f"{name}.toml", copy.parent / f"{name}.sqlite"
    config.write_text(CONFIG.format(module=module, tests=tests, python=sys.executable))
    tool(copy, "cosmic-ray", "init", config, session)
    tool(copy, "cr-filter-operators", session, config)
    tool(copy, "cosmic-ray", "exec", config, session)
    report = tool(copy, "cr-report", "--surviving-only", "--show-diff", session)
    changes = [line for line in report.splitlines() if line[:2] in {"@@", "- ", "+ "}]
    print(f"== {module}", *changes, *report.splitlines()[-3:], sep="\n", flush=True)


def tool(copy: Path, program: str, *words: object) -> str:
    """What a program of Cosmic Ray prints, with the copy in front of the installed package."""
    done = subprocess.run(
        [TOOLS / program, *map(str, words)],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "brief"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="*", choices=[*MODULES, []], default=list(MODULES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = Path(scratch) / "checkout"
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for path in filter(None, listed.split("\0")):
            target = copy / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target, follow_symlinks=False)
        for name in args.module:
            mutate(name, copy)


if __name__ == "__main__":
    main()
