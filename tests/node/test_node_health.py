"""The health of nodes: faults that a stand-in for NVML, the kernel's files and disks show."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploykit_node.preflight import gpus, health
from deploykit_node.preflight.health import Health
from tests.node import netns
from tests.node.test_node_preflight import HELLO, NODES, emulated, judged, told

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


@pytest.mark.parametrize(
    ("name", "value", "says", "fatal"),
    [
        ("nvmlDeviceGetTotalEccErrors", 2, "had 2 uncorrectable", True),
        ("nvmlDeviceGetRemappedRows", [0, 1, 0, 1], "row remapping failed", True),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 0], "must be reset", True),
        ("nvmlDeviceGetRemappedRows", [0, 3, 0, 0], "remapped 3 bad", False),
        ("nvmlDeviceGetHandleByIndex", "lost", "lost to the driver", True),
        ("nvmlDeviceGetTemperature", "lost", "lost to the driver", True),
        ("nvmlDeviceGetTemperature", 86, "86 °C while idle", False),
        (
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            0x40,
            "overheating and throttled by its hardware",
            False,
        ),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x80, "power supply's brake", False),
        ("nvmlDeviceGetApplicationsClock", 345, "345 MHz of 1980", False),
        ("nvmlDeviceGetCurrPcieLinkWidth", 4, "4 of 16 PCIe lanes", False),
        ("down", [3, 4], "NVLinks down (3, 4)", False),
        ("used", 70 << 30, "already has 70.0 GiB", False),
        ("nvmlDeviceGetEccMode", [0, 1], "pending ECC mode change", False),
    ],
)
def test_a_fault_of_a_gpu_is_named(nvml, name, value, says, fatal):
    found = nvml({"1": {name: value}})
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
    monkeypatch.setattr(health, "DRIVER", tmp_path)
    assert nvml({"init": "fails"}).faults == [
        ("NVIDIA's driver does not respond: Driver Not Loaded", True)
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
    monkeypatch.setattr(health, "DEVICES", tmp_path)
    device(tmp_path, "efa_0", "4: ACTIVE", rx_drops=3)
    device(tmp_path, "efa_1", "4: ACTIVE", rx_drops=70_000)
    device(tmp_path, "mlx5_0", "1: DOWN", symbol_error=0)
    device(tmp_path, "mlx5_1", "4: ACTIVE", symbol_error=123_456)
    found = Health()
    health.check_devices(found)
    assert [text for text, _ in found.faults] == [
        "efa_1 has counted 70000 dropped packets: check its cable and its switch",
        "InfiniBand device mlx5_0 is DOWN: check its cable, or restart the node",
        "mlx5_1 has counted 123456 symbol errors: check its cable and its switch",
    ]
    assert found.counts == {
        "active EFA devices": 2,
        "active InfiniBand devices": 1,
    }


def test_what_the_network_devices_of_a_node_carry(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(health, "INTERFACES", tmp_path / "net")
    assert health.line_rate(None) is None
    assert health.line_rate("eth0") is None
    (tmp_path / "net/eth0").mkdir(parents=True)
    for speed, rate in (("25000", 3.125e9), ("-1", None), ("unknown", None)):
        (tmp_path / "net/eth0/speed").write_text(f"{speed}\n")
        assert health.line_rate("eth0") == rate
    for name, state in (("efa_0", "4: ACTIVE"), ("efa_1", "4: ACTIVE"), ("efa_2", "1: DOWN")):
        device(tmp_path / "infiniband", name, state, rate="100 Gb/sec (4X EDR)")
    for port in (tmp_path / "infiniband").glob("*/ports/1"):
        (port / "counters/rate").rename(port / "rate")
    assert health.line_rate("eth0") == 25e9


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
    monkeypatch.setattr(health, "KERNEL_LOG", log)
    found = Health()
    health.check_kernel_log(found)
    texts = [text for text, fatal in found.faults if not fatal]
    assert len(texts) == (KERNEL[line] is not None)
    assert all(KERNEL[line] in text and "long ago" not in text for text in texts)


def test_a_disk_that_is_full(tmp_path):
    netns.needed()
    script = (
        f"mount -t tmpfs -o size=100k none {tmp_path} && exec {sys.executable} -c "
        "'import json, sys; from deploykit_node.preflight import health; found = health.Health();"
        'health.check_disks(found, {"DEPLOYKIT_OUTPUT_DIR": sys.argv[1]});'
        f"print(json.dumps(found.faults))' {tmp_path}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"PYTHONPATH": str(Path(health.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [
        [f"cannot write to {tmp_path}: No space left on device", True]
    ]


def test_a_folder_that_takes_a_file_has_no_fault_and_keeps_none(tmp_path):
    found = Health()
    health.check_disks(found, {"TMPDIR": str(tmp_path), "DEPLOYKIT_OUTPUT_DIR": "s3://b/out"})
    assert (found.faults, list(tmp_path.iterdir())) == ([], [])


def test_a_check_that_hangs_or_breaks_keeps_the_others():
    free = threading.Event()
    checks = {"GPUs": lambda _: 1 / 0, "network devices": lambda _: free.wait()}
    found = health.Running(checks).record(time.monotonic() + 0.2)
    free.set()
    assert found["faults"] == [
        ("checking its network devices timed out: a driver or disk may be hanging", False)
    ]
    assert found["skipped"] == ["GPUs (ZeroDivisionError('division by zero'))"]


@pytest.mark.parametrize(
    ("node", "fatal", "warning"),
    [
        ({}, [], []),
        ({"counts": {"GPUs": 7}}, ["node 2 (c, 10.0.0.2): 7 GPUs, but most nodes have 8"], []),
        ({"faults": [["GPU 3 is lost", True]]}, ["node 2 (c, 10.0.0.2): GPU 3 is lost"], []),
        ({"faults": [["GPU 3 is hot", False]]}, [], ["node 2 (c, 10.0.0.2): GPU 3 is hot"]),
    ],
)
def test_a_node_differs_from_the_others(node, fatal, warning):
    rows = told()
    for number in NODES:
        rows[number]["health"]["counts"] = {"GPUs": 8}
    rows[2]["health"] |= node
    assert judged(rows) == [fatal, warning]


@pytest.mark.parametrize(
    ("code", "faults", "skipped"),
    [
        (0, [], []),
        (226, [False], []),
        (205, [True], []),
        (255, [], ["DCGM (exit code 255 of dcgmi)"]),
        ("hangs", [], ["DCGM (no result in 0 s)"]),
    ],
)
def test_the_exit_code_of_dcgm_counts(tmp_path, monkeypatch, code, faults, skipped):
    """226 and 205 are those of a failed test and of a GPU that has to be isolated."""
    program = tmp_path / "dcgmi"
    end = "sleep 60" if code == "hangs" else f"exit {code}"
    program.write_text(f'#!/bin/sh\n[ "$*" = "diag --run 1" ] || exit 9\n{end}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if code == "hangs":
        monkeypatch.setattr(health, "_DCGM_SECONDS", 0.3)
    found = Health()
    health.check_dcgm(found)
    assert ([fatal for _, fatal in found.faults], found.skipped) == (faults, skipped)


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 1", "a/cpu.max": "15 10", "cpu.max": "9 1"}, 2),
        *(("0::/\n", {"cpu.max": text}, 99) for text in ("", "max 100000", "x y", "5", "1 0")),
        ("4:memory:/x\n", {}, 99),
    ],
)
def test_the_smallest_limit_of_processors_counts(tmp_path, monkeypatch, own, files, count):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(health, "OWN_CPU_GROUP", tmp_path / "own")
    monkeypatch.setattr(health, "CPU_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    found = Health()
    health.check_processors(found)
    assert found.counts == {"CPUs": count}


@pytest.mark.slow
def test_a_job_with_a_bad_gpu_does_not_start_and_says_which_node(bundle):
    bundle.write("hello.py", HELLO)
    bad = {"1": {"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]}}
    nodes = [{}, {"FAKE_NVML": json.dumps(bad)}]
    ends = emulated(bundle, per_node=nodes, PYTHONPATH=FAKE, DEPLOYKIT_PREFLIGHT=120)
    for node, done in enumerate(ends):
        assert done.code == 78, done.log
        assert "trained" not in done.log
        assert "): GPU 1 could not remap a bad memory row" in bundle.end(f"node-{node}")["reason"]
    unhealthy = bundle.end("unhealthy-0")
    assert unhealthy["failed_check"]
    (reason,) = unhealthy["hosts"].values()
    assert reason.startswith(
        "node 1 (127.0.0.1, 127.0.0.2): GPU 1 could not remap a bad memory row"
    )
