"""The command line: run a verb, and turn exceptions into a message and an exit code.

Each verb is a module in this package. Its `add_arguments` declares its own arguments, and `SHARED`
names those that it shares with other verbs (arguments.py).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Collection
from typing import Any, NoReturn

from deploykit.cli import closed_pipe
from deploykit.job.spelling import did_you_mean, nearest
from deploykit.lib import paths
from deploykit.lib.errors import (
    CannotWrite,
    DeploykitError,
    NotFound,
    OutputLost,
    TryAgain,
    UsageError,
)
from deploykit.lib.terminal import has_colors
from deploykit.lib.version import __version__

GROUPS = {
    "Start": {
        "init": "write a job file, and a trainer in an empty folder",
        "check": "find every problem in a job file, offline",
        "doctor": "check the target for anything that would block the job",
        "advise": "recommend a parallel strategy, with the memory and time of each",
        "cost": "estimate what a job costs: low, likely and worst case",
        "when": "estimate when a job would start, earliest option first",
        "backends": "list the backends, and what each needs",
        "config": "show your default settings, and the source of each value",
        "infra": "generate templates for the AWS resources that jobs require",
        "completion": "print a completion script for your shell",
        "schema": "print the JSON Schema of a command's --json output",
        "mcp": "serve these commands to an agent over MCP",
    },
    "Run": {
        "submit": "run a job on a backend, or show exactly what would be sent",
        "sweep": "search for the best hyperparameters, one run per trial",
        "rerun": "submit a run's job and source again, with optional changes",
        "reproduce": "submit an exact copy of a run, byte for byte",
        "attach": "track a job submitted elsewhere",
        "wait": "wait for a run, and exit with its exit code",
        "notify": "send messages about a run, or a test message",
        "cancel": "stop runs",
        "evaluate": "evaluate a run's model on its test data, in a new run",
        "export": "package a run's model: weights, code, model card",
        "deploy": "serve a packaged model, here or behind an endpoint",
        "endpoint": "show, call, change and delete endpoints",
        "register": "add a run's model to a registry: versions, metrics, approval",
    },
    "Look": {
        "status": "show the state of runs, and the reason",
        "list": "list all runs",
        "watch": "watch runs live: state, step, time left, loss, first error",
        "logs": "print the logs of all ranks, merged",
        "fetch": "copy a run's results, checkpoints or logs to this machine",
        "metrics": "print the metrics of a run, from its files and its log",
        "profile": "show a run's costliest operators, and which ranks wait",
        "compare": "compare runs: source, job, arguments and metrics",
        "report": "write a report of one or more runs as an HTML file",
        "open": "print the pages of a run, and open them in a browser",
        "sync": "send missing metrics to the trackers of a run",
    },
    "Fix": {
        "diagnose": "find why a run failed, from its logs",
        "guide": "print a troubleshooting guide with the values of a run or a job",
        "explain": "explain a cause, a rule, a finding or an exit code, offline",
        "dump": "print the stack of every rank of a running run",
        "exec": "run a command next to a rank, in its environment",
        "shell": "open a shell next to a rank, in its environment",
        "nodes": "list the nodes that are excluded from new jobs",
    },
    "Clean up": {
        "disk": "show disk usage, by run",
        "prune": "remove old runs, and files that no run needs",
        "rm": "remove finished runs and their files on this machine",
    },
}
"""Verbs, as `--help` lists them."""
VERBS = {name: text for group in GROUPS.values() for name, text in group.items()}
_WRITE_ERRORS = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS}
_PACKAGES = ("torch", "submitit", "boto3", "sagemaker")
"""Packages that `--version` looks for, without importing them."""
_OTHER_NAMES = {
    **dict.fromkeys(("ls", "ps", "history", "runs", "jobs"), "list"),
    **dict.fromkeys(("run", "start", "launch", "up"), "submit"),
    **dict.fromkeys(("stop", "kill", "down"), "cancel"),
    **dict.fromkeys(("delete", "del", "remove"), "rm"),
    "tail": "logs --follow",
    "ssh": "shell",
}
"""Verbs of similar programs, and the command here."""
_RENDEZVOUS = "nothing; deploykit configures the rendezvous"
_OTHER_OPTIONS = {
    **dict.fromkeys(
        ("--nproc-per-node", "--nproc", "-np", "--num-processes", "--ntasks-per-node"),
        "--processes-per-node",
    ),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--num-machines"), "--nodes"),
    **dict.fromkeys(("--num-gpus", "--gpus", "--gres"), "--gpus-per-node"),
    "--max-restarts": "--set retries=N",
    **dict.fromkeys(("--standalone", "--node-rank", "--machine-rank"), _RENDEZVOUS),
    **dict.fromkeys(("--master-addr", "--master-port", "--main-process-port"), _RENDEZVOUS),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"), _RENDEZVOUS),
}
"""Options of torchrun and its like, and what to give a verb that takes a job instead."""
_RESOURCE_OPTIONS = ("--processes-per-node", "--nodes", "--gpus-per-node")
INTERRUPTED = 130
PIPE_CLOSED = 141
_USAGE = UsageError.exit_code


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code (docs/reference/exit-codes.md)."""
    _open_closed_streams()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, closed_pipe.ReaderGone):
        _drop_output()
        return PIPE_CLOSED
    except (OSError, OutputLost) as error:
        _drop_output()
        return _report_lost(error)


