"""Diagnosis, on logs written for these tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import tracemalloc
from pathlib import Path

import pytest

from deploykit.backends import local
from deploykit.cli import main as cli
from deploykit.diagnose import cause_rules, placeholders, scan
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import registry
from tests.diagnose.answers import LOGS, cases, diagnosis, first_cause, first_label

ONE_LINE = {
    "cuda_oom": "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB",
    "port_in_use": "RuntimeError: server socket failed: EADDRINUSE, Address already in use",
    "missing_module": "ModuleNotFoundError: No module named 'sklearnn'",
    "slurm_time_limit": "slurmstepd: *** JOB 7 ON n1 CANCELLED AT noon DUE TO TIME LIMIT ***",
    "slurm_cancelled": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT noon ***",
    "slurm_preempted": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT noon DUE TO PREEMPTION ***",
    "slurm_oom": "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Killed by cgroup",
    "host_oom": "kernel: Out of memory: Killed process 77 (python)",
    "net_iface_wrong": "n1:1:2 [0] NCCL WARN Bootstrap : no socket interface found",
    "net_unreachable": "socket: connect to 10.0.0.2:29500 failed: Connection refused",
    "net_blocked": "NCCL WARN Connect to 10.0.0.2<4000> failed : No route to host",
    "dns_failure": "socket.gaierror: [Errno -2] Name or service not known",
    "fd_limit": "OSError: [Errno 24] Too many open files: 'x'",
    "disk_full": "OSError: [Errno 28] No space left on device: 'ckpt.pt'",
    "rdzv_timeout": "Timed out after 9 seconds waiting for clients",
    "collective_timeout": "[Rank 1] Watchdog caught collective operation timeout",
    "remote_peer_died": "ncclRemoteError: a call failed, remote process exited",
    "gpu_hardware": "kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
    "nan_loss": "{'loss': nan, 'step': 12}",
    "segfault": "x.sh: line 3: Segmentation fault (core dumped)",
    "checkpoint_mismatch": "RuntimeError: Error(s) in loading state_dict for Net: size mismatch",
    "hf_auth": "OSError: You are trying to access a gated repo.",
    "sagemaker_quota": "ResourceLimitExceeded: the account-level service limit is 0",
    "sagemaker_capacity": "InsufficientInstanceCapacity: try later",
    "sagemaker_permission": "User arn:x is not authorized to perform: sagemaker:CreateTrainingJob",
    "slurm_bad_request": "sbatch: error: invalid partition specified: gpux",
    "command_not_found": "/job/script: line 4: torchrunn: command not found",
    "slurm_node_fail": "JOB 7 ON n1 CANCELLED AT noon DUE TO NODE FAILURE",
    "memlock_limit": "ibv_reg_mr: Cannot allocate memory",
    "unknown": "2026-11-21T20:55:06.910Z [node 0] SIGTERM received and forwarded to 1 rank",
    "fabric_manager": "CUDA initialization: Error 802: system not yet initialized",
}
HARMLESS = """\
[W1] The client socket cannot be initialized (errno: 97 - Address family not supported by protocol)
n1:1:2 [0] NCCL WARN Failed to open libibverbs.so.1
ras/client_support.cc:9 NCCL WARN Call to bind failed: Address already in use
step 10 loss 0.31 done
"""


def diagnosed(path, capsys, *more):
    code = cli.main(["diagnose", str(path), "--json", *map(str, more)])
    return code, json.loads(capsys.readouterr().out)["causes"]


@pytest.mark.parametrize("label", ONE_LINE)
def test_each_family_is_named(label, tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text(f"step 1 loss 0.5\n{ONE_LINE[label]}\n")
    code, found = diagnosed(path, capsys)
    assert (code, found[0]["cause"], found[0]["evidence"][0]["line"]) == (79, label, 2)
    assert set(found[0]) == {"cause", "also", "confidence", "evidence", "first_rank", "fix"}


@pytest.mark.parametrize(
    ("lines", "end", "ending"),
    [
        (0, "", "cause"),
        (10, "", "cause"),
        (40, "", "healthy"),
        (40, "srun: error: n1: task 0: Exited with exit code 1\n", "unknown"),
    ],
)
def test_an_error_of_a_script_counts_unless_its_log_goes_on(tmp_path, capsys, lines, end, ending):
    log = tmp_path / "job.log"
    more = "".join(f"copied file {number}\n" for number in range(lines))
    log.write_text(f"job.sh: line 3: conda: command not found\n{more}{end}")
    cli.main(["diagnose", "--json", str(log)])
    found = json.loads(capsys.readouterr().out)
    assert found["ending"] == ending
    assert ending != "cause" or found["causes"][0]["cause"] == "command_not_found"


def test_healthy_logs_have_no_findings(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text(HARMLESS)
    assert diagnosed(path, capsys) == (0, [])


def test_a_person_reads_what_where_why_and_what_to_do(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text("[rank3]: x\nn7:1:2 [0] NCCL WARN Bootstrap : no socket interface found\n")
    assert cli.main(["diagnose", str(path)]) == 79
    told = capsys.readouterr().out
    assert f"  proof      {path}:2, n7\n" in told
    assert "  fix        List the interfaces on n7: ip -br addr" in told
    path.write_text("step 1\n")
    assert cli.main(["diagnose", str(path)]) == 0
    assert capsys.readouterr().out == "healthy: these logs show no failure\n"


SUMMARY = "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 9)\n"
REFUSED = """\
_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so ...
\t(1) In PyTorch 2.6, we changed the default value of the `weights_only` argument ...
\t(2) Alternatively, to load with `weights_only=True` please check the recommended steps ...
\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global
"""
POINTER = """\
_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default value ...
Please file an issue with the following so that we can make ...: WeightsUnpickler error:

