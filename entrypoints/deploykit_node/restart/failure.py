"""Why a rank failed, read from the end of its output, and whether the same would happen again.

`deploykit diagnose` reads whole logs with many more rules, on the machine of the user. A restart
cannot wait for it, so `ROWS` holds the few causes on which the decision depends, under the same
labels. tests/node/test_restart_decisions.py compares each row with ``retry`` of the same cause in
deploykit/diagnose/causes/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from deploykit_node import signals

TRANSIENT, DETERMINISTIC, UNKNOWN = "transient", "deterministic", "unknown"
PEER_DIED, TIMED_OUT = "remote_peer_died", "collective_timeout"
SYMPTOMS = (PEER_DIED, TIMED_OUT)
"""Labels of ranks that only suffer from another one, which is the cause if it is known."""
BAD_NODE = ("gpu_hardware", "fabric_manager", "ib_error")
"""Labels for which the node is at fault, so that the next attempt should avoid it."""

_LINES = 60
"""Lines at the end of the output that may tell the cause, if there is no traceback."""
_NEAR = 15
"""The same if a signal ended the rank: what it had printed before may be a warning."""
_MESSAGE = 12
"""Lines of an exception's message."""
_LONGEST = 300
"""Characters of a message that are kept."""
_NOT_FOUND = 127


class Row(NamedTuple):
    """A cause: whether it is transient or deterministic, and how its lines look."""

    retry: str
    label: str
    pattern: re.Pattern[str]
    at_start: bool = False
    """Deterministic only until the run has made progress: later, a node may be at fault, or it
    depends on how long the program has run."""


def _row(retry: str, label: str, pattern: str, *, at_start: bool = False) -> Row:
    return Row(retry, label, re.compile(pattern), at_start)


ROWS = (
    _row(
        TRANSIENT,
        "gpu_hardware",
        r"uncorrectable (ECC|NVLink)|GPU is lost|fallen off the bus|CUDA error: hardware stack",
    ),
    _row(TRANSIENT, "fabric_manager", r"CUDA error: system not yet initialized"),
    _row(
        DETERMINISTIC,
        "memlock_limit",
        r"[Ii]bv_\w+ failed.{0,40}Cannot allocate memory|max locked memory",
    ),
    _row(
        TRANSIENT,
        "ib_error",
        r"IBV_WC_RETRY_EXC_ERR|NET/IB ?: .*(Got completion .*error|Got async event)"
        r"|ibv_\w+ failed|transport retry counter exceeded",
    ),
    _row(
        TRANSIENT,
        "storage_error",
        r"\[Errno (5|107|116|121)\]|Stale (NFS )?file handle|Input/output error"
        r"|Transport endpoint is not connected",
    ),
    _row(
        TRANSIENT,
        "service_unavailable",
        r"Service Unavailable|Too Many Requests|Bad Gateway|Gateway Time-?out|\(SlowDown\)",
    ),
    _row(TRANSIENT, "dns_failure", r"Temporary failure in name resolution"),
    _row(
        TRANSIENT,
        "rdzv_timeout",
        r"RendezvousTimeoutError|\d+/\d+ clients joined|[Tt]imed out .*waiting for clients",
    ),
    _row(
        TRANSIENT,
        "nccl_init_timeout",
        r"[Ff]ailed to (retrieve|recv|get).*ncclUniqueId|ncclUniqueId.*(timeout|timed out)",
    ),
    _row(TRANSIENT, "port_in_use", r"EADDRINUSE|Address already in use"),
    _row(
        TRANSIENT,
        PEER_DIED,
        r"Connection (closed|reset) by (remote )?peer|ncclRemoteError"
        r"|remote process exited or there was a network error",
    ),
    _row(
        UNKNOWN,  # the ranks may have diverged: then the next attempt hangs as well
        TIMED_OUT,
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for",
    ),
    _row(
        DETERMINISTIC,
        "bad_arguments",
        r"error: (unrecognized arguments|the following arguments are required|ambiguous option)"
        r"|error: argument .{1,80}: (invalid|expected|not allowed)"
        r"|Error: (No such option|Missing option|Missing argument|Got unexpected extra argument)",
    ),
    _row(
        DETERMINISTIC,
        "user_code_error",
        r"^(SyntaxError|IndentationError|TabError): (?!broken|not a)",
    ),
    _row(
        DETERMINISTIC,
        "checkpoint_mismatch",
        r"Error\(s\) in loading state_dict|size mismatch for |Missing key\(s\) in state_dict"
        r"|parameter group that doesn't match",
    ),
    _row(DETERMINISTIC, "weights_only", r"Weights only load failed"),
    _row(DETERMINISTIC, "gpu_arch_unsupported", r"no kernel image is available"),
    _row(
        DETERMINISTIC,
        "cuda_driver_old",
        r"driver version is insufficient|NVIDIA driver on your system is too old",
    ),
    _row(DETERMINISTIC, "duplicate_gpu", r"Duplicate GPU detected"),
    _row(
        DETERMINISTIC,
        "ddp_unused_parameters",
        r"Expected to have finished reduction in the prior iteration",
    ),
    _row(DETERMINISTIC, "gpu_not_visible", r"Torch not compiled with CUDA enabled"),
    _row(
        DETERMINISTIC,
        "hf_auth",
        r"GatedRepoError|RepositoryNotFoundError|is not a valid model identifier",
        at_start=True,
    ),
    _row(
        DETERMINISTIC,
        "tracker_auth",
        r"(api_key|API key) (not configured|must be)|No API key configured",
        at_start=True,
    ),
    _row(
        DETERMINISTIC,
        "lib_incompatible",
        r"cannot import name '\w+' from '(torch|transformers|numpy)\b|undefined symbol",
        at_start=True,
    ),
    _row(DETERMINISTIC, "missing_module", r"ModuleNotFoundError|No module named", at_start=True),
    _row(
        DETERMINISTIC,
        "cuda_oom",
        r"CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        at_start=True,
    ),
    _row(
        DETERMINISTIC,
        "file_not_found",
        r"^FileNotFoundError|\[Errno 2\]|can't open file",
        at_start=True,
    ),
    _row(DETERMINISTIC, "file_permission", r"^PermissionError|\[Errno 13\]", at_start=True),
    _row(DETERMINISTIC, "command_not_found", r"command not found", at_start=True),
)
"""In order of precedence."""


