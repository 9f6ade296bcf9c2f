"""The same logs in other forms and files, and behind prefixes: the same cause and rank."""

from __future__ import annotations

import gzip
import json
import os
import sys

import pytest

from deploykit.cli import main as cli
from deploykit.diagnose import log_names
from tests.diagnose.answers import cases, diagnosis

AT = "2026-05-04T08:00:00"


def before(front):
    """A wrapping that puts a prefix before every line."""
    return lambda lines: "".join(f"{front}{line}\n" for line in lines).encode()


def records(**keys):
    """A wrapping that makes a JSON record of every line; LINE stands for it."""

    def wrapped(lines):
        whole = ({k: v.replace("LINE", line) for k, v in keys.items()} for line in lines)
        return "".join(json.dumps(record) + "\n" for record in whole).encode()

    return wrapped


def plain(lines):
    return "\n".join(lines).encode()


def document(indent):
    """A wrapping as by `aws logs get-log-events`."""
    event = {"timestamp": 1777881600000, "ingestionTime": 1777881600001}
    return lambda lines: json.dumps(
        {"events": [{**event, "message": line} for line in lines]}, indent=indent
    ).encode()


def journal(lines):
    """journalctl -o json, which writes what is no plain text as bytes."""
    stamp = {"__REALTIME_TIMESTAMP": "1777881600000000", "_HOSTNAME": "cab01"}
    return b"".join(
        json.dumps({**stamp, "MESSAGE": list(line.encode()) if "\t" in line else line}).encode()
        + b"\n"
        for line in lines
    )


docker = records(log="LINE\n", stream="stderr", time=f"{AT}.123456789Z")
WRAPPINGS = {
    "gzip": lambda lines: gzip.compress(plain(lines)),
    "UTF-16": lambda lines: plain(lines).decode().encode("utf-16"),
    "UTF-16, no mark": lambda lines: plain(lines).decode().encode("utf-16-be"),
    "UTF-8 with a mark, CRLF": lambda lines: b"\xef\xbb\xbf" + "\r\n".join(lines).encode(),
    "Docker": docker,
    "Docker, gzip": lambda lines: gzip.compress(docker(lines)),
    "CloudWatch": document(4),
    "CloudWatch, one line": document(None),
    "CloudWatch, exported": records(logStreamName="lynx/algo-1-1777881600", message="LINE"),
    "journald, JSON": journal,
    "fluentd": records(log="LINE", stream="stderr", pod_name="lynx-0"),
    "Google Cloud": records(insertId="a1", textPayload="LINE", timestamp=f"{AT}Z"),
    "kubelet": before(f"{AT}.123456789Z stderr F "),
    "kubectl --timestamps": before(f"{AT}.123456789Z "),
    "kubectl --prefix": before("[pod/lynx-worker-0/pytorch] "),
    "kubectl, both": before(f"[pod/lynx-worker-0/pytorch] {AT}.123456789Z "),
    "a pod": before("w-0 "),
    "docker compose": before("lynx-worker-1  | "),
    "journald": before("May 04 08:00:00 cab01 python[4123]: "),
    "journald, ISO": before(f"{AT}+0000 cab01 lynx.sh[4123]: "),
    "aws logs tail": before(f"{AT}.123000+00:00 lynx-0504/algo-1-1777881600 "),
    "aws logs tail, short": before(f"{AT} "),
    "Ray": before("\x1b[36m(RayTrainWorker pid=944, ip=10.4.0.7)\x1b[0m "),
    "SkyPilot": before("(worker1, rank=1, pid=4123, ip=10.4.0.7) "),
    "pdsh": before("node-3: "),
    "a pager": before("   41\t"),
    "mpirun": before("[1,3]<stderr>:"),
}
OF_THE_PREFIX = {"mpirun": 3}
"""Ranks that a prefix itself tells."""


def conclusion(raw):
    found = diagnosis(raw)
    assert found.unread == []
    cause = next(iter(found.causes()), None)
    return cause and (cause.rule.label, cause.first_rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPINGS)
def test_what_a_log_is_wrapped_in_changes_neither_cause_nor_rank(name):
    wrong = []
    for number, log in enumerate(cases("failures.toml")):
        lines = log["text"].strip("\n").split("\n")
        expected, found = conclusion(plain(lines)), conclusion(WRAPPINGS[name](lines))
        label, rank = expected
        if found not in {expected, (label, OF_THE_PREFIX.get(name, rank))}:
            wrong.append((number, expected, found))
    assert wrong == []


LOST = "step 1\nRuntimeError: CUDA out of memory\n"


def diagnosed(capsys, *words):
    code = cli.main(["diagnose", "--json", *map(str, words)])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


