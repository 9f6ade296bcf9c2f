"""Run a program and read what it says. The only module that does, but for starting local jobs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit.errors import BackendUnavailable


@dataclass(frozen=True)
class Result:
    """How a program ended and what it printed."""

    code: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> Result:
    """Run `argv` to its end, whatever its exit code; `timeout` in seconds.

    Raises BackendUnavailable when the program is missing or does not answer in time.
    """
    code, out, err = raw(argv, cwd=cwd, env=env, timeout=timeout)
    return Result(code, out.decode(errors="replace"), err)


def raw(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    data: bytes | None = None,
) -> tuple[int, bytes, str]:
    """The same with its output as it is, and `data` as its standard input."""
    import subprocess  # a dry run has no use for it

    if shutil.which(argv[0], path=env.get("PATH") if env else None) is None:
        raise BackendUnavailable(
            f"the program {argv[0]!r} is not on PATH", hint=f"install {argv[0]} or fix PATH"
        )
    try:
        done = subprocess.run(
            list(argv),
            cwd=cwd,
            env=env,
            timeout=timeout,
            input=data,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(
            f"{argv[0]} gave no answer within {timeout:g} s", hint="try again later"
        ) from error
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")
