"""Machines made of network namespaces: interfaces, a switch between them, and their host names."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.programs import need

_COUNT = itertools.count()


def needed(*programs: str) -> None:
    """Skip if namespaces cannot be created here."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    need("ip", "unshare", *programs)


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Lab:
    """Namespaces of one test, removed at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tag = f"dk{os.getpid()}x{next(_COUNT)}"
        self._names: list[str] = []
        self._hosts: dict[str, tuple[str, Path]] = {}
        self._running: list[subprocess.Popen[str]] = []

    def machine(self, name: str) -> str:
        """A namespace with nothing but loopback. Returns its full name."""
        full = f"{self._tag}{name}"
        ip("netns", "add", full)
        self._names.append(full)
        ip("-n", full, "link", "set", "lo", "up")
        return full

    def switch(self, name: str = "sw") -> str:
        """A machine that is one bridge, `br0`."""
        full = self.machine(name)
        ip("-n", full, "link", "add", "br0", "type", "bridge")
        ip("-n", full, "link", "set", "br0", "up")
        return full

    def plug(self, machine: str, interface: str, switch: str, *addresses: str) -> None:
        """A cable from `interface` of a machine to a switch, with addresses, both ends up."""
        port = f"p{next(_COUNT)}"
        self.cable(machine, interface, switch, port)
        ip("-n", switch, "link", "set", port, "master", "br0")
        self.give(machine, interface, *addresses)

    @staticmethod
    def cable(machine: str, interface: str, other: str, port: str) -> None:
        end = ("peer", "name", port, "netns", other)
        ip("link", "add", interface, "netns", machine, "type", "veth", *end)
        ip("-n", machine, "link", "set", interface, "up")
        ip("-n", other, "link", "set", port, "up")

    @staticmethod
    def give(machine: str, interface: str, *addresses: str) -> None:
        for address in addresses:
            words = ("nodad",) if ":" in address else ()
            ip("-n", machine, "address", "add", address, "dev", interface, *words)

    def bridge(self, machine: str, name: str, address: str, *, carrier: bool = True) -> None:
        """A decoy as Docker makes them; with `carrier`, a container is plugged into it."""
        ip("-n", machine, "link", "add", name, "type", "bridge")
        self.give(machine, name, address)
        ip("-n", machine, "link", "set", name, "up")
        if carrier:
            inside = f"veth{next(_COUNT)}"
            ip("-n", machine, "link", "add", inside, "type", "veth", "peer", "name", f"{inside}c")
            ip("-n", machine, "link", "set", inside, "master", name, "up")
            ip("-n", machine, "link", "set", f"{inside}c", "up")

    def name(self, machine: str, hostname: str, hosts: str) -> None:
        """The machine's own host name, and its /etc/hosts."""
        path = self._folder / f"{machine}.hosts"
        path.write_text(hosts)
        self._hosts[machine] = hostname, path

    def hosts(self, machine: str) -> str:
        """The place of the machine's /etc/hosts."""
        return str(self._hosts[machine][1])

    @staticmethod
    def firewall(machine: str, *rules: str) -> None:
        """Rules of nftables for what comes in."""
        chain = "type filter hook input priority 0;"
        body = "\n".join(rules)
        text = f"table inet t {{ chain c {{ {chain}\n{body}\n}}\n}}\n"
        subprocess.run(
            ["ip", "netns", "exec", machine, "nft", "-f", "-"], input=text, text=True, check=True
        )

    def inside(self, machine: str, *argv: str) -> list[str]:
        """`argv` as it runs on a machine."""
        words = ["ip", "netns", "exec", machine]
        if machine in self._hosts:
            hostname, hosts = self._hosts[machine]
            setup = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
            unshare = ["unshare", "--mount", "--uts", "sh", "-c", setup, "sh"]
            words += [*unshare, str(hosts), hostname]
        return [*words, *argv]

    def start(self, machine: str, *argv: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.inside(machine, *argv),
            env={"PATH": os.environ["PATH"], **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._running.append(process)
        return process

    def ready(self) -> None:
        """Wait until every interface that is up has its carrier and its addresses are usable."""
        deadline = time.monotonic() + 120
        for machine in self._names:
            while b" tentative " in _addresses(machine) or _waiting(_links(machine)):
                assert time.monotonic() < deadline, _links(machine)
                time.sleep(0.05)

    def remove(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _addresses(machine: str) -> bytes:
    return subprocess.run(
        ["ip", "-n", machine, "-o", "address"], check=True, capture_output=True
    ).stdout


def _links(machine: str) -> bytes:
    return subprocess.run(
        ["ip", "-n", machine, "-o", "link"], check=True, capture_output=True
    ).stdout


def execute(machine: str, *argv: str) -> None:
    subprocess.run(["ip", "netns", "exec", machine, *argv], check=True, capture_output=True)


def _waiting(links: bytes) -> bool:
    """Whether a carrier is still missing although the other end is up (no M-DOWN)."""
    lines = links.splitlines()
    return any(b"LOWERLAYERDOWN" in line and b"M-DOWN" not in line for line in lines)
