"""What a node or a rank puts into its environment before the user's program starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from deploykit_node import log, nccl_env, private, secret_refs
from deploykit_node.cluster import BadEnvironment

Environ = dict[str, str]


def prepare(env: Environ) -> Environ:
    """Apply the plan's settings and secrets, and make its folders.

    Returns the user's own settings. Raises BadEnvironment if a secret cannot be resolved or a
    folder cannot be made.
    """
    user_settings = _restore(env)
    env.update(secret_refs.resolve(env))
    env.pop(secret_refs.VARIABLE, None)
    for name in ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR"):
        _make_folder(name, env.get(name, ""))
    return user_settings


def _restore(env: Environ) -> Environ:
    """Put back the user's settings that SageMaker's toolkit has overwritten."""
    user_settings: Environ = json.loads(env.pop("DEPLOYKIT_ENV", "{}"))
    env.update(user_settings)
    return user_settings


def _make_folder(name: str, location: str) -> None:
    if not location or "://" in location:
        return
    try:
        private.folder(Path(location))
    except OSError as error:
        raise BadEnvironment(
            f"{name} is {location}, and this folder cannot be created here ({error.strerror}). "
            "Choose a location in the job file that this node can write to."
        ) from None


def set_nccl_env(env: Environ, kept: Mapping[str, str], number: int) -> None:
    """Set variables for NCCL and PyTorch, except those in `kept`.

    `number` is the node's or the rank's; number 0 logs each variable with its reason.
    """
    settings = nccl_env.choose(nccl_env.machine(), env, kept)
    if settings:
        nccl_env.prepare(env)
    for name, value, why in settings:
        env[name] = value
        if number == 0:
            log.say(0, f"setting {name}={value}: {why}")
