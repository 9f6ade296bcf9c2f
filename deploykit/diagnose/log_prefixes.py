"""Prefixes of log lines: colors, and marks of rank, host and time."""

from __future__ import annotations

import re

_COLOR = re.compile(r"\ufeff|\x1b\[[0-9;?]*[A-Za-z]|\[\d{1,2}(?:;\d{1,2})*m")
_PREFIX = re.compile(
    r"""\s*(?:
      \d{4}-\d\d-\d\dT[\d:.]+Z?\s\[(?:rank|node)\ \d+\]\s?      # deploykit's own
    | \[(?:rank|default)\s?\d+\](?::|\s)
    | \[\d+(?:,(?:mpirank:)?\d+(?:,[\w-]+)?)?\](?:<std(?:out|err)>)?:  # mpirun, SageMaker's
    | \d{1,4}:\s(?=\D) | \d{1,6}\t                               # srun --label, a pager
    | algo-\d+(?:-\w+)?\s*(?:\||:)\s
    | \((?:[\w-]+,?\s)?(?:pid|ip|rank|Worker\w*)[^)]*\)\s          # Ray, SkyPilot
    | \[pod/[\w./-]+\]\s | (?:stdout|stderr)\s[FP]\s               # kubectl --prefix, a kubelet
    | [a-z][\w.-]*-\d+\s+\|\s                                     # docker compose
    | [A-Z][a-z]{2}\s[\s\d]\d\s\d\d:\d\d:\d\d\s                     # syslog, journald, ts
      (?:[\w.-]+\s(?!kernel)[\w./@()-]+(?:\[\d+\])?:\s)?
    | \d{4}-\d\d-\d\dT[\d:.]+[+-]\d\d:?\d\d\s                     # aws logs tail, journald
      (?:[\w.-]+\s(?!kernel)[\w./@()-]+\[\d+\]:|[\w.-]+/[\w.$/\[\]-]+)\s
    | \#\sMAGIC\s | [|>\#]\s
    | \d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z:?|[+-]\d\d:?\d\d)?\s+           # kubectl, CloudWatch
    | (?:\[[\w-]+\])+\s*(?=Traceback|File\ "|[\w.]*(?:Error|Exception)\b)
    | [a-z][\w.-]*-\d+\s+(?=Traceback|File\ "|[\w.]*(?:Error|Exception):)    # a pod
    | [/\w][\w./\[\]-]*:\s+(?=Traceback|File\ "|[\w.]*(?:Error|Exception):)  # pdsh, pods
    )""",
    re.VERBOSE,
)
_RANK = re.compile(
    r"\[(?:[Rr]ank|default) ?(\d{1,9})\]|\b[Rr]ank (\d{1,9})\]|^\s*(\d{1,4}): (?=\D)"
    r"|^\[1,(\d{1,9})\]|\[1,(?:mpirank:)?(\d{1,9})(?:,[\w-]{1,60})?\]<std"
    r"|MPI_ABORT was invoked on rank (\d{1,9})"
    r"|MPI_Abort\(.{1,60}\) - process (\d{1,9})"
)
_HOST = re.compile(
    r"([\w.-]{1,255}):\d+:\d+ \[\d+\] |(?:JOB|STEP) [\d.]+ ON (\S+)|srun: error: ([\w.-]+): task"
    r"|\b(algo-\d+)\b|Node failure on (\S+)"
)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d+)?)")
SUMMARY = " (local_rank: "
"""Text of the line of torchrun's failure summary that names a rank."""
_SUMMARY_RANK = re.compile(r"(?:^|\s)rank\s+: (\d{1,9})" + re.escape(SUMMARY))
_SUMMARY_DETAIL = re.compile(r"(?:^|\s)(?:exitcode|error_file|traceback)\s+: ")

_SUMMARY_END = re.compile(r"(?:^|\s)exitcode\s+: (-?\d{1,6})\b.{0,40}?(?:\((SIG\w{2,9})\))?\s*$")
_SUMMARY_STOPPED = re.compile(r"(?:^|\s)exitcode\s+: -15\b")


def bare(text: str) -> str:
    """Remove colors and all prefixes from a line."""
    text = _COLOR.sub("", text)
    while match := _PREFIX.match(text):
        text = text[match.end() :]
    return text.strip()


def rank(text: str) -> int | None:
    """The rank that a prefix names; None if there is none."""
    match = _RANK.search(_COLOR.sub("", text))
    return int(match[match.lastindex or 0]) if match else None


def host(text: str) -> str | None:
    """The host that NCCL, Slurm or SageMaker names in the line; None if there is none."""
    match = _HOST.search(text)
    return match[match.lastindex or 0] if match else None


def time(text: str) -> str:
    """The time of the line in a sortable form; empty if the line has none."""
    match = _TIME.search(text[:80])
    return f"{match[1]}T{match[2].replace(',', '.')}" if match else ""


def summary_rank(text: str) -> int | None:
    """The rank of an entry in torchrun's failure summary, whose last entry failed first."""
    match = _SUMMARY_RANK.search(bare(text)) if SUMMARY in text else None
    return int(match[1]) if match else None


def continues_summary(text: str) -> bool:
    """Whether the line is a detail of the summary's previous entry."""
    return " : " in text and _SUMMARY_DETAIL.search(bare(text)) is not None


def stopped_in_summary(text: str) -> bool:
    """Whether the summary's previous entry is a rank that SIGTERM stopped: it did not fail first.

    torchrun lists such ranks when the run is stopped from outside, for example at its time limit.
    """
    return "exitcode" in text and _SUMMARY_STOPPED.search(bare(text)) is not None


def end_in_summary(text: str) -> str | None:
    """With what the summary's previous entry ended; None for any other line."""
    match = _SUMMARY_END.search(bare(text)) if "exitcode" in text else None
    if match is None:
        return None
    return f"{match[2]}" if match[2] else f"exit code {match[1]}"
