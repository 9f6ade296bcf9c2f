"""Mutation tests of the central modules: errors that the tests would not notice.

    make mutation                                # all five
    python -m tests.mutation.mutate decode       # one of them
    python -m tests.mutation.mutate --sample 60 checkpoint

Each module is changed in one place at a time, in a copy of the checkout, and its tests run: the
quick ones, and where these notice nothing, the slow ones. A change that no test notices has
survived, and is printed. Mutants of ``X | None`` are left out: an annotation is never evaluated.
https://cosmic-ray.readthedocs.io
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv-mutation" / "bin"


class Module(NamedTuple):
    path: str
    quick: str
    slow: str = ""


MODULES = {
    "decode": Module(
        "deploykit/job/decode.py", "tests/job/test_decode.py", "tests/job/test_jobfile.py"
    ),
    "states": Module(
        "deploykit/backends/slurm/states.py", "tests/backends/slurm/test_slurm_states.py"
    ),
    "request": Module(
        "deploykit/backends/sagemaker/request.py",
        "tests/backends/sagemaker/test_sagemaker_request_settings.py"
        " tests/backends/sagemaker/test_sagemaker_request.py",
        "tests/backends/sagemaker/test_sagemaker_sdk.py",
    ),
    "ranking": Module(
        "deploykit/diagnose/ranking.py",
        "tests/diagnose/test_diagnosis_ranking.py",
        "tests/diagnose/test_diagnosis.py tests/diagnose/test_diagnosis_corpus.py",
    ),
    "checkpoint": Module(
        "entrypoints/trainer/checkpoint.py",
        "tests/trainer/test_checkpoint.py -k 'not kill and not nodes_do_not_share'",
        "tests/trainer/test_checkpoint.py -k 'kill or nodes_do_not_share'",
    ),
}
CONFIG = """\
[cosmic-ray]
module-path = "{module}"
timeout = {seconds}
test-command = "{python} -IS {warm} {socket}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]
"""
SECONDS = 120
"""After which a mutant counts as noticed: it does not end."""


class Score(NamedTuple):
    module: str
    mutants: int
    tried: int
    survived: int

    def __str__(self) -> str:
        killed = self.tried - self.survived
        share = f"{killed / self.tried:.0%}" if self.tried else "-"
        return (
            f"{self.module:<12}{self.mutants:>8}{self.tried:>8}{killed:>8}"
            f"{self.survived:>10}{share:>8}"
        )


HEAD = f"{'module':<12}{'mutants':>8}{'tried':>8}{'killed':>8}{'survived':>10}{'score':>8}"


def mutate(name: str, copy: Path, args: argparse.Namespace) -> Score:
    """Try the mutants of one module, and print those that survived."""
    module = MODULES[name]
    session = copy.parent / f"{name}.sqlite"
    config = _config(copy, name, "quick")
    _tool(copy, "cosmic-ray", "init", config, session)
    _tool(copy, "cr-filter-operators", session, config)
    mutants = _choose(session, args.sample, random.Random(args.seed))
    for stage, tests in (("quick", module.quick), ("slow", "" if args.quick else module.slow)):
        if tests:
            _forget_survivors(session)
            with _warm(copy, f"{name}-{stage}", tests):
                _tool(copy, "cosmic-ray", "exec", _config(copy, name, stage), session)
    outcomes = _query(session, "SELECT test_outcome, diff FROM work_results WHERE diff NOT NULL")
    survivors = sorted((diff for outcome, diff in outcomes if outcome == "SURVIVED"), key=_line)
    print(f"== {module.path}", *map(_changes, survivors), sep="\n", flush=True)
    return Score(name, mutants, len(outcomes), len(survivors))


def _config(copy: Path, name: str, stage: str) -> Path:
    path = copy.parent / f"{name}-{stage}.toml"
    text = CONFIG.format(
        module=MODULES[name].path,
        seconds=2.0 * SECONDS,
        python=sys.executable,
        warm=copy / "tests/mutation/warm.py",
        socket=copy.parent / f"{name}-{stage}",
    )
    path.write_text(text)
    return path


def _choose(session: Path, sample: int, choice: random.Random) -> int:
    """How many mutants there are. Of these `sample` are left, or all if it is 0."""
    ids = [
        job
        for (job,) in _query(
            session,
            "SELECT job_id FROM mutation_specs"
            " WHERE job_id NOT IN (SELECT job_id FROM work_results)"
            " ORDER BY start_pos_row, start_pos_col, operator_name, operator_args, occurrence",
        )
    ]
    dropped = choice.sample(ids, len(ids) - sample) if 0 < sample < len(ids) else []
    for job in dropped:
        _query(session, "DELETE FROM mutation_specs WHERE job_id = ?", job)
        _query(session, "DELETE FROM work_items WHERE job_id = ?", job)
    return len(ids)


def _forget_survivors(session: Path) -> None:
    """So that they are tried again."""
    _query(session, "DELETE FROM work_results WHERE test_outcome = 'SURVIVED'")


def _query(session: Path, statement: str, *values: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(session)) as database, database:
        return database.execute(statement, values).fetchall()


def _line(diff: str) -> int:
    """The line at which a diff begins."""
    return int(diff.partition("@@ -")[2].partition(",")[0])


def _changes(diff: str) -> str:
    """The lines of a diff that say what changed, and where."""
    lines = [line for line in diff.splitlines() if line[:3] not in {"---", "+++"}]
    return "\n".join(line for line in lines if line[:1] in {"@", "-", "+"})


@contextmanager
def _warm(copy: Path, stage: str, tests: str) -> Iterator[None]:
    """Have pytest waiting with everything imported; the unchanged module must pass its tests."""
    socket = copy.parent / stage
    words = [sys.executable, "-m", "tests.mutation.warm", socket, SECONDS, *shlex.split(tests)]
    with subprocess.Popen(
        list(map(str, words)), cwd=copy, env=_environment(copy), stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            subprocess.run(
                [sys.executable, "-IS", copy / "tests/mutation/warm.py", socket],
                cwd=copy,
                check=True,
            )
            yield
        finally:
            server.terminate()


def _tool(copy: Path, program: str, *words: object) -> None:
    command = [TOOLS / program, *map(str, words)]
    subprocess.run(command, cwd=copy, env=_environment(copy), stdout=subprocess.DEVNULL, check=True)


def _environment(copy: Path) -> dict[str, str]:
    """The copy is in front of the installed package, and bytecode never outlives a mutant."""
    return {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "brief",
    }


@contextmanager
def _checkout() -> Iterator[Path]:
    """A copy of the checkout as it is now."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = Path(scratch) / "checkout"
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for path in filter(None, listed.split("\0")):
            target = copy / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target, follow_symlinks=False)
        yield copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="*", choices=[*MODULES, []], default=list(MODULES))
    parser.add_argument("--sample", type=int, default=0, help="try only so many of each module")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--quick", action="store_true", help="without the slow tests")
    args = parser.parse_args()
    with _checkout() as copy:
        scores = [mutate(name, copy, args) for name in args.module]
    print("", HEAD, *scores, sep="\n")


if __name__ == "__main__":
    main()
