"""The network interface for the ranks' traffic, chosen on each node when the job starts.

The user's choice comes first, then the route to another node of the job. No packet is sent.
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

from deploykit_node.network.addresses import is_loopback

NCCL = "NCCL_SOCKET_IFNAME"
"""Names of interfaces, ``=`` before exact ones: NCCL takes prefixes too, and ``^`` excludes."""
GLOO = "GLOO_SOCKET_IFNAME"
"""Exact names of interfaces."""

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
    """The route to an address of another node, with this node's address and its interface."""

    peer: str
    source: str
    interface: str | None


@dataclass(frozen=True)
class Choice:
    """Variables to set, and the sentence for the log."""

    variables: dict[str, str]
    why: str


def route_to(peer: str) -> Route | None:
    """The route to the address `peer`; None if there is none."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _DISCARD))
        except OSError:
            return None
        source = probe.getsockname()[0]
    return Route(peer, source, interface_of(source))


def route_to_any(peers: Iterable[str]) -> Route | None:
    """The first usable route to one of the addresses `peers` that leads to another machine.

    If there is none, the first route to any of them, even if it leads to this machine.
    """
    fallback = None
    for candidate in map(route_to, peers):
        if candidate is not None and candidate.source != candidate.peer and not _problem(candidate):
            return candidate
        fallback = fallback or candidate
    return fallback


def choose(route: Route | None, env: Mapping[str, str]) -> Choice:
    """The interface for NCCL and Gloo. Values that the user has set in `env` are kept."""
    user = {name: env[name] for name in (NCCL, GLOO) if env.get(name)}
    problem = _problem(route)
    if len(user) == 2 or (problem and user):  # noqa: PLR2004 - both variables
        return Choice(user, f"network: keeping your {_shown(user)}{_warning(user)}")
    if route is None or problem:
        return Choice({}, f"network: no interface chosen, because {problem}")
    automatic = {NCCL: f"={route.interface}", GLOO: str(route.interface)}
    why = f"{route.interface} ({route.source}) is on the route to another node ({route.peer})"
    if (first := _first_address(route)) != route.source:
        why += f"; WARNING: NCCL uses {first}, the first address of {route.interface}"
        if _address_of_host_name() == route.source:
            del automatic[GLOO]
            why += f"; Gloo uses this host's name, which resolves to {route.source}"
        else:
            why += ", and so does Gloo"
    kept = f"; keeping your {_shown(user)}{_warning(user)}" if user else ""
    added = {name: value for name, value in automatic.items() if name not in user}
    return Choice({**added, **user}, f"network: {why}: {_shown(added)}{kept}")


def inventory() -> str:
    """Every interface with its addresses: ``ens5 10.0.0.1; docker0 172.17.0.1 (down)``."""
    held: dict[str, list[str]] = {name: [] for name in _names()}
    for address, name in (_interfaces_v4() | _interfaces_v6()).items():
        held.setdefault(name, []).append(address)
    return "; ".join(
        " ".join([name, *addresses, *([] if is_up(name) else ["(down)"])])
        for name, addresses in held.items()
    )


def loopback(env: Mapping[str, str]) -> dict[str, str]:
    """The variables for ranks that are all on this machine; the user's values in `env` are kept.

    By default NCCL and Gloo listen on an interface that other machines can reach.
    """
    if not is_up("lo"):
        return {}
    automatic = {NCCL: "=lo", GLOO: "lo"}
    return {name: env.get(name) or value for name, value in automatic.items()}


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None if none has it."""
    if is_loopback(address):
        return "lo" if "lo" in _names() else None
    return (_interfaces_v6() if ":" in address else _interfaces_v4()).get(address)


def is_up(interface: str) -> bool:
    """Whether `interface` exists, is up, and has a carrier."""
    ifreq = _ioctl(_SIOCGIFFLAGS, interface)
    if ifreq is None:
        return False
    (flags,) = struct.unpack_from("H", ifreq, _NAME)
    return bool(flags & _UP_AND_RUNNING == _UP_AND_RUNNING)


def mtu(interface: str) -> int | None:
    """The largest packet that `interface` sends, in bytes; None if it does not exist."""
    ifreq = _ioctl(_SIOCGIFMTU, interface)
    return int(struct.unpack_from("i", ifreq, _NAME)[0]) if ifreq else None


def _ioctl(command: int, interface: str) -> bytes | None:
    """The kernel's struct ifreq for `interface`; None if it does not exist."""
    request = struct.pack("16s24x", interface.encode()[: _NAME - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, command, request)
        except OSError:
            return None


def _problem(route: Route | None) -> str | None:
    """Why the route has no usable interface; None if it has one."""
    if route is None:
        return "there is no route to another node of the job"
    name = route.interface
    if name is None:
        return f"no interface has {route.source}, which this node uses to reach {route.peer}"
    if name == "lo" and not is_loopback(route.peer):
        return f"the route to {route.peer} goes through loopback"
    if name.startswith(_VIRTUAL):
        return f"the route to {route.peer} leads to {name}, a bridge inside this machine"
    return None if is_up(name) else f"{name}, on the route to {route.peer}, is down"


def _first_address(route: Route) -> str:
    """The address that NCCL and Gloo use on the interface: its first one, IPv4 before IPv6."""
    held = [address for address, name in _interfaces_v4().items() if name == route.interface]
    return held[0] if held else route.source


def _address_of_host_name() -> str | None:
    """The address that Gloo uses if no interface is set.

    https://github.com/pytorch/pytorch/blob/v2.9.0/torch/csrc/distributed/c10d/GlooDeviceFactory.cpp
    """
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(entries[0][4][0])


def _shown(variables: Mapping[str, str]) -> str:
    """The variables as a shell sets them: in quotes, since ``NAME==lo`` looks like a typo."""
    quoted = ((name, f'"{value}"' if "=" in value else value) for name, value in variables.items())
    return " ".join(f"{name}={value}" for name, value in quoted)


def _warning(user: Mapping[str, str]) -> str:
    """A warning if the user's choice matches no interface that is up here."""
    up = [name for name in _names() if is_up(name)]
    wrong = [name for name, value in user.items() if not _matches(name, value, up)]
    if not wrong:
        return ""
    return (
        f" (WARNING: {' and '.join(wrong)} matches none of the interfaces that are up here: "
        f"{', '.join(up)})"
    )


def _matches(variable: str, value: str, up: list[str]) -> bool:
    """Whether `value` matches one of `up`: exact names for Gloo; ^, = and prefixes for NCCL."""
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
    """The interface of each IPv4 address, including further addresses of an interface."""
    buffer = array.array("B", bytes(_ENTRY * 256))
    start_address, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, start_address))
    (used,) = struct.unpack_from("i", answer)
    interfaces = {}
    for start in range(0, used, _ENTRY):
        entry = buffer[start : start + _ENTRY].tobytes()
        label = entry[:_NAME].rstrip(b"\0").split(b"\0")[0].decode()
        interfaces[socket.inet_ntoa(entry[20:24])] = label.partition(":")[0]
    return interfaces


def _interfaces_v6() -> dict[str, str]:
    """The interface of each IPv6 address."""
    interfaces = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            packed, *_, name = line.split()
            interfaces[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))] = name
    return interfaces
