"""The command line: find the verb, run it, turn what it raises into a message and an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import importlib
import os
import sys
import time
from typing import Any, NoReturn

from deploykit import __version__
from deploykit.errors import CannotWrite, DeploykitError, OutputLost, UsageError

VERBS = {
    "init": "write a commented job file to start from",
    "infra": "write what must exist on AWS before a job can run, from a few answers",
    "advise": "which parallel strategy to train with, what each needs, and why",
    "check": "find every problem of a job file, offline",
    "doctor": "look at the place where a job will run, and say what is in its way",
    "submit": "run a job on a backend, or show exactly what would be sent",
    "status": "what a run is doing, and why",
    "attach": "take up a job that was sent from another machine",
    "list": "all runs",
    "logs": "what the ranks print, merged",
    "wait": "wait for a run and end with its exit code",
    "diagnose": "why a run failed, from its logs",
    "cancel": "stop a run",
    "backends": "where jobs can run from here",
    "completion": "tab completion for your shell",
}
_COLLECT = 50_000
"""New objects between two garbage collections: imports make many, and none of them garbage."""
_UNWRITTEN = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS}
_INTERRUPTED = 130
_PIPE_CLOSED = 141
_USAGE = UsageError.exit_code


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code (docs/reference/exit-codes.md)."""
    gc.set_threshold(_COLLECT)
    atexit.register(gc.freeze)  # no last collection either
    _open_closed_streams()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return _PIPE_CLOSED
    except (OSError, OutputLost) as error:
        _drop_output()
        return _say_lost(error)


def _run(argv: list[str]) -> int:
    as_json = "--json" in argv
    try:
        _known(argv[:1])
        args = parser(argv[:1]).parse_args(argv)
        return int(_module(args.verb).run(args))
    except (BrokenPipeError, OutputLost):
        raise
    except DeploykitError as error:
        _report(error, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the boundary: no traceback reaches the user
        told = _unwritten(error) or _unexpected(error, argv)
        _report(told, as_json=as_json)
        return told.exit_code


def parser(chosen: list[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the verbs in `chosen` only: the others stay unimported."""
    top = _Parser(
        prog="deploykit",
        description="Run one PyTorch trainer, unchanged, on this machine, Slurm or SageMaker.",
        epilog="Start with `deploykit init`, then `deploykit submit --backend local --wait`.",
    )
    top.add_argument("--version", action="version", version=f"deploykit {__version__}")
    top.set_defaults(whole=lambda: parser(list(VERBS)))  # for `completion`
    verbs = top.add_subparsers(dest="verb", metavar="VERB [OPTIONS]", required=True, title="verbs")
    for name, text in VERBS.items():
        if name not in chosen:
            verbs.add_parser(name, help=text, add_help=False)
            continue
        module = _module(name)
        sub = verbs.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        if name != "completion":
            sub.add_argument("--json", action="store_true", help="print JSON, for programs")
    return top


def _known(chosen: list[str]) -> None:
    """Refuse a verb that does not exist, with the one that was probably meant."""
    for verb in chosen:
        if verb not in VERBS and not verb.startswith("-"):
            from deploykit.decode import did_you_mean

            hint = did_you_mean(verb, VERBS) or "`deploykit --help` lists them"
            raise UsageError(f"there is no verb {verb!r}", hint=hint)


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong command line ends like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def _open_closed_streams() -> None:
    """Put /dev/null in place of closed streams, before an opened file takes the number of one."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w"))


def _drop_output() -> None:
    """What is left in the buffers goes nowhere: the interpreter would complain at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


def _say_lost(error: Exception) -> int:
    reason = error.strerror if isinstance(error, OSError) else error
    with contextlib.suppress(OSError, OutputLost):  # standard error may be lost too
        _report(OutputLost(f"cannot write the output: {reason}"), as_json=False)
    return OutputLost.exit_code


def _module(verb: str) -> Any:
    return importlib.import_module(f"deploykit.commands.{verb}")


def _report(error: DeploykitError, *, as_json: bool) -> None:
    from deploykit.commands import output

    output.error(error, as_json=as_json)


def _unwritten(error: Exception) -> DeploykitError | None:
    """What it means where a disk is full, or closed to the user; None: it is something else."""
    if not isinstance(error, OSError) or error.errno not in _UNWRITTEN:
        return None
    from deploykit import paths

    return CannotWrite(
        f"{error.filename or f'a file in {paths.state()}'} cannot be written: {error.strerror}",
        hint=f"free some space there, or {paths.HINT}",
    )


def _unexpected(error: Exception, argv: list[str]) -> DeploykitError:
    """An error nobody foresaw, with its traceback in a log file that the message names."""
    import platform
    import traceback

    from deploykit import paths

    log = paths.state() / "crashes" / f"{time.strftime('%Y%m%d-%H%M%S')}.log"
    told = f"deploykit met an error that it does not know: {type(error).__name__}: {error}"
    text = f"deploykit {__version__}, Python {platform.python_version()}, {sys.platform}\n"
    text += f"verb: {' '.join(argv[:1])}\n\n{traceback.format_exc()}"
    try:
        paths.private_folder(log.parent)
        paths.write(log, text)
    except (OSError, CannotWrite):
        return DeploykitError(told, hint=f"{log.parent} cannot be written, so there is no log")
    return DeploykitError(told, hint=f"the details are in {log}; please report them")


if __name__ == "__main__":
    sys.exit(main())
