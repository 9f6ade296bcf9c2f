"""The health of nodes: faults that a stand-in for NVML, the kernel's files and disks show."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploykit_node.preflight import findings, line_rate
from deploykit_node.preflight.health import checks, fabric, gpus, judge, machine
from deploykit_node.preflight.health.record import Health
from tests.node import netns
from tests.node.test_node_preflight import HELLO, NODES, PLAN, emulated, told

FAKE = Path(__file__).parent / "fake_nvml"


@pytest.fixture
def nvml(monkeypatch):
    """Sets the faults of the GPUs, and returns what the check finds."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def check(faults):
        monkeypatch.setenv("FAKE_NVML", json.dumps(faults))
        found = Health()
        gpus.check(found)
        return found

    yield check
    sys.modules.pop("pynvml", None)


GPU_FAULTS = {
    "an uncorrectable error": (
        {"1": {"nvmlDeviceGetTotalEccErrors": 2}},
        "had 2 uncorrectable",
        True,
    ),
    "a bad row": ({"1": {"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]}}, "row remapping failed", True),
    "a pending row": (
        {"1": {"nvmlDeviceGetRemappedRows": [0, 1, 1, 0]}},
        "waits for a reset",
        True,
    ),
    "a replaced row": ({"1": {"nvmlDeviceGetRemappedRows": [0, 3, 0, 0]}}, "replaced 3 bad", False),
    "no handle": ({"1": {"nvmlDeviceGetHandleByIndex": "lost"}}, "lost to the driver", True),
    "lost later": ({"1": {"nvmlDeviceGetTemperature": "lost"}}, "lost to the driver", True),
    "heat": ({"1": {"nvmlDeviceGetTemperature": 86}}, "86 °C before any work", False),
    "slow by heat": (
        {"1": {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x40}},
        "by its hardware, as it is too hot",
        False,
    ),
    "slow by power": (
        {"1": {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x80}},
        "the power supply's brake",
        False,
    ),
    "a clock": ({"1": {"nvmlDeviceGetApplicationsClock": 345}}, "345 of 1980 MHz", False),
    "PCIe": ({"1": {"nvmlDeviceGetCurrPcieLinkWidth": 4}}, "4 of 16 PCIe lanes", False),
    "NVLink": ({"1": {"down": [3, 4]}}, "NVLink 3, 4 down", False),
    "memory in use": ({"1": {"used": 70 << 30}}, "70.0 GiB in use before", False),
    "ECC mode": ({"1": {"nvmlDeviceGetEccMode": [0, 1]}}, "changes its ECC mode", False),
}


@pytest.mark.parametrize("name", GPU_FAULTS)
def test_a_fault_of_a_gpu_is_named(nvml, name):
    faults, says, fatal = GPU_FAULTS[name]
    found = nvml(faults)
    assert found.counts == {"GPUs": 8}
    ((text, is_fatal),) = found.faults
    assert text.startswith("GPU 1 ")
    assert says in text
    assert is_fatal == fatal


def test_healthy_gpus_have_no_faults(nvml):
    old = {"nvmlDeviceGetRemappedRows": "unsupported", "nvmlDeviceGetEccMode": "unsupported"}
    for faults in ({}, {"0": old}, {"count": 0}):
        assert nvml(faults).faults == []


def test_a_driver_that_does_not_answer(nvml, monkeypatch, tmp_path):
    assert nvml({"init": "fails"}).faults == []  # a machine without GPUs
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
    assert nvml({"init": "fails"}).faults == [
        ("NVIDIA's driver does not answer: Driver Not Loaded", True)
    ]


@pytest.mark.skipif(not importlib.util.find_spec("pynvml"), reason="optional: no nvidia-ml-py")
def test_the_stand_in_has_only_names_of_the_real_module(nvml):
    nvml({})
    names = {name for name in dir(sys.modules["pynvml"]) if name.startswith(("nvml", "NVML"))}
    del sys.modules["pynvml"]
    sys.path.remove(str(FAKE))
    assert names <= set(dir(importlib.import_module("pynvml")))


def device(root, name, state, **counters):
    port = root / name / "ports" / "1"
    for folder in ("counters", "hw_counters"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    for counter, value in counters.items():
        folder = "counters" if counter != "rx_drops" else "hw_counters"
        (port / folder / counter).write_text(f"{value}\n")


def test_devices_that_are_down_or_count_errors(monkeypatch, tmp_path):
    monkeypatch.setattr(fabric, "DEVICES", tmp_path)
    device(tmp_path, "efa_0", "4: ACTIVE", rx_drops=3)
    device(tmp_path, "efa_1", "4: ACTIVE", rx_drops=70_000)
    device(tmp_path, "mlx5_0", "1: DOWN", symbol_error=0)
    device(tmp_path, "mlx5_1", "4: ACTIVE", symbol_error=123_456)
    found = Health()
    fabric.check(found)
    assert [text for text, _ in found.faults] == [
        "efa_1 has counted 70000 dropped packets: check its cable and its switch",
        "InfiniBand device mlx5_0 is DOWN: check its cable, or restart the node",
        "mlx5_1 has counted 123456 symbol errors: check its cable and its switch",
    ]
    assert found.counts == {
        "EFA devices that are active": 2,
        "InfiniBand devices that are active": 1,
    }


def test_what_the_network_devices_of_a_node_carry(monkeypatch, tmp_path):
    monkeypatch.setattr(fabric, "DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(line_rate, "INTERFACES", tmp_path / "net")
    assert line_rate.of_node(None) is None
    assert line_rate.of_node("eth0") is None
    (tmp_path / "net/eth0").mkdir(parents=True)
    for speed, rate in (("25000", 3.125e9), ("-1", None), ("unknown", None)):
        (tmp_path / "net/eth0/speed").write_text(f"{speed}\n")
        assert line_rate.of_node("eth0") == rate
    for name, state in (("efa_0", "4: ACTIVE"), ("efa_1", "4: ACTIVE"), ("efa_2", "1: DOWN")):
        device(tmp_path / "infiniband", name, state, rate="100 Gb/sec (4X EDR)")
    for port in (tmp_path / "infiniband").glob("*/ports/1"):
        (port / "counters/rate").rename(port / "rate")
    assert line_rate.of_node("eth0") == 25e9


KERNEL = {
    "NVRM: Xid (PCI:0000:53:00): 79, pid=0, GPU has fallen off the bus.": "Xid 79",
    "NVRM: Xid (PCI:0000:53:00): 31, pid=9, MMU Fault": None,
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal": "SXid 12028",
    "mce: [Hardware Error]: Machine check events logged": "hardware error",
    "blk_update_request: critical medium error, dev nvme0n1, sector 7": "a file system or disk",
    "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received": "a PCIe device",
    "Out of memory: Killed process 77 (python)": "out of memory",
    "mlx5_core 0000:08:00.0 ens1: Link is Down": "a network link went down",
    "usb 1-1: new high-speed USB device": None,
}


@pytest.mark.parametrize("line", KERNEL)
def test_a_line_of_the_kernel_that_matters(monkeypatch, tmp_path, line):
    log, now = tmp_path / "kmsg", int(time.monotonic() * 1e6)
    log.write_text(
        f"6,1,{now - int(4e9)},-;{line} long ago\n6,2,{now},-;{line}\n6,3,{now},-;{line}\n"
    )
    monkeypatch.setattr(machine, "KERNEL_LOG", log)
    found = Health()
    machine.check_kernel_log(found)
    texts = [text for text, fatal in found.faults if not fatal]
    assert len(texts) == (KERNEL[line] is not None)
    assert all(KERNEL[line] in text and "long ago" not in text for text in texts)


def test_a_disk_that_is_full(tmp_path):
    netns.needed()
    script = (
        f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "
        "'import json, sys; from deploykit_node.preflight.health import machine, record;"
        'health = record.Health(); machine.check_disks(health, {"TMPDIR": sys.argv[1]}, 1);'
        f"print(json.dumps(health.faults))' {tmp_path}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"PYTHONPATH": str(Path(checks.__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [
        [f"cannot write into {tmp_path}: No space left on device", True]
    ]


def test_a_check_that_hangs_or_breaks_keeps_the_others(monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(gpus, "check", lambda _: 1 / 0)
    monkeypatch.setattr(fabric, "check", lambda _: free.wait())
    found = checks.Running({}, 1).record(time.monotonic() + 0.2)
    free.set()
    assert found["faults"] == [
        ["the check of its network devices has not ended: a driver or a disk that hangs?", False]
    ]
    assert found["skipped"] == ["GPUs (ZeroDivisionError('division by zero'))"]


def test_this_machine_has_a_speed(tmp_path):
    found = checks.Running({"TMPDIR": str(tmp_path)}, 1).record(time.monotonic() + 250)
    assert {"memory", f"disk {tmp_path}"} <= set(found["speeds"])
    assert list(tmp_path.iterdir()) == []


def rows(**healths):
    """What four nodes report, with the health of some, such as ``n2={"counts": {"GPUs": 7}}``."""
    found = told()
    usual = {"faults": [], "counts": {"GPUs": 8}, "speeds": {"memory": 1e10}, "skipped": []}
    for node in NODES:
        found[node]["health"] = {**usual, **healths.get(f"n{node}", {})}
    return found


def test_a_node_differs_from_the_others():
    assert findings.judge_pairs(PLAN, rows()) == []
    (found,) = findings.judge_pairs(PLAN, rows(n2={"counts": {"GPUs": 7}}))
    assert found == ("node 2 (c, 10.0.0.2): 7 GPUs, where most nodes have 8", True)
    (found,) = findings.judge_pairs(PLAN, rows(n2={"speeds": {"memory": 1e9}}))
    assert found.text.startswith("node 2 (c, 10.0.0.2): memory reaches 10% of the median")
    assert not found.fatal
    (found,) = findings.judge_pairs(PLAN, rows(n1={"faults": [["GPU 3 is lost", True]]}))
    assert found == ("node 1 (b, 10.0.0.1): GPU 3 is lost", True)


def test_a_gpu_that_multiplies_slowly_or_wrongly():
    speeds = {node: {"GPU 5, multiplying": 6e14} for node in NODES[:3]}
    speeds[3] = {"GPU 5, multiplying": 4e14}
    ((text, fatal),) = judge.slow(PLAN, speeds)
    assert text.startswith("node 3 (d, 10.0.0.3): GPU 5, multiplying reaches 67% of the median of")
    assert not fatal
    well = {"torch": "2.9.0", "NCCL": None, "backend": "gloo", "port": 1, "speeds": {}}
    reports = {node: {**well, "correct": node != 2} for node in NODES}
    (found,) = findings.judge_versions(PLAN, reports)
    assert found.fatal
    assert found.text.startswith("node 2 (c, 10.0.0.2) multiplies matrices wrongly")


@pytest.mark.slow
def test_a_job_with_a_bad_gpu_does_not_start_and_says_which_node(bundle):
    bundle.write("hello.py", HELLO)
    bad = {"1": {"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]}}
    nodes = [{}, {"FAKE_NVML": json.dumps(bad)}]
    ends = emulated(bundle, per_node=nodes, PYTHONPATH=FAKE, DEPLOYKIT_PREFLIGHT=120)
    for node, done in enumerate(ends):
        assert done.code == 78, done.log
        assert "trained" not in done.log
        assert "): GPU 1 could not replace a bad row" in bundle.end(f"node-{node}")["reason"]
    unhealthy = bundle.end("unhealthy-0")
    assert unhealthy["failed_check"]
    (reason,) = unhealthy["hosts"].values()
    assert reason.startswith("node 1 (127.0.0.1, 127.0.0.2): GPU 1 could not replace a bad row")
