"""A plain program on each node (`launcher: python`), which starts its other processes itself.

It finds MASTER_ADDR and a MASTER_PORT that is free, NODE_RANK and NNODES, and nothing of torchrun,
whose TORCHELASTIC_USE_AGENT_STORE would make each of its processes a client of a store that nobody
serves. For its launcher it is the only rank of its node.
"""

from __future__ import annotations

ZERO = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
ONE = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
"""Numbers that torchrun sets, and those of a job of one rank: 0 and 1."""
_MARK = "DEPLOYKIT_PLAIN"


def variables(node: int, count: int, host: str, port: int) -> dict[str, str]:
    """What the program finds, and what only its launcher needs."""
    return {
        "NODE_RANK": str(node),
        "NNODES": str(count),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(node),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": "1",
        "DEPLOYKIT_ROUND": "0",
        _MARK: "1",
    }


def environment(env: dict[str, str]) -> dict[str, str]:
    """The environment of the program: of a plain one without torchrun's variables."""
    if _MARK not in env:
        return env
    own = {*ZERO, *ONE, "ROLE_NAME", _MARK}
    return {
        name: value
        for name, value in env.items()
        if name not in own and not name.startswith("TORCHELASTIC_")
    }
