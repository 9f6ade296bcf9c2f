"""shellcheck over every shell script: those in the repository and those that plans render.

python tests/shell_lint.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from deploykit.run import lifecycle

ROOT = Path(__file__).parent.parent
VARIANTS = [
    [],
    ["resources.nodes=3", "resources.cpus_per_node=4", "resources.memory=2GiB"],
    ["resources.gpus_per_node=2", "retries=2", "slurm.partition=gpu", "slurm.gres_style=gres"],
    ["entrypoint.args=[-v, '', \"it's\", '$(x)', '`y`', '{{ z }}', ü]", "env.A=$HOME `id` \\ '"],
    ["env.TOKEN=secret:file:~/token", "data.train=FOLDER"],
    ["environment={conda: train, modules: [conda]}", "outputs=[a b, '*.pt']"],
]


def main() -> int:
    """Lint all; the exit code is shellcheck's."""
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        rendered = [
            _render(Path(folder), backend, number)
            for backend in ("local", "slurm")
            for number in range(len(VARIANTS))
        ]
        globs = ("templates/**/*.sh", "tests/**/*.sh", "infra/**/*.sh")
        scripts = [ROOT / ".ci/run", *(path for glob in globs for path in ROOT.glob(glob))]
        return subprocess.run(["shellcheck", *scripts, *rendered], check=False).returncode


def _render(folder: Path, backend: str, number: int) -> Path:
    overrides = [text.replace("FOLDER", str(folder)) for text in VARIANTS[number]]
    prepared = lifecycle.prepare(ROOT / "job.yaml", overrides, backend, "a-run")
    path = folder / f"{backend}-{number}.sh"
    path.write_text(prepared.plan.text)
    return path


if __name__ == "__main__":
    sys.exit(main())