Unsupported operand 118
"""
ABORTED = """\
[rank1]: test accuracy 0.9722
terminate called without an active exception
E1122 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) local_rank: 1
  traceback : Signal 6 (SIGABRT) received by PID 4242
"""
THROWN = "after throwing an instance of 'std::runtime_error'"


@pytest.mark.parametrize(
    ("text", "label", "rank"),
    [
        pytest.param(
            f"ChildFailedError:\n\n\n\n{SUMMARY.format(3, 1)}{SUMMARY.format(1, 1)}",
            *("unknown", 1),
            id="torchrun names the first rank that failed",
        ),
        pytest.param(
            f"Failures:\n{SUMMARY.format(1, -15)}{SUMMARY.format(0, -15)}"
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT ***\n",
            *("slurm_time_limit", None),
            id="torchrun calls the first rank that SIGTERM stopped the root cause",
        ),
        pytest.param(REFUSED, "weights_only", None, id="torch.load refuses a file"),
        pytest.param(POINTER, "checkpoint_corrupt", None, id="a file is corrupt"),
        pytest.param(ABORTED, "aborted_at_exit", None, id="an abort at the end of Python"),
        pytest.param(
            ABORTED.replace("without an active exception", THROWN),
            "unknown",
            None,
            id="an exception of C++",
        ),
        pytest.param(
            f"Traceback (most recent call last):\nKeyError: 'label'\n{ABORTED}",
            *("user_code_error", None),
            id="an exception of Python before an abort",
        ),
    ],
)
def test_what_is_easily_mistaken(text, label, rank, tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text(text)
    _, found = diagnosed(path, capsys)
    assert (found[0]["cause"], found[0]["first_rank"]) == (label, rank)
    if label == "weights_only":
        assert "torch.serialization.add_safe_globals([argparse.Namespace])" in found[0]["fix"]


def test_several_causes_are_told_in_order_and_the_most_probable_is_marked(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text("loss: nan\ntorch.OutOfMemoryError: CUDA out of memory\n")
    assert cli.main(["diagnose", str(path)]) == 79
    printed, pointer = capsys.readouterr().out.split("\n\n")
    causes = [line for line in printed.splitlines() if line[0] != " "]
    assert [line.split(":")[0] for line in causes] == ["nan_loss", "cuda_oom"]
    assert causes[1].endswith("(most probable)")
    assert pointer == "more on this cause: deploykit explain cuda_oom\n"


def test_the_root_wins_over_what_repeats_it(tmp_path, capsys):
    path = tmp_path / "a.log"
    lines = [ONE_LINE[label] for label in ("remote_peer_died", "cuda_oom", "slurm_cancelled")]
    path.write_text("\n".join(lines))
    _, found = diagnosed(path, capsys)
    assert [finding["cause"] for finding in found] == ["cuda_oom"]
    assert found[0]["first_rank"] == 3


def test_a_users_rules_come_first(tmp_path, capsys):
    path, mine = tmp_path / "a.log", tmp_path / "mine.toml"
    path.write_text("no license left\n")
    mine.write_text("[[cause]]\nlabel='ours'\nmeans='m'\nfix='f'\nmatch=['no license left']\n")
    _, found = diagnosed(path, capsys, "--rules", mine)
    assert found[0]["cause"] == "ours"


def test_without_grep_the_same_lines_are_found(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("\n".join([HARMLESS, *ONE_LINE.values()]))
    literals = cause_rules.load().literals
    with path.open("rb") as file:
        found = [line.decoded() for line in scan.lines(file, literals)]
    assert found == [line.decoded() for line in scan.file(path, literals)]


@pytest.mark.parametrize("log", cases("failures.toml"), ids=lambda log: log["cause"])
def test_a_failure_as_the_software_prints_it_is_named(log):
    cause = first_cause(log["text"])
    assert cause.rule.label in {log["cause"], *log.get("also", ())}
    assert cause.first_rank == log.get("rank", cause.first_rank)


def test_every_rule_has_a_case():
    proved = {first_cause(log["text"]).rule for log in cases("failures.toml")}
    assert [rule.label for rule in cause_rules.load().causes if rule not in proved] == []


def test_every_label_that_a_rule_refers_to_can_be_explained():
    rules = cause_rules.load()
    for rule in rules.causes:
        assert {*rule.also, *rule.yields, *rule.warned_by} <= rules.labels, rule.label
        assert rule.label not in rule.also


def test_single_lines_are_named():
    wrong = []
    for row in (LOGS / "lines.txt").read_text(encoding="utf-8").splitlines()[1:]:
        labels, text = row.split(" | ", 1)
        found = first_label(text.replace("\\n", "\n")) or "none"
        wrong += [(labels, found, text)] if found not in labels.split(",") else []
    assert wrong == []


@pytest.mark.parametrize("log", cases("healthy.toml"))
def test_a_healthy_log_that_looks_bad_has_no_cause(log):
    assert first_label(log["text"]) is None


def test_what_a_log_overcame_is_no_cause():
    failed = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert first_label(failed) == "cuda_oom"
    assert first_label(f"{failed}\nReporting training SUCCESS\n") is None
    assert first_label(f"WARNING: {failed}, retrying with half the batch\n") is None


def test_an_earlier_exception_comes_before_the_time_out_that_follows_it():
    raised = '[rank3]: Traceback (most recent call last):\n[rank3]: KeyError: "text"\n'
    waited = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)\n"
    assert first_label(raised + waited) == "user_code_error"
    assert first_label(waited + raised) == "collective_timeout"


def test_a_fix_has_the_values_of_the_line_and_of_the_run(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text("[W socket.cpp:1] failed to bind to [::]:6000 (errno: 98 - in use)\n")
    _, found = diagnosed(path, capsys)
    assert "ss -ltnp | grep :6000\n" in found[0]["fix"]
    path.write_text("OSError: [Errno 98] in use\n")
    _, found = diagnosed(path, capsys)
    assert "on the node: ss -ltnp | grep :PORT\n" in found[0]["fix"]


def test_fixes_name_keys_and_commands_that_exist():
    reference = Path(__file__).parents[2] / "docs/reference"
    page = (reference / "job-file.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`((?:resources|slurm|sagemaker|local)\.[a-z_]+)", page))
    sections = (reference / "commands.md").read_text(encoding="utf-8").split("\n## deploykit ")
    commands = {section.split(maxsplit=1)[0]: section for section in sections}
    for cause in cause_rules.load().causes:
        named = re.findall(r"\b(?:resources|slurm|sagemaker|local)\.[a-z_]+\b", cause.fix)
        assert set(named) - {"sagemaker.amazonaws", "slurm.conf"} <= keys, cause.label
        for step in re.findall(r": deploykit ([a-z]+.*)", cause.fix):
            command, *words = step.split()
            options = [word for word in words if word.startswith("--")]
            assert all(option in commands[command] for option in options), step


@pytest.mark.parametrize("value", ["$(reboot)", "a;b", "-rf", "a b", "`id`", ""])
def test_no_value_of_a_log_breaks_a_command(value):
    assert placeholders.render("grep {port|PORT} file", {"port": value}) == "grep PORT file"


RECORD = '{{"exit_code": {}, "reason": "r", "rank": 0, "finished": "{}", "attempt": 0}}'


def add_array(codes):
    """A failed run whose tasks ended with these codes; task N wrote its number."""
    folder = paths.run_folder("arr")
    for number, code in enumerate(codes):
        task = folder / "tasks" / str(number)
        for name in ("logs", "exit_records"):
            (task / name).mkdir(parents=True)
        line = f"[rank 0] ValueError: task {number}"
        text = f"Traceback (most recent call last):\n{line}\n"
        (task / "logs/node-0.log").write_text(text)
        record = RECORD.format(code, "2026-11-21T02:15:19Z")
        (task / "exit_records/node-0.json").write_text(record)
    (folder / "logs").mkdir()
    (folder / "logs/slurm-1.log").write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    row = registry.Run("arr", "job", "local", "here", str(folder), "a", "b", None, 1.0, "/out")
    registry.add(row)
    registry.confirm("arr", "7")
    registry.update("arr", Status(State.FAILED, "ended", "3 tasks: 2 failed"))
    return folder


def test_a_line_that_only_introduces_others_counts_in_every_log():
    """The second log's `Traceback` is no repetition of the first log's."""
    begin = "Traceback (most recent call last):\n"
    (cause,) = diagnosis(f"{begin}retrying\n", f"{begin}[rank1]: KeyError: 'label'\n").causes()
    assert (cause.rule.confidence, cause.first_rank) == (0.9, 1)


def test_an_array_is_diagnosed_from_the_logs_of_its_tasks_that_failed(tmp_path, capsys):
    folder = add_array([0, 1, 1])
    code, (found,) = diagnosed("arr", capsys)
    assert (code, found["cause"]) == (79, "user_code_error")
    assert [proof["file"] for proof in found["evidence"]] == [
        str(folder / f"tasks/{number}/logs/node-0.log") for number in (1, 2)
    ]
    assert cli.main(["status", "arr"]) == 0
    assert "cause   user_code_error, " in capsys.readouterr().out


def test_the_cause_in_one_line_reads_a_few_tasks_only(capsys, monkeypatch):
    monkeypatch.setattr(run_diagnosis, "_MAX_TASKS_BRIEFLY", 2)
    folder = add_array([0, 1, 1, 1])
    log = folder / "tasks/3/logs/node-0.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    assert "user_code_error" in run_diagnosis.brief(registry.get("arr"))
    assert diagnosed("arr", capsys)[1][0]["cause"] == "cuda_oom"


@pytest.mark.parametrize(
    ("state", "native", "reason", "cause"),
    [
        (State.FAILED, "timed out", "stopped at its time limit", "time_limit"),
        (State.FAILED, "OUT_OF_MEMORY", "", "slurm_oom"),
        (State.FAILED, "Failed", "CapacityError: Unable to provision", "sagemaker_capacity"),
        (State.FAILED, "Stopped/MaxWaitTimeExceeded", "did not end", "sagemaker_max_wait"),
        (State.BLOCKED, "PENDING", "asks for 9 nodes, so it can never start", "job_never_starts"),
    ],
)
def test_the_state_of_a_run_is_evidence(state, native, reason, cause, capsys, monkeypatch):
    folder = add_array([1])
    (folder / "tasks/0/logs/node-0.log").write_text(
        "[node 0] SIGTERM received and forwarded to 1 rank\n"
    )
    status = Status(state, native, reason)
    monkeypatch.setattr(local, "status", lambda handles: dict.fromkeys(handles, status))
    registry.update("arr", status)
    code, found = diagnosed("arr", capsys)
    assert (code, found[0]["cause"]) == (79, cause)
    assert found[0]["evidence"][0]["file"] == "status of arr"


def test_a_fix_keeps_the_arguments_of_a_run_that_can_be_submitted_again(capsys, monkeypatch):
    folder = add_array([1])
    status = Status(State.FAILED, "timed out", "stopped at its time limit")
    monkeypatch.setattr(local, "status", lambda handles: dict.fromkeys(handles, status))
    registry.update("arr", status)
    again = "deploykit {} --set resources.time_limit=TIME"
    assert again.format("submit --backend BACKEND") in diagnosed("arr", capsys)[1][0]["fix"]
    (folder / "job.json").write_text("{}")
    assert again.format("rerun arr") in diagnosed("arr", capsys)[1][0]["fix"]


@pytest.mark.parametrize(
    "line",
    [
        "train.py: error: unrecognized arguments: --lr 0.1",
        "train.py: error: argument --epochs: invalid int value: 'five'",
        "Error: No such option: --lrr Did you mean --lr?",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--x']",
        "FATAL Flags parsing error: Unknown command line flag 'lrr'",
    ],
)
def test_a_usage_error_is_no_exception_of_the_program(line):
    assert first_label(f"usage: train.py [-h]\n{line}\n") == "bad_arguments"


def test_one_grep_reads_many_files(tmp_path, monkeypatch):
    """With the lines, numbers and order of one grep for each; odd names are no exception."""
    literals = cause_rules.load().literals
    names = ["rank 1.log", "-n.log", "a\nb.log", "rank:2.log", "silent.log", "caf\udce9.log", "p"]
    for number, name in enumerate(names):
        text = f"[rank{number}]: fine\n" * number + "CUDA out of memory\nnext\n--\nmore\n" * 2
        (tmp_path / name).write_text("all is well\n" if name == "silent.log" else text)
    (tmp_path / "p").unlink()
    paths = [tmp_path / name for name in names[:-1]]
    expected = {path: list(scan.file(path, literals)) for path in paths}
    expected.pop(tmp_path / "silent.log")
    begun, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda argv, **how: begun.append(argv[0]) or popen(argv, **how)
    )
    found = [(path, list(lines)) for path, lines in scan.files(paths, literals, [])]
    assert found == list(expected.items())
    del begun[:]
    many = [tmp_path / f"{number}.log" for number in range(300)]
    for path in many:
        path.write_text("CUDA out of memory\n")
    assert [path for path, lines in scan.files(many, literals, []) if list(lines)] == many
    assert len(begun) <= 2


def test_a_pipe_among_the_files_is_read_once(tmp_path):
    literals = cause_rules.load().literals
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.log").write_text("CUDA out of memory\n")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("NCCL error\n",))
    writer.start()
    found = [
        (path.name, [line.decoded().text for line in lines])
        for path, lines in scan.files([tmp_path / "a.log", tmp_path / "pipe"], literals, [])
    ]
    writer.join()
    assert found == [("a.log", ["CUDA out of memory"]), ("pipe", ["NCCL error"])]


def test_a_line_that_does_not_end_stays_out_of_memory(tmp_path, monkeypatch):
    literals = cause_rules.load().literals
    log = tmp_path / "run.log"
    with log.open("wb") as file:
        file.write(b"begins\n")
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b"\nCUDA out of memory\n")
        file.write(b"more\n")
    longest, pieces = [], scan._pieces
    monkeypatch.setattr(
        scan, "_pieces", lambda one: (longest.append(len(p[1])) or p for p in pieces(one))
    )
    tracemalloc.start()
    (found,) = [list(lines) for _, lines in scan.files([log], literals, [])]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [tuple(line.decoded())[:2] for line in found] == [(3, "CUDA out of memory"), (4, "more")]
    assert peak < 10 << 20
    assert max(longest) <= 1 << 20  # what grep has in memory


@pytest.mark.parametrize("name", ["missing.log", "folder"])
def test_a_file_of_many_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path, name):
    (tmp_path / "a.log").write_text("CUDA out of memory\n")
    (tmp_path / "folder").mkdir()
    unread = []
    paths = [tmp_path / name, tmp_path / "a.log"]
    found = [list(lines) for _, lines in scan.files(paths, ["memory"], unread)]
    assert [line.raw for lines in found for line in lines] == [b"CUDA out of memory\n"]
    assert [name in text for text in unread] == [True]


def naive(index, line):
    """What `find` must give, without its memory: every pattern tried."""
    held = [n for n, (_, one) in enumerate(index._owned) if any(t in line for t in one.literals)]
    return held, index.match(line, held)


def test_lines_that_differ_in_digits_only_are_told_apart_where_a_rule_does():
    index = cause_rules.load().index
    lines = ["exit code 1", "exit code 137", "Xid 79 seen", "Xid 13 seen", "exitcode: -9"]
    lines += [f"HTTP Error {n}: no" for n in (401, 403, 404, 500)]
    for path in sorted(LOGS.rglob("*.toml"))[:40]:
        texts = path.read_text(errors="replace").splitlines()
        lines += [text[:300] for text in texts[::7] if text.strip()]
    other = str.maketrans("0123456789", "7413904825")
    for line in (*lines, *(line.translate(other) for line in lines)):
        assert index.find(line) == naive(index, line), line
    assert index.find(lines[0]) != index.find(lines[1])