class Failure(NamedTuple):
    """Why a rank failed, as far as its output tells."""

    label: str = ""
    """As `diagnose` has it; empty if no row matches."""
    retry: str = UNKNOWN
    at_start: bool = False
    error: str = ""
    """The exception and its message, the line that names the cause, or the last line."""
    root: str = ""
    """The same for two failures of one kind: the exception and where it was raised."""
    step: int | None = None
    """The last step, if the program printed each one: else the failure was at some later step."""
    steps: bool = False
    """Whether the program printed a step after the first."""


def read(code: int, errors: str, output: str, beside: str = "") -> Failure:
    """Why a rank ended with `code`, from the ends of its error output and its other output.

    `beside` is the end of the output of another rank of the node, which may print the steps.
    """
    lines, text = _lines(errors), _lines(output)
    steps = next(filter(None, map(_steps, (text, lines, _lines(beside)))), [])
    step = steps[-1] if len(steps) > 1 and steps[-1] == steps[-2] + 1 else None
    failure = _found(code, lines, text)
    return failure._replace(step=step, steps=any(one > 1 for one in steps))


def _found(code: int, lines: Sequence[str], text: Sequence[str]) -> Failure:
    """Why a rank ended, from the lines of its error output and of its other output."""
    most = _LINES if code <= signals.BASE else _NEAR
    if raised := _exception(lines, most) or _exception(text, most):
        message, where = raised
        kind, _, rest = message[0].partition(":")
        error, root = " ".join(message), f"{kind} at {where or _DIGITS.sub('0', rest)}"
        return _failure(_row_of(message[:1]) or _row_of(message), error, root)
    for line in (*reversed(lines[-_LINES:]), *reversed(text[-_LINES:])):
        if row := _row_of([line]):
            return _failure(row, line, row.label)
    last = next((line for line in (*lines[-1:], *text[-1:])), "")
    if code == _NOT_FOUND:
        row = next(row for row in ROWS if row.label == "command_not_found")
        return _failure(row, last, row.label)
    return _failure(None, last, _ended(code))


def _failure(row: Row | None, error: str, root: str) -> Failure:
    retry, label, _, at_start = row or (UNKNOWN, "", None, False)
    return Failure(label, retry, at_start, error[:_LONGEST], root)


def _ended(code: int) -> str:
    return signals.name(code - signals.BASE) if code > signals.BASE else f"exit code {code}"


def _row_of(lines: Sequence[str]) -> Row | None:
    return next((row for row in ROWS if any(map(row.pattern.search, lines))), None)


_PREFIX = re.compile(r"^(\[rank\d+\]:? ?)+")
_DIGITS = re.compile(r"\d+")
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+)')
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(:|$)")
_OF_OTHERS = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen ")
_STEP = re.compile(
    r"\b(?:global[_ ]?)?(?:step|iter|iteration)\b\W{0,4}(\d{1,12})\b(?=/|.*\d\.\d)", re.IGNORECASE
)
"""A step with what was measured in it, or with their number: ``step 57/100``."""
_BAR = re.compile(r"\b(\d{1,12})/(\d{1,12}) \[")


def _lines(text: str) -> list[str]:
    """The lines that show something, without the prefixes of torch."""
    lines = (_PREFIX.sub("", line) for line in text.splitlines())
    return [line for line in lines if line.strip()]


def _steps(lines: Sequence[str]) -> list[int]:
    """The last steps that were printed, in order; of bars, only those that are unfinished."""
    steps: list[int] = []
    for line in lines:
        bar = _BAR.search(line)
        if match := _STEP.search(line):
            steps.append(int(match[1]))
        elif bar and int(bar[1]) < int(bar[2]):
            steps += (int(bar[1]) - 1, int(bar[1]))  # it is drawn again at each step
    return steps


def _exception(lines: Sequence[str], most: int) -> tuple[list[str], str] | None:
    """The lines of an exception in the last lines, and its deepest frame outside of packages."""
    begins = [number for number, line in enumerate(lines) if line.strip() == _BEGIN]
    syntax = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not begins and not syntax:
        return None
    rest = lines[begins[-1] + 1 if begins else syntax[-1] :]  # a syntax error has no traceback
    for number, line in enumerate(rest):
        if _EXCEPTION.match(line) and len(rest) - number <= most:
            message = list(_message(rest[number:]))
            return message, _where(rest[:number])
    return None


def _message(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines[:_MESSAGE]):
        if number and _BEGIN in line:
            return
        yield line.strip() if number else line


def _where(frames: Sequence[str]) -> str:
    matches = [match for line in frames if (match := _FRAME.match(line))]
    own = [match for match in matches if not _OF_OTHERS.search(match[1])]
    if not matches:
        return ""
    path, line = (own or matches)[-1].groups()
    return f"{PurePath(path).name}:{line}"