def _run(argv: list[str]) -> int:
    as_json = "--json" in argv
    argv = _without_help_verb(argv)
    try:
        _require_known(argv[:1])
        own, arguments = _split(argv)
        args, unknown = parser(argv[:1]).parse_known_args(list(map(_with_hyphens, own)))
        _refuse_unknown(args.own, unknown)
        args.arguments = arguments
        return int(_module(args.verb).run(args))
    except (BrokenPipeError, OutputLost):
        raise
    except DeploykitError as error:
        error = _deleted_folder(error.__cause__) or error
        _report(error, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _note(interrupt)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the boundary: no traceback reaches the user
        known = _known_error(error) or _unexpected(error, argv)
        _report(known, as_json=as_json)
        return known.exit_code


def parser(chosen: list[str]) -> argparse.ArgumentParser:
    """The parser of the verbs in `chosen`; where none is a verb, of all, without arguments."""
    known = [name for name in VERBS if name in chosen]
    top = _Parser(
        prog="deploykit",
        usage=None if known else "deploykit VERB [OPTIONS]",
        description="Run one PyTorch trainer, unchanged, on this machine, Slurm or SageMaker.",
        epilog=("" if known else f"{_overview()}\n")
        + "Start with `deploykit init`, then `deploykit submit --wait`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "print the versions of deploykit, Python and its packages"
    top.add_argument("--version", action=_Version, nargs=0, help=text)
    top.set_defaults(whole=lambda: parser(list(VERBS)))  # for `completion`
    verbs = top.add_subparsers(
        dest="verb",
        metavar="VERB [OPTIONS]",
        required=True,
        prog=top.prog,
        **({} if known else {"help": argparse.SUPPRESS}),
    )
    for name in [] if known else VERBS:
        verbs.add_parser(name, add_help=False)
    for name in known:
        module = _module(name)
        sub = verbs.add_parser(
            name,
            help=VERBS[name],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if shared := _shared(module):
            _module("arguments").add(sub, shared)
        if hasattr(module, "add_arguments"):
            module.add_arguments(sub)
        sub.set_defaults(own=sub)
        if name not in {"completion", "mcp"}:
            sub.add_argument("--json", action="store_true", help="print JSON, for programs")
    return top


def _overview() -> str:
    """All verbs, by what they are for."""
    lines, bold = [], os.isatty(1) and has_colors()  # standard output
    for title, verbs in GROUPS.items():
        lines.append(f"\x1b[1m{title}\x1b[0m" if bold else title)
        for name, text in verbs.items():
            first, *rest = textwrap.wrap(text, max(20, _columns() - 16))
            lines += [f"  {name:<12}{first}", *(f"{'':14}{more}" for more in rest)]
        lines.append("")
    return "\n".join(lines)


def _without_help_verb(argv: list[str]) -> list[str]:
    """Return the command line with `help`, `version` and no verb at all as options."""
    match argv:
        case [] | ["help"]:
            return ["--help"]
        case ["help", verb, *_]:
            return [verb, "--help"]
        case ["version", *_]:
            return ["--version"]
    return argv


def _require_known(chosen: list[str]) -> None:
    """Raise UsageError for an unknown verb or option, with the one that was probably meant."""
    for word in chosen:
        if word.startswith("-"):
            if word not in {"-h", "--help", "--version"}:
                hint = "put options after a command, as in `deploykit submit --wait`"
                hint = did_you_mean(word, ["--help", "--version"]) or hint
                raise UsageError(f"expected a command before {word}", hint=hint)
        elif word not in VERBS:
            meant = _OTHER_NAMES.get(word) or nearest(word, VERBS)
            hint = f"did you mean `deploykit {meant}`?" if meant else "see `deploykit --help`"
            raise UsageError(f"unknown command {word!r}", hint=hint)


def _with_hyphens(word: str) -> str:
    """An option as it is declared: ``--dry_run`` and ``--dryrun`` are ``--dry-run``."""
    name, equals, value = word.partition("=")
    if not word.startswith("--"):
        return word
    name = name.replace("_", "-")
    return f"{'--dry-run' if name == '--dryrun' else name}{equals}{value}"


def _refuse_unknown(verb: argparse.ArgumentParser, words: list[str]) -> None:
    """Raise UsageError for what a verb does not take, with the option that was probably meant."""
    if words:
        options = verb._option_string_actions  # noqa: SLF001
        names = dict.fromkeys(word.partition("=")[0] for word in words)
        others = [name for name in names if name in _OTHER_OPTIONS and "--set" in options]
        if others:
            hints = [
                f"instead of {name}: {_here(_OTHER_OPTIONS[name], options)}" for name in others
            ]
            raise UsageError(f"unrecognized arguments: {' '.join(others)}", hint="\n".join(hints))
        hint = did_you_mean(words[0].partition("=")[0], options) or f"see `{verb.prog} --help`"
        if "--set" in options:
            hint += "\nput arguments for the script after `--`, as in `-- --lr 0.1`"
        raise UsageError(f"unrecognized arguments: {' '.join(words)}", hint=hint)


def _here(text: str, options: Collection[str]) -> str:
    """What to give a verb: one of its `options`, with N for a number, or else the key of a job."""
    if text in options:
        return f"{text} N"
    key = text.removeprefix("--").replace("-", "_")
    return f"--set resources.{key}=N" if text in _RESOURCE_OPTIONS else text


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command line, and what stands after ``--``: arguments of the trainer, for any job."""
    if "--" not in argv or argv[0] not in VERBS:
        return argv, []
    if argv[0] not in {"evaluate", "exec", "rerun", "sweep"} and "job" not in _shared(
        _module(argv[0])
    ):
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


class _Version(argparse.Action):
    """Print versions, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        output = _module("output")
        output.say(f"deploykit {__version__}")
        output.say(f"Python {sys.version.split()[0]} ({sys.executable})")
        for name in _PACKAGES:
            try:
                output.say(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                output.say(f"{name}: not installed here")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """argparse, with errors reported like all others, and the width of the terminal asked once."""

    def __init__(self, *, formatter_class: type = argparse.HelpFormatter, **settings: Any) -> None:
        help_format = functools.partial(formatter_class, width=_columns() - 2)
        super().__init__(formatter_class=help_format, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing and exiting."""
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _open_closed_streams() -> None:
    """Open /dev/null for closed streams, before another file takes their descriptors."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w"))


def _drop_output() -> None:
    """Discard buffered output, which the interpreter could not flush at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


def _report_lost(error: Exception) -> int:
    reason = error.strerror if isinstance(error, OSError) else error
    with contextlib.suppress(OSError, OutputLost):  # standard error may be lost too
        _report(OutputLost(f"cannot write the output: {reason}"), as_json=False)
    return OutputLost.exit_code


def _module(name: str) -> Any:
    """A module beside this one, which is imported only where it is needed."""
    return importlib.import_module(f"deploykit.cli.{name}")


def _shared(module: Any) -> tuple[str, ...]:
    return getattr(module, "SHARED", ())


def _report(error: DeploykitError, *, as_json: bool) -> None:
    _module("output").error(error, as_json=as_json)


def _note(interrupt: KeyboardInterrupt) -> None:
    """Print what was underway, where that matters."""
    if notes := getattr(interrupt, "__notes__", ()):
        _module("output").note(*notes)


def _known_error(error: Exception) -> DeploykitError | None:
    """The error for a full or read-only disk and the like; None for any other exception."""
    if not isinstance(error, OSError) or error.errno not in _WRITE_ERRORS:
        return _deleted_folder(error) or _limit(error)
    return CannotWrite(
        f"cannot write {error.filename or f'a file in {paths.state()}'}: {error.strerror}",
        hint=f"free some space (`deploykit disk` shows what uses it), or {paths.HINT}",
    )


def _deleted_folder(error: BaseException | None) -> DeploykitError | None:
    """The error for a file that is missing because the working folder was deleted; else None."""
    with contextlib.suppress(FileNotFoundError):
        os.getcwd()  # noqa: PTH109 - pathlib takes milliseconds
        return None
    gone = NotFound("the working folder was deleted", hint="change to another folder")
    return gone if isinstance(error, FileNotFoundError) else None


def _limit(error: Exception) -> DeploykitError | None:
    """The error where the system starts no further process or thread; else None."""
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        hint = "close other programs, or raise the process limit (`ulimit -u`)"
        return TryAgain(f"cannot start another process: {error}", hint=hint)
    return None


def _unexpected(error: Exception, argv: list[str]) -> DeploykitError:
    """An unexpected exception as an error that names a log file with the traceback."""
    import traceback

    message = f"unexpected error: {type(error).__name__}: {error}"
    text = f"deploykit {__version__}, Python {sys.version.split()[0]}, {sys.platform}\n"
    text += f"verb: {' '.join(argv[:1])}\n\n{traceback.format_exc()}"
    try:
        log = paths.state() / "crashes" / f"{time.strftime('%Y%m%d-%H%M%S')}.log"
        paths.private_folder(log.parent)
        paths.write(log, text)
    except (OSError, CannotWrite) as failure:
        return DeploykitError(message, hint=f"the traceback could not be saved: {failure}")
    return DeploykitError(message, hint=f"please report this, with the traceback in {log}")


if __name__ == "__main__":
    sys.exit(main())
