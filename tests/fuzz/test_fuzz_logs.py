"""Lines of logs: any text is accepted, and the time is bounded by its length."""

from __future__ import annotations

import io
import shutil
import time

import pytest

from deploykit.backends.slurm import site, states
from deploykit.diagnose import cause_rules, log_prefixes, scan
from deploykit.diagnose.ranking import Diagnosis
from deploykit.job.model import LogLine
from deploykit.observe import logfiles
from tests.fuzz.foreign import given, made, odd, soup, spoiled
from tests.regex_samples import parsed, sample

LINES = (
    "2026-11-21T01:46:08.123Z [rank 0] hello",
    "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB",
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T01:46:08 DUE TO TIME LIMIT ***",
    "n1:77:78 [0] NCCL WARN Call to connect returned Connection refused",
    "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)",
    "[1,0]<stderr>:Traceback (most recent call last):",
)
WORDS = ("[rank", "0", "]", ": ", "Error", "2026-11-21T", "01:46:08", ".123Z ", "algo-1-x | ", "\r")


@given(text=spoiled(*LINES) | soup(*WORDS))
def test_any_text_is_a_line_of_a_log(text):
    line = logfiles.parse(text, 0)
    assert (type(line), type(line.text)) == (LogLine, str)
    assert line.rank is None or 0 <= line.rank < 10**9
    for piece in scan.pieces(text):
        assert type(log_prefixes.bare(piece)) is str
        assert log_prefixes.rank(piece) is None or log_prefixes.rank(piece) >= 0
        (
            log_prefixes.host(piece),
            log_prefixes.time(piece),
            log_prefixes.summary_rank(piece),
            log_prefixes.continues_summary(piece),
        )


@pytest.mark.parametrize("when", ["2026-13-45T99:99:99.000Z", "\u0662026-01-01T00:00:00.000Z"])
def test_a_time_that_is_none_leaves_the_line_as_it_is(when):
    """Before, one such line ended `logs` with exit code 70."""
    text = f"{when} [rank 0] hello"
    assert logfiles.parse(text, 3) == LogLine(text, 3)


@given(text=spoiled(*LINES, "\n".join(LINES)) | soup(*WORDS, "\n"), name=made(odd))
def test_any_log_has_findings_or_none(text, name):
    diagnosis = Diagnosis(cause_rules.load())
    source = io.BytesIO(text.encode(errors="replace"))
    diagnosis.read(name, scan.lines(source, diagnosis.literals))
    for cause in diagnosis.causes():
        assert cause.fix
        assert cause.evidence


@pytest.mark.parametrize("grep", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_a_log_without_a_line_end_is_read_in_pieces(tmp_path, monkeypatch, grep):
    """Before, the memory held all of it several times."""
    if not grep:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    path = tmp_path / "node-0.log"
    error = b" CUDA out of memory. Tried to allocate 2 GiB "
    path.write_bytes(b"before\n" + (b"x" * (5 << 18) + error) * 2 + b"\n" + error)
    diagnosis = Diagnosis(cause_rules.load())
    found = list(scan.file(path, diagnosis.literals))
    assert max(len(line.raw) for line in found) <= 1 << 20
    assert {line.number for line in found} == {2, 3}
    diagnosis.read("a", found)
    assert diagnosis.causes()[0].rule.label == "cuda_oom"


def seconds(function, *arguments):
    """Seconds of this process alone, however busy the machine is."""
    began = time.process_time()
    function(*arguments)
    return time.process_time() - began


def _first_repeated(choices):
    """The first branch, but the most repetitions."""
    return choices[-1] if isinstance(choices, range) else choices[0]


def attacks(pattern, width):
    """Lines as long as `width` that begin as the pattern wants and never end so."""
    whole = sample(parsed(pattern), _first_repeated) or "a"
    for cut in {len(whole), *range(3, len(whole), 7)}:
        for tail in ("", "a", "7", " ", "/"):
            yield (whole[:cut] + tail * width if tail else whole[:cut] * width)[:width]


@pytest.mark.slow
def test_no_pattern_takes_long_for_a_line():
    """Before, 4,000 characters behind `StepId=` took 6 s, and a log has as many lines as it likes.

    What is looked at together is 4,000 characters; ten times as many may take a hundred times as
    long, but no more: none of the patterns is worse than quadratic.
    """
    known = [pattern.regex for _, pattern in cause_rules.load().patterns()]
    slow = [
        (pattern.pattern, line[:40], took)
        for pattern in known
        for line in attacks(pattern, 4000)
        if (took := seconds(pattern.search, line)) > 0.4
    ]
    assert slow == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["[rank0]: ", "\x1b[0m", "a", " ", "[a]", "7: ", "a.b-", "[1,0]<stdout>:", "\r"]
)
def test_a_line_of_megabytes_takes_no_longer_than_many_short_ones(line):
    """Before, the marks before a message were taken off one by one, each time with a copy."""
    text = line * ((2 << 20) // len(line)) + " (local_rank: CUDA out of memory"
    diagnosis = Diagnosis(cause_rules.load())
    lines = [scan.RawLine(n, text.encode(), hit=n == 1) for n in (1, 2)]
    assert seconds(diagnosis.read, "a", lines) < 60


FIELDS = " JobState=R Reason=a Dependency=b Requeue=1 ExitCode= StartTime=c EndTime="


@pytest.mark.parametrize(
    "text",
    [
        "JobId=7 JobName=a UserId=b" + FIELDS * 10_000,
        "JobId=7 " + "JobName=a " * 100_000,
        "Name=" + " " * 200_000 + "x",
        "a" * 200_000,
    ],
    ids=["fields", "names", "blanks", "letters"],
)
def test_a_line_of_slurm_takes_no_longer_than_its_length(text):
    """Before, the first tried every combination of its fields: hours."""
    assert seconds(lambda: list(states.parse_scontrol(text))) < 30
    assert seconds(site.parse, text, text, text, "", "") < 30
