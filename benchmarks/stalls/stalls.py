"""Two ranks, one of which stops making progress: `stalls.py KIND VICTIM`."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[int]):
    """Samples that never come: the file system does not answer."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        fifo().read_bytes()
        return index


def fifo() -> Path:
    """A new FIFO that nobody writes to."""
    path = Path(tempfile.mkdtemp(), "fifo")
    os.mkfifo(path)
    return path


def loads() -> None:
    """A worker of the data loader waits for a file system."""
    for _ in DataLoader(Slow(), num_workers=1):
        pass


def reads() -> None:
    """The rank itself does."""
    fifo().read_bytes()


def receives() -> None:
    """The rank is in another collective than the others."""
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def locks() -> None:
    """A lock is taken twice."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def joins() -> None:
    """A thread that never ends is joined."""
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


def stops() -> None:
    """Something has sent SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)


def spins() -> None:
    """An endless loop."""
    while True:
        pass


def resolves() -> None:
    """A look-up whose name server does not answer."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.sendto(b"?", server.getsockname())
    client.recv(512)


def connects() -> None:
    """A peer that is dead while its socket stays open."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.recv(1)


def gets() -> None:
    """A queue that nobody fills."""
    queue.Queue().get()


def waits() -> None:
    """A child process that does not end."""
    subprocess.Popen(["sleep", "900"]).wait()


def retries() -> None:
    """A loop that tries again for ever."""
    while True:
        time.sleep(1)


def flocks() -> None:
    """A lock on a file that another descriptor holds."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115
    path = Path(file.name)
    with path.open() as first, path.open() as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def pipes() -> None:
    """A pipe that nobody writes to."""
    os.read(os.pipe()[0], 1)


def naps() -> None:
    """A long sleep."""
    time.sleep(900)


def main() -> None:
    """Print once, then stop one rank; the others wait in a collective."""
    kind, victim = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    for step in range(3):
        print(f"step {step}", flush=True)
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == victim:
        globals()[kind]()
    dist.all_reduce(torch.ones(1))


main()
