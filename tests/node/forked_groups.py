"""Process groups in network namespaces, many with a single import of torch.

Reads cases as JSON: each a list of nodes. Forks for every node, moves into its namespace and its
/etc/hosts, and joins the group in one of two ways: as launch.py and torchrun's own agent do
(`way` is "ours"), or by gloo alone, with a fixed interface or none. A fork of a process with
threads, as torchrun's agent is one, hangs once in a while: then the case is tried again.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime as dt
import json
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch

from deploykit_node import cluster, command
from deploykit_node import node as node_launcher
from deploykit_node.network import (
    elastic,  # noqa: F401 - torchrun then knows our rendezvous
    interfaces,
)

_NEW_NET, _NEW_NS, _NEW_UTS = 0x40000000, 0x00020000, 0x04000000
_BIND, _PRIVATE_ALL = 4096, (1 << 18) | 16384
_AT_ONCE = 5
_LONGEST = 120
_TRIES = 3
_TIMEOUT = dt.timedelta(seconds=20)
_LIBC = ctypes.CDLL(None, use_errno=True)


def _move(node):
    """Enter the node's network, with its own host name and /etc/hosts."""
    with Path("/var/run/netns", node["machine"]).open() as file:
        _checked(_LIBC.setns(file.fileno(), _NEW_NET))
    _checked(_LIBC.unshare(_NEW_NS | _NEW_UTS))
    _checked(_LIBC.mount(b"none", b"/", None, _PRIVATE_ALL, None))
    _checked(_LIBC.mount(node["hosts"].encode(), b"/etc/hosts", None, _BIND, None))
    socket.sethostname(node["hostname"])


def _checked(code):
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ours(node):
    env = {**os.environ, **node["env"]}
    here = cluster.find(env)
    meeting = node_launcher._connect(command.Command((), ()), env, here)
    os.environ.update(env)
    argv = ["--nnodes=2", "--nproc-per-node=1", *meeting.options(), "unused.py"]
    if meeting.held:
        meeting.held.detach()  # the store's now, as below launch.py
    config, _, _ = torchrun.config_from_args(torchrun.parse_args(argv))
    elastic_launch(dataclasses.replace(config, start_method="fork"), _rank)()


def _rank():
    distributed.init_process_group("gloo", timeout=_TIMEOUT)
    _add_up()


def _fixed(node):
    os.environ.update(node["env"])
    rule = node["way"]
    if rule.startswith("^"):
        rule = _left_by(rule[1:].split(","))
    if rule:
        os.environ["GLOO_SOCKET_IFNAME"] = rule
    store = distributed.FileStore(node["store"], 2)
    rank = node["rank"]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    _add_up()


def _left_by(excluded):
    """The first interface that NCCL's rule leaves: up, with an address, none of the prefixes."""
    held = {**interfaces._interfaces_v4(), **interfaces._interfaces_v6()}
    for _, name in socket.if_nameindex():
        if (
            name in held.values()
            and interfaces.is_up(name)
            and not name.startswith(tuple(excluded))
        ):
            return name
    raise RuntimeError("no socket interface found")


def _add_up():
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    assert ones.item() == 2, ones


def _child(node):
    """Ends with 0 where the group was formed; the log tells the rest."""
    signal.alarm(_LONGEST)
    os.setsid()
    log = os.open(node["log"], os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _move(node)
        _ours(node) if node["way"] == "ours" else _fixed(node)
    except cluster.LaunchError as error:
        print(error, flush=True)  # noqa: T201 - its log
        os._exit(78)
    except BaseException:  # noqa: BLE001 - a fork must not return
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main():
    waiting = json.load(sys.stdin)
    running, codes, tries = {}, {}, Counter()
    while waiting or running:
        while waiting and len(running) < 2 * _AT_ONCE:
            running |= _start(waiting.pop())
        pid, status = os.wait()
        node, case, pair = running.pop(pid)
        codes[node["log"]] = os.waitstatus_to_exitcode(status)
        if status and node["way"] != "ours":  # the other one would wait for it until its time-out
            for other in pair.intersection(running):
                os.kill(other, signal.SIGKILL)
        if not pair.intersection(running) and _hung(case, codes):
            tries[node["store"]] += 1
            if tries[node["store"]] < _TRIES:
                _clear(case, pair)
                waiting.append(case)
    told = {log: [code, Path(log).read_text()] for log, code in codes.items()}
    json.dump(told, sys.stdout)


def _start(case):
    """The processes of a case: each with its node, the case, and those that belong together."""
    for node in case:
        Path(node["log"]).touch()  # one that is ended early has written nothing
    pids = [os.fork() or _child(node) for node in case]
    return {pid: (node, case, set(pids)) for pid, node in zip(pids, case, strict=True)}


def _hung(case, codes):
    """Whether the alarm has ended one that joins our way: there, everything else has an end."""
    return any(node["way"] == "ours" and codes[node["log"]] == -signal.SIGALRM for node in case)


def _clear(case, pair):
    """Clean up after a try: ranks of its agents, log, port."""
    for pid in pair:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for node in case:
        Path(node["log"]).unlink()
        Path(node["env"]["DEPLOYKIT_RUN_DIR"], "rendezvous.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
