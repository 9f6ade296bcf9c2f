"""A stand-in for conda, which no registry of Python packages has.

It prints for ``conda shell.posix hook`` a function that activates as conda's own: prefix, name,
PATH, and the scripts in ``etc/conda/activate.d``. conda 26 from its source was tried by hand.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_PROGRAM = """\
#!/bin/sh
[ "$1 $2" = "shell.posix hook" ] || exit 2
echo "_conda_root='{root}'"
cat << 'HOOK'
conda() {{
    [ "$1" = activate ] || return 2
    case $2 in
        */*) prefix=$2 ;;
        *) prefix=$_conda_root/envs/$2 ;;
    esac
    if ! [ -d "$prefix/conda-meta" ]; then
        echo "EnvironmentNameNotFound: Could not find conda environment: $2" >&2
        return 1
    fi
    export CONDA_PREFIX="$prefix" CONDA_DEFAULT_ENV="$2" PATH="$prefix/bin:$PATH"
    for script in "$prefix"/etc/conda/activate.d/*.sh; do
        if [ -f "$script" ]; then . "$script"; fi
    done
}}
HOOK
"""


def a_python(folder, *, with_torch=False):
    """A Python in the folder, as in a venv; `with_torch` with the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if with_torch:
        packages = Path(importlib.util.find_spec("torch").origin).parents[1]
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "packages.pth").write_text(f"{packages}\n")
    return folder


def install(root, *, with_torch=False):
    """Write the stand-in and its environment `train` to the folder `root`."""
    for folder in (root / "bin", root / "conda-meta", root / "envs"):
        folder.mkdir(parents=True)
    (root / "bin/conda").write_text(_PROGRAM.format(root=root))
    (root / "bin/conda").chmod(0o755)
    train = a_python(root / "envs/train", with_torch=with_torch)
    (train / "conda-meta").mkdir()
    (train / "etc/conda/activate.d").mkdir(parents=True)
    (train / "etc/conda/activate.d/cuda.sh").write_text("export FROM_ACTIVATE_D=yes\n")
    return root