@pytest.mark.parametrize(
    ("failed", "others", "rank"),
    [
        ("rank_017.log", ["rank_000.log"], 17),
        ("run_x/attempt_1/3/stderr.log", ["run_x/attempt_1/0/stderr.log"], 3),
        ("lynx-7001-3.out", ["lynx-7001-0.out"], 3),
        ("slurm-7001_3.out", ["slurm-7001_0.out"], None),  # tasks of an array
        ("3.log", ["0.log"], 3),
        ("7001_3_log.err", ["7001_0_log.err"], 3),
        ("out/rank.3/stderr", ["out/rank.0/stderr"], 3),
        ("node-1.log", ["node-0.log"], None),
        (
            "b/attempt_0/1/stderr.log",
            ["a/attempt_0/0/stderr.log", "a/attempt_0/1/stderr.log"],
            None,
        ),
        ("lynx/algo-2-1777881600.log", ["lynx/algo-1-1777881600.log"], None),
    ],
)
def test_the_rank_comes_from_the_name_of_the_file(failed, others, rank, tmp_path, capsys):
    for name in [failed, *others]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LOST if name == failed else "step 1\n")
    code, found, _ = diagnosed(capsys, tmp_path)
    (cause,) = found["causes"]
    assert (code, cause["cause"], cause["first_rank"]) == (79, "cuda_oom", rank)
    assert cause["evidence"][0]["file"] == str(tmp_path / failed)


def test_of_torchruns_attempts_the_last_is_read(tmp_path, capsys):
    for attempt, text in enumerate([LOST, "step 1\n"]):
        log = tmp_path / f"none_x/attempt_{attempt}/0/stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    assert diagnosed(capsys, tmp_path)[0] == 0
    (tmp_path / "model.pt").write_text(LOST)  # no log
    assert diagnosed(capsys, tmp_path)[1]["ending"] == "healthy"
    (tmp_path / "empty").mkdir()
    assert diagnosed(capsys, tmp_path / "empty")[0] == 66


BEGINS = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        ("fitctl: error: shard 4 is out of order", "unknown"),
        ("[2026-05-04 08:31:04] [ERROR] the pipeline gave up", "unknown"),
        ("time=08:31:04 level=fatal msg=stopped", "unknown"),
        ("mean squared error: 0.31", "healthy"),
        ("Error in cpuinfo: prctl(PR_SVE_GET_VL) failed", "healthy"),
        ("step 9 error 0.02", "healthy"),
        (f'{BEGINS}\n  File "fit.py", line 9, in main\n    go()', "unknown"),
        (f'{BEGINS}\n  File "fit.py", line 9, in main\n    go()\nit went on', "healthy"),
        ("│   11 │   batch = next(it)     │\n│ ❱ 12 │   raise Torn(batch)    │", "unknown"),
        ("│ ❱ 12 │   raise Torn(batch)    │\n╰────────────────────────╯\nit went on", "healthy"),
        ("│   11 │   0.25                 │\n│   12 │   0.31                 │", "healthy"),
    ],
)
def test_a_log_that_ends_with_a_line_its_program_calls_an_error_failed(
    last, ending, tmp_path, capsys
):
    (tmp_path / "a.log").write_text(f"step 1 loss 0.5\n{last}\n\n")
    assert diagnosed(capsys, tmp_path / "a.log")[1]["ending"] == ending


def test_the_three_endings_without_a_cause(tmp_path, capsys):
    log = tmp_path / "a.log"
    log.write_text("step 1\n")
    assert cli.main(["diagnose", str(log)]) == 0
    assert capsys.readouterr().out == "healthy: these logs show no failure\n"
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(os.urandom(9999))[:500])
    assert cli.main(["diagnose", *map(str, sorted(tmp_path.iterdir()))]) == 66
    said = capsys.readouterr()
    assert said.out.startswith("unread: some logs could not be read")
    assert "b.log.gz: only the beginning can be decompressed" in said.err
    log.write_text("")
    code, found, remark = diagnosed(capsys, log)
    assert (code, found["ending"], "empty" in remark) == (66, "unread", True)


def test_of_a_failure_without_a_cause_the_ends_are_told(tmp_path, capsys):
    for rank in range(4):
        text = f"step {rank}\n[rank{rank}]: wrote part {rank} of 4\n"
        (tmp_path / f"rank{rank}.log").write_text(text)
    summary = "  rank      : 2 (local_rank: 2)\n  exitcode  : 17 (pid: 9)\n"
    (tmp_path / "launcher.log").write_text(f"ChildFailedError:\n{summary}")
    code, found, _ = diagnosed(capsys, tmp_path)
    assert (code, found["ending"]) == (82, "unknown")
    assert found["ended"] == "rank 2 ended first, with exit code 17"
    alike = [line for line in found["last"] if "wrote part" in line]
    assert [line.endswith("(and 3 more like it)") for line in alike] == [True]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="optional: this Python reads zstd")
def test_without_a_reader_for_zstd_it_says_what_to_do(tmp_path, capsys):
    (tmp_path / "a.log.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(40))
    code, _, remark = diagnosed(capsys, tmp_path / "a.log.zst")
    assert (code, "zstd -d" in remark) == (66, True)


def test_a_compressed_log_on_standard_input(tmp_path, capsys):
    log = tmp_path / "a"
    log.write_bytes(gzip.compress(LOST.encode()))
    saved = os.dup(0)
    try:
        with log.open("rb") as file:
            os.dup2(file.fileno(), 0)
        assert diagnosed(capsys, "-")[0] == 79
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_names_sort_by_number(tmp_path):
    for number in (10, 9, 1):
        (tmp_path / f"rank{number}.log").write_text("x\n")
    found = [path.name for path in log_names.logs_in(tmp_path)]
    assert found == ["rank1.log", "rank9.log", "rank10.log"]
