"""What doctor reports about a login node: whether a submit over ssh would get through there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.backends.slurm import ssh
from deploykit.backends.slurm.options import Options
from deploykit.job.model import JobSpec
from deploykit.lib.errors import BackendUnavailable
from deploykit.lib.finding import Finding, Fix

_PROGRAMS = ("sbatch", "squeue", "scontrol", "flock", "gzip", "tar", "sha256sum")
"""Those that a submit and the queries after it run there."""
_OLDEST = (3, 10)
"""Python of the node plane."""
_VERSION = "import sys; print(*sys.version_info[:2])"


@dataclass(frozen=True)
class LoginNode:
    """Facts of a login node, and of the folder for runs there."""

    host: str
    name: str
    """Its own host name."""
    folder: str
    """The folder for runs, without links."""
    writable: str
    """The folder, or the first one above that exists, if this user can write there; else empty."""
    mounts: str
    """Its /proc/self/mounts."""
    missing: tuple[str, ...]
    """Programs that are not on PATH."""
    python: str
    """``3 11``; empty where the job's Python cannot be run there."""


def inspect(options: Options) -> LoginNode:
    """Query the login node in one call; changes nothing there.

    Raises BackendUnavailable where it cannot be reached or does not answer as expected.
    """
    host, folder, python = options.host or "", shlex.quote(options.folder or ""), _python(options)
    script = (
        f"uname -n; readlink -m {folder}; d={folder}; "
        'while [ ! -e "$d" ]; do d=$(dirname "$d"); done; [ ! -w "$d" ] || printf %s "$d"; echo; '
        f'for p in {" ".join(_PROGRAMS)}; do command -v $p >/dev/null || printf "%s " $p; done; '
        f"echo; {python} -c {shlex.quote(_VERSION)} 2>/dev/null || echo; cat /proc/self/mounts"
    )
    code, out, err = ssh.run(host, script)
    lines = out.decode(errors="replace").split("\n", 5)
    if code or len(lines) < 6:  # noqa: PLR2004 - the lines of the script
        raise BackendUnavailable(f"{host}: {err.strip() or 'it printed no facts'}")
    name, real, writable, missing, version, mounts = lines
    return LoginNode(host, name, real, writable, mounts, tuple(missing.split()), version.strip())


def _python(options: Options) -> str:
    """The job's Python as a word of sh, with the home folder of the login node."""
    python = options.python or "python3"
    return f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)


def findings(node: LoginNode, job: JobSpec, options: Options) -> Iterator[Finding]:
    """What would stop a submit there. Pure."""
    if node.missing:
        yield Finding(
            "login_node_programs",
            "error",
            f"{node.host} lacks programs that a submit runs there",
            (f"not on PATH: {', '.join(node.missing)}",),
            Fix("choose another login node as slurm.host, or load them in its shell's start-up"),
        )
    if not node.writable:
        yield Finding(
            "login_node_folder",
            "error",
            f"you cannot write to the folder for runs on {node.host}",
            (f"{options.folder} is {node.folder}",),
            Fix("choose another", settings={"slurm.folder": "/a/shared/folder/of/yours"}),
        )
    if not (job.environment or options.container or options.setup or options.modules):
        yield from _python_findings(node, options)


def _python_findings(node: LoginNode, options: Options) -> Iterator[Finding]:
    """About the job's Python, where nothing else provides it on the nodes."""
    version = tuple(int(part) for part in node.python.split() if part.isdecimal())
    if version >= _OLDEST:
        return
    python = options.python or "python3"
    state = f"is Python {'.'.join(map(str, version))}" if version else "cannot be run"
    yield Finding(
        "login_node_python",
        "warning",
        f"{python} {state} on {node.host}; the nodes need Python 3.10 or later with PyTorch",
        (f"{python}: {node.python or 'no answer'}",),
        Fix("set the environment of the job", settings={"slurm.python": "/shared/venv/bin/python"}),
    )
