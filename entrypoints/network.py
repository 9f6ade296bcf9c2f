"""Which network interface the ranks talk over: chosen on each node, when the job starts.

The user's word comes first, else the route to another node of the job. No packet is sent.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NCCL = "NCCL_SOCKET_IFNAME"
GLOO = "GLOO_SOCKET_IFNAME"

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_SIOCGIFMTU = 0x8921
_UP_AND_RUNNING = 0x1 | 0x40
_NAME = 16
_ENTRY = 40  # struct ifreq on 64 bits: the name, then a sockaddr_in
_DISCARD = 9
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni")


@dataclass(frozen=True)
class Route:
    """The way to another node: our address on it and that address's interface, if known."""

    peer: str
    source: str
    interface: str | None


@dataclass(frozen=True)
class Choice:
    """Variables to set, and the sentence for the log."""

    variables: dict[str, str]
    why: str


def route(peer: str) -> Route | None:
    """The route to the address `peer`, or None where there is none."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _DISCARD))
        except OSError:
            return None
        source = probe.getsockname()[0]
    return Route(peer, source, interface_of(source))


def route_to_any(peers: Iterable[str]) -> Route | None:
    """The route to the first of `peers` that leads to another machine and can be trusted.

    Where there is none, any route to a peer, be it this machine.
    """
    other = None
    for way in map(route, peers):
        if way is not None and way.source != way.peer and _doubt(way) is None:
            return way
        other = other or way
    return other


def choose(way: Route | None, chosen: Mapping[str, str]) -> Choice:
    """The interface for NCCL and Gloo. `chosen` holds what the user set; it is never changed."""
    user = {name: chosen[name] for name in (NCCL, GLOO) if chosen.get(name)}
    doubt = _doubt(way)
    if len(user) == 2 or (doubt and user):  # noqa: PLR2004 - both variables
        return Choice(user, f"network: {_said(user)}, as you chose{_absent(user)}")
    if way is None or doubt:
        return Choice({}, f"network: no interface is set, since {doubt}")
    ours = {NCCL: f"={way.interface}", GLOO: str(way.interface)}
    why = f"{way.interface} ({way.source}) is the route to another node ({way.peer})"
    if (first := _first(way)) != way.source:
        why += f"; WARNING: NCCL takes {first}, the first address of {way.interface}"
        if _own_name() == way.source:
            del ours[GLOO]
            why += f", and Gloo is left to this machine's name, which means {way.source}"
        else:
            why += ", and so does Gloo"
    kept = f"; {_said(user)} is kept, as you chose{_absent(user)}" if user else ""
    added = {name: value for name, value in ours.items() if name not in user}
    return Choice({**added, **user}, f"network: {why}: {_said(added)}{kept}")


def loopback(chosen: Mapping[str, str]) -> dict[str, str]:
    """The variables for ranks that are all on this machine: nobody else can come to loopback.

    Without a word NCCL and Gloo listen on an interface that other machines reach.
    """
    if not is_up("lo"):
        return {}
    ours = {NCCL: "=lo", GLOO: "lo"}
    return {name: chosen.get(name) or value for name, value in ours.items()}


def interface_of(address: str) -> str | None:
    """The interface that holds `address`."""
    if address.startswith("127.") or address == "::1":
        return "lo" if "lo" in _names() else None
    return (_interfaces_v6() if ":" in address else _interfaces_v4()).get(address)


def is_up(interface: str) -> bool:
    """Whether `interface` exists, is up, and has a carrier."""
    answer = _ask(_SIOCGIFFLAGS, interface)
    if answer is None:
        return False
    (flags,) = struct.unpack_from("H", answer, _NAME)
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def mtu(interface: str) -> int | None:
    """Largest packet that `interface` sends, in bytes; None where there is no such interface."""
    answer = _ask(_SIOCGIFMTU, interface)
    return struct.unpack_from("i", answer, _NAME)[0] if answer else None


def _ask(question: int, interface: str) -> bytes | None:
    """The kernel's struct ifreq for `interface`; None where there is no such interface."""
    request = struct.pack("16s24x", interface.encode()[: _NAME - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, question, request)
        except OSError:
            return None


def _doubt(way: Route | None) -> str | None:
    """Why the route names no interface that can be trusted, or None where it does."""
    if way is None:
        return "there is no route to another node of the job"
    name = way.interface
    if name is None:
        return f"no interface holds {way.source}, our address towards {way.peer}"
    if name == "lo" and not _is_loopback(way.peer):
        return f"the route to {way.peer} starts at loopback"
    if name.startswith(_VIRTUAL):
        return f"the route to {way.peer} leads to {name}, a bridge inside this machine"
    return None if is_up(name) else f"{name}, on the route to {way.peer}, is down"


def _first(way: Route) -> str:
    """The address that NCCL and Gloo take for the interface's name: its first one, IPv4 first."""
    held = [address for address, name in _interfaces_v4().items() if name == way.interface]
    return held[0] if held else way.source


def _own_name() -> str | None:
    """The address that Gloo takes where no interface is named.

    https://github.com/pytorch/pytorch/blob/v2.9.0/torch/csrc/distributed/c10d/GlooDeviceFactory.cpp
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(found[0][4][0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _said(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _absent(user: Mapping[str, str]) -> str:
    """A warning where the user's choice fits no interface that is up here."""
    up = [name for name in _names() if is_up(name)]
    wrong = [name for name, value in user.items() if not _fits(name, value, up)]
    if not wrong:
        return ""
    return f" (WARNING: {' and '.join(wrong)} fits none that is up here: {', '.join(up)})"


def _fits(variable: str, value: str, up: list[str]) -> bool:
    """Whether `value` matches one of `up`: exact names for Gloo; NCCL knows ^, = and prefixes."""
    if variable == NCCL and value.startswith("^"):
        return True
    wanted = value.removeprefix("=").split(",")
    exact = variable == GLOO or value.startswith("=")
    return any(
        name == want or (not exact and name.startswith(want)) for name in up for want in wanted
    )


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _interfaces_v4() -> dict[str, str]:
    """Address -> interface, further addresses of one interface included."""
    buffer = array.array("B", bytes(_ENTRY * 256))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, where))
    (used,) = struct.unpack_from("i", answer)
    found = {}
    for start in range(0, used, _ENTRY):
        entry = buffer[start : start + _ENTRY].tobytes()
        label = entry[:_NAME].rstrip(b"\0").split(b"\0")[0].decode()
        found[socket.inet_ntoa(entry[20:24])] = label.partition(":")[0]
    return found


def _interfaces_v6() -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            packed, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))] = name
    return found
