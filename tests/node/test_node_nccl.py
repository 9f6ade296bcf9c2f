"""Variables for NCCL and PyTorch: which are set on which machine; the user's are kept."""

from __future__ import annotations

import importlib.metadata

import pytest

from deploykit_node import nccl
from deploykit_node.nccl import Machine

CPU = Machine(gpus=False, efa=False, torch=(2, 13))
GPUS = Machine(gpus=True, efa=False, torch=(2, 13))
RUN = {"DEPLOYKIT_RUN_DIR": "/runs/one"}
DEBUG = {**RUN, "DEPLOYKIT_DEBUG": "1"}

# NVIDIA's debugging switches, dead names, and what harms: ../reference of NCCL, aws-ofi-nccl
NEVER = {
    *("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_TIMEOUT", "NCCL_SOCKET_TIMEOUT"),
    *("NCCL_DESYNC_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "RDMAV_FORK_SAFE"),
    *("FI_PROVIDER", "FI_EFA_FORK_SAFE", "FI_EFA_USE_DEVICE_RDMA", "NCCL_NVLS_ENABLE"),
}


def chosen(here, env, user=()):
    return {name: value for name, value, _ in nccl.choose(here, env, dict(user))}


def test_a_machine_without_gpus_gets_none():
    assert chosen(CPU, RUN) == {}


def test_with_gpus_the_flight_recorder_is_on():
    assert chosen(GPUS, RUN) == {
        "NCCL_DEBUG": "WARN",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/one/debug/fr_",
    }


def test_an_older_pytorch_reads_other_names():
    found = chosen(GPUS._replace(torch=(2, 8)), RUN)
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/runs/one/debug/fr_"
    assert not [name for name in found if name.startswith("TORCH_FR")]


def test_debug_writes_a_file_for_each_process():
    found = chosen(GPUS, DEBUG)
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["NCCL_DEBUG_FILE"] == "/runs/one/debug/nccl.%h.%p.log"
    assert found["TORCH_CPP_LOG_LEVEL"] == found["LOGLEVEL"] == "INFO"
    assert chosen(CPU, DEBUG) == found


def test_where_there_is_no_folder_no_file_is_named():
    for env in ({}, {"DEPLOYKIT_OUTPUT_DIR": "s3://bucket/out"}):
        found = chosen(GPUS, {**env, "DEPLOYKIT_DEBUG": "1"})
        assert not [name for name in found if name.endswith("_FILE")]
    assert chosen(GPUS, {"DEPLOYKIT_OUTPUT_DIR": "/out"})["TORCH_FR_DUMP_TEMP_FILE"] == (
        "/out/debug/fr_"
    )


def test_efa_is_seen_and_needs_one_variable(tmp_path):
    driver = tmp_path / "sys/bus/pci/drivers/efa"
    device = tmp_path / "sys/class/infiniband/rdmap0s6/device"
    for folder in (driver, device):
        folder.mkdir(parents=True)
    assert not nccl.machine(tmp_path).efa
    (device / "driver").symlink_to(driver)
    here = nccl.machine(tmp_path)
    assert here.efa
    assert not here.gpus
    assert chosen(here, RUN) == {"FI_EFA_USE_HUGE_PAGE": "0"}


def test_the_version_is_that_of_the_package():
    found = importlib.metadata.version("torch").split(".")[:2]
    assert nccl._torch() == tuple(map(int, found))


@pytest.mark.parametrize("env", [RUN, DEBUG])
@pytest.mark.parametrize("efa", [False, True])
def test_the_users_values_are_kept_and_nothing_harmful_is_set(env, efa):
    here = GPUS._replace(efa=efa)
    ours = chosen(here, env)
    assert not NEVER & set(ours)
    for name in ours:
        assert name not in chosen(here, env, {name: "mine"})
    assert chosen(here, env, ours) == {}
    assert all(why for _, _, why in nccl.choose(here, env, {}))


@pytest.mark.torch
def test_debug_on_a_node(bundle):
    bundle.write("show.py", 'import os; print(os.environ["NCCL_DEBUG"], os.environ["LOGLEVEL"])')
    words = ("torchrun", "--nnodes=1", "--nproc-per-node=1", "--", "show.py")
    done = bundle.run(*words, DEPLOYKIT_DEBUG=1, NCCL_DEBUG="TRACE")
    assert done.code == 0, done.log
    assert "TRACE INFO" in done.said["rank 0"]
    assert "setting LOGLEVEL=INFO: log the steps of torchrun's agent" in done.said["node 0"]
    assert (bundle.run_dir / "debug").is_dir()
