"""What ranks use: a real process that computes, and a library in place of NVML."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess

import pytest

from deploykit.observe import usage as read
from deploykit_node import records
from deploykit_node.observe import usage
from tests.backends.slurm.slurm_helpers import wait_for
from tests.node.test_node_stall import ALONE, SLEEPS, SPINS, Node
from tests.programs import needs

NVML = """\
#include <string.h>
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index > 1) return 2;
    *handle = &devices[index];
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) {
    *handle = &devices[1];
    return strcmp(name, "GPU-b") ? 6 : 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    rates[0] = 40 + *(int *)handle;
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    strncpy(name, *(int *)handle ? "GPU two" : "GPU one", size);
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, "550.54.15", size);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = 80ull << 30;
    memory[2] = 3ull << 30;
    return 0;
}
"""


@pytest.fixture
def node(tmp_path):
    nodes = []

    def begin(program):
        nodes.append(Node(tmp_path, program))
        return nodes[-1]

    yield begin
    for one in nodes:
        one.stop()


def test_cpu_and_memory_of_a_rank_are_recorded_until_it_ends(node, monkeypatch):
    monkeypatch.setattr(usage, "EVERY", 0.1)
    one = node(SPINS)
    recorder = usage.Recorder(one.env, ALONE, one.ranks)

    def computes():
        recorder.look()
        found = read.read(one.run, 0)
        return found[0] if found and (found[0].cpu or 0) > 0 else None

    rank = wait_for(computes)
    assert (rank.rank, rank.node, rank.gpu) == (0, 0, None)
    assert rank.memory > 1 << 20
    assert read.read(one.run, 1) == []  # of another attempt
    records.record_node(one.env, 0, records.NodeExit(0, ""))
    assert read.read(one.run, 0) == []
    told = json.loads((one.run / "exit_records/software.json").read_text())
    assert told["versions"]["Python"] == platform.python_version()
    assert told["versions"]["torch"] == importlib.metadata.version("torch")
    assert (told["gpus"], told["driver"]) == ([], "")


def test_a_rank_that_sleeps_uses_no_cpu(node, monkeypatch):
    monkeypatch.setattr(usage, "EVERY", 0.0)
    one = node(SLEEPS)
    recorder = usage.Recorder(one.env, ALONE, one.ranks)

    def rests():
        recorder.look()
        (rank,) = read.read(one.run, 0)
        return rank.cpu == 0.0

    assert wait_for(rests)


def test_the_history_keeps_what_was_greatest_and_grows_ever_more_slowly(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 5))
    monkeypatch.setattr(usage.time, "monotonic", lambda: float(next(clock)))
    history = usage._History(tmp_path / "exit_records/history-2.jsonl")
    (tmp_path / "exit_records").mkdir()
    nothing = {"gpu": None, "gpu_memory": None, "gpu_size": None}
    for look in range(4000):
        one = {"cpu": None if look == 0 else 50.0 + look % 2, "rss": 1000 + (look % 7), **nothing}
        moment = f"2026-11-24T{look // 3600:02}:{look // 60 % 60:02}:{look % 60:02}.000Z"
        history.add({"time": moment, "attempt": 1, "ranks": {"8": one}})
    found = read.history(tmp_path)
    assert len(found) == 429  # in 20,000 s
    assert (found[0].usage.rank, found[0].usage.node, found[0].usage.cpu) == (8, 2, None)
    assert {(one.usage.cpu, one.usage.memory) for one in found[-20:]} == {(51.0, 1006)}


@pytest.mark.parametrize("text", ["", "{", '{"attempt": 0, "ranks": []}'])
def test_a_record_that_is_no_record_is_left_out(tmp_path, text):
    (tmp_path / "exit_records").mkdir()
    (tmp_path / "exit_records/usage-0.json").write_text(text)
    assert read.read(tmp_path, 0) == []


@needs("gcc")
@pytest.mark.parametrize(
    ("visible", "percents"),
    [
        (None, [40, 41, None]),
        ("1,0", [41, 40]),
        ("GPU-b", [41]),
        ("0,7,1", [40, None]),
        ("", [None]),
    ],
)
def test_gpus_are_those_that_the_ranks_see(tmp_path, visible, percents):
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvml.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    devices = usage.Devices(env, str(library))
    found = [devices.read(position) for position in range(len(percents))]
    assert [gpu and gpu.percent for gpu in found] == percents
    assert all(gpu is None or (gpu.used, gpu.size) == (3 << 30, 80 << 30) for gpu in found)
    called = {40: "GPU one", 41: "GPU two", None: None}
    assert devices.names() == [called[percent] for percent in percents if percent]
    assert devices.driver() == ("550.54.15" if devices.names() else "")


def test_without_nvml_there_are_no_gpus():
    devices = usage.Devices({}, "libno-such-library.so")
    assert (devices.read(0), devices.names(), devices.driver()) == (None, [], "")
