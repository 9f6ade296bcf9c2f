"""Commands of fixes that only show something, and need neither a run nor a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixes.printed import commands, shell, starting

MACHINE = {
    "df -h /dev/shm": ("shm_too_small", "insufficient shared memory", {}, "/dev/shm"),
    "ulimit -u": ("process_limit", "RuntimeError: can't start new thread", {}, "\n"),
    "ulimit -l": ("memlock_limit", "ibv_reg_mr: Cannot allocate memory", {}, "\n"),
    "df -h": ("checkpoint_corrupt", "PytorchStreamReader failed reading zip", {}, " /\n"),
    "ls -l ": ("checkpoint_corrupt", "PytorchStreamReader failed", {"FILE": "job.yaml"}, " 4 "),
    "ip -br addr": ("net_iface_wrong", "NCCL WARN no socket interface found", {}, "127.0.0.1"),
    "ip route get ": (
        *("net_iface_wrong", "no socket interface found"),
        *({"PEER": "127.0.0.1"}, "127.0.0.1 dev lo"),
    ),
    "getent ahosts ": (
        *("dns_failure", "getaddrinfo: can't find address for host localhost"),
        *({}, "STREAM localhost"),
    ),
    "env | grep -E ": ("ofi_plugin_incompatible", "Failed to initialize any NET plugin", {}, "ofi"),
    "ls -ld ": (
        *(
            "file_permission",
            "File \"train.py\", line 1\nPermissionError: [Errno 13] denied: 'job.yaml'",
        ),
        *({}, "uid="),
    ),
    "python -c 'import sysconfig": (
        "environment_setup",
        (
            'File "/usr/lib/python3.11/subprocess.py", line 413, in check_call\n'
            "CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1."
        ),
        *({}, "/python3"),
    ),
    "free -g": ("host_oom", "TableOutOfMemoryError: cannot hold it", {}, "Mem:"),
    "python -m pip list": (
        *("lib_incompatible", "ValueError: please upgrade the package"),
        *({}, "pytest"),
    ),
    "command -v ": ("command_not_found", "line 4: torchrun: command not found", {}, "/torchrun\n"),
}


@pytest.mark.parametrize("start", MACHINE)
def test_what_a_machine_shows(start, tmp_path, monkeypatch, capsys):
    """Steps such as `df -h`, `ls -l FILE` and `getent ahosts NAME` say where to look."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("abc\n")
    cause, line, words, shown = MACHINE[start]
    Path("a.log").write_text(line + "\n")
    command = starting(commands(capsys, "a.log", cause), start)
    for word, value in words.items():
        command = command.replace(word, value)
    done = shell(command, NCCL_NET="ofi")
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_a_script_that_may_not_be_executed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("echo it ran\n")
    Path("a.log").write_text(shell("./run.sh").stderr)
    fixes = commands(capsys, "a.log", "file_permission")
    assert shell(starting(fixes, "bash ")).stdout == "it ran\n"
    assert " run.sh\n" in shell(starting(fixes, "namei ")).stdout
    shell(starting(fixes, "chmod "))
    assert shell("./run.sh").stdout == "it ran\n"


DEPLOYKIT = {
    "deploykit advise ": (
        *("cuda_oom", "torch.OutOfMemoryError: CUDA out of memory", "7B parameters"),
        {"GPU": "h100", "SIZE": "7B", "=N": "=64", "size N": "size 64", "LENGTH": "1024"},
    ),
    "deploykit doctor ": (
        *("gpu_not_visible", "RuntimeError: No CUDA GPUs are available", "local: "),
        {"BACKEND": "local"},
    ),
    "deploykit logs ": (
        *("collective_timeout", "[rank1]: flight recorder: rank 1 never made call 5", ""),
        {"RUN": "--help #"},
    ),
}


@pytest.mark.parametrize("start", DEPLOYKIT)
def test_what_deploykit_shows(start, project, capsys):
    cause, line, shown, words = DEPLOYKIT[start]
    Path("a.log").write_text(line + "\n")
    command = starting(commands(capsys, "a.log", cause), start)
    for word, value in words.items():
        command = command.replace(word, value)
    done = shell(command)
    assert done.returncode in {0, 80}, done.stderr
    assert shown in done.stdout
