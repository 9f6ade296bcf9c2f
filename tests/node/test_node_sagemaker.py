"""launch.py below SageMaker's toolkit, which passes the command and settings in its own way."""

from __future__ import annotations

import json

ARGS = ["--flag", "a b", "", "été", "--", "new\nline", "[1]", "null"]


def hyperparameters(words, size=40):
    text = json.dumps(words)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return {f"deploykit_argv_{number}": piece for number, piece in enumerate(pieces)}


def toolkit_argv(given):
    return [word for name, piece in sorted(given.items()) for word in (f"--{name}", piece)]


def start(bundle, as_rank, words, **env):
    given = hyperparameters(words)
    assert len(given) > 3
    hosts = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.1"}
    return bundle.run(
        *toolkit_argv(given),
        SM_HPS=json.dumps({**given, "other": 3}),
        DEPLOYKIT_BACKEND="sagemaker",
        **{**hosts, **as_rank, **env},
    )


DUMP = """\
    import json, os, sys
    print(json.dumps(sys.argv[1:]))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "OMP_NUM_THREADS"):
        print(name, os.environ.get(name))
    print("TOKEN", os.environ.get("TOKEN"), "DEPLOYKIT_ENV" in os.environ)
"""

WORDS = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--", "dump.py", *ARGS]


def test_the_command_comes_from_the_hyperparameters(bundle, as_rank):
    bundle.write("dump.py", DUMP)
    done = start(bundle, as_rank, WORDS, NCCL_SOCKET_IFNAME="eth0", NCCL_DEBUG="WARN")
    assert done.code == 0, done.log
    argv, *said = done.said["rank 3"]
    assert json.loads(argv) == ARGS
    assert said[:3] == ["NCCL_SOCKET_IFNAME =lo", "GLOO_SOCKET_IFNAME lo", "NCCL_DEBUG WARN"]
    assert not [
        author for author in done.said if author.startswith("node")
    ]  # only the first rank of a node says it


def test_the_users_settings_win_over_the_toolkits(bundle, as_rank):
    bundle.write("dump.py", DUMP)
    chosen = {"NCCL_SOCKET_IFNAME": "efa0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    done = start(
        bundle,
        {**as_rank, "LOCAL_RANK": 0},
        WORDS,
        NCCL_SOCKET_IFNAME="eth0",
        NCCL_DEBUG="WARN",
        OMP_NUM_THREADS=1,
        DEPLOYKIT_ENV=json.dumps(chosen),
        DEPLOYKIT_SECRETS=json.dumps({"TOKEN": "secret:env:OTHER"}),
        OTHER="s3cret",
    )
    assert done.code == 0, done.log
    assert done.said["rank 3"][1:] == [
        "NCCL_SOCKET_IFNAME efa0",
        "GLOO_SOCKET_IFNAME lo",
        "NCCL_DEBUG INFO",
        "OMP_NUM_THREADS 4",
        "TOKEN s3cret False",
    ]
    (line,) = done.said["node 1"]
    assert "; keeping your NCCL_SOCKET_IFNAME=efa0 (WARNING" in line


def test_too_few_ranks_are_refused(bundle, as_rank):
    bundle.write("dump.py", DUMP)
    done = start(bundle, {**as_rank, "WORLD_SIZE": 2, "RANK": 1}, WORDS)
    assert done.code == 78
    assert "2 node(s) x 2 processes = 4 ranks, but torchrun started 2" in done.log
    assert "Traceback" not in done.log


def test_a_missing_piece_of_the_command_is_an_error(bundle, as_rank):
    given = hyperparameters(WORDS)
    del given["deploykit_argv_1"]
    done = bundle.run("--deploykit_argv_0", "x", SM_HPS=json.dumps(given), **as_rank)
    assert done.code == 64
    assert "contain no valid command" in done.log
    assert "Traceback" not in done.log


def test_a_host_that_does_not_resolve_does_not_stop_the_job(bundle, as_rank):
    bundle.write("dump.py", DUMP)
    first = {**as_rank, "LOCAL_RANK": 0, "SM_HOSTS": '["algo-1.invalid", "algo-2.invalid"]'}
    done = start(bundle, first, WORDS, NCCL_SOCKET_IFNAME="eth0")
    assert done.code == 0, done.log
    assert done.said["rank 3"][1] == "NCCL_SOCKET_IFNAME eth0"
    assert done.said["node 1"] == [
        "network: no interface chosen, because there is no route to another node of the job"
    ]


def test_a_group_that_does_not_train_runs_the_program_once_without_a_rank(bundle):
    bundle.write("dump.py", "import os\nprint('RANK' in os.environ, os.environ['NCCL_DEBUG'])")
    groups = {
        "SM_CURRENT_INSTANCE_GROUP": "cpu",
        "SM_DISTRIBUTION_INSTANCE_GROUPS": '["gpu"]',
        "DEPLOYKIT_ENV": json.dumps({"NCCL_DEBUG": "INFO"}),
    }
    done = start(bundle, groups, WORDS, NCCL_DEBUG="WARN")
    assert done.code == 0, done.log
    assert "[group cpu] False INFO\n" in done.log


def test_debug_is_not_undone_by_the_toolkit_and_keeps_the_users_value(bundle, as_rank):
    names = ("NCCL_DEBUG", "LOGLEVEL", "TORCH_CPP_LOG_LEVEL")
    bundle.write("dump.py", f"import os; print(*(os.environ[name] for name in {names}))")
    mine = {"DEPLOYKIT_DEBUG": 1, "LOGLEVEL": "ERROR", "NCCL_DEBUG": "WARN"}
    done = start(bundle, as_rank, WORDS, **mine)
    assert done.said["rank 3"] == ["INFO ERROR INFO"], done.log
    chosen = json.dumps({"NCCL_DEBUG": "TRACE"})
    done = start(bundle, as_rank, WORDS, DEPLOYKIT_ENV=chosen, **mine)
    assert done.said["rank 3"] == ["TRACE ERROR INFO"], done.log
