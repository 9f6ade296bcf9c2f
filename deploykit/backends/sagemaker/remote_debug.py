"""What a person can do in the containers of a training job: a shell, where the job allows one.

https://docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.job.decode import read_json
from deploykit.job.model import Handle
from deploykit.lib import shell
from deploykit.lib.errors import UsageError

_CLOSED = "runs on SageMaker, which does not allow access to its containers"
_NEXT_RUN = """\
the next run can allow it: --set sagemaker.remote_debug=true
--debug has PyTorch's flight recorder write what it has when a collective times out"""
_INSIDE = """\
inside, for each process of your script: pip install py-spy; py-spy dump --pid PID
algo-2 and so on are the other nodes; the session needs the Session Manager plugin"""


def dump_by_hand(handle: Handle) -> tuple[str, str]:
    """Why `dump` cannot take the stacks of a job, and the commands that can."""
    if not _is_allowed(handle):
        return f"{handle.run} {_CLOSED}", _NEXT_RUN
    enter = shell.command(*_session(handle, 1))
    reason = f"{handle.run} runs on SageMaker, whose containers only an SSM session can enter"
    return reason, f"{enter}\n{_INSIDE}"


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> list[str]:
    """The AWS CLI's command for a shell in the container of a rank's node.

    Raises UsageError where the job allows none, and for a command: a session takes only what a
    person types.
    """
    if not _is_allowed(handle):
        raise UsageError(f"{handle.run} {_CLOSED}", hint=_NEXT_RUN.partition("\n")[0])
    session = _session(handle, 1 + rank // _ranks_per_node(handle))
    if command or not terminal:
        raise UsageError(
            f"{handle.run} runs on SageMaker, whose containers accept no commands, only "
            "an interactive SSM session",
            hint=shell.command(*session),
        )
    return session


def _session(handle: Handle, node: int) -> list[str]:
    target = f"sagemaker-training-job:{handle.run}_algo-{node}"
    return ["aws", "ssm", "start-session", "--region", handle.target, "--target", target]


def _is_allowed(handle: Handle) -> bool:
    return bool(_request(handle).get("RemoteDebugConfig", {}).get("EnableRemoteDebug"))


def _ranks_per_node(handle: Handle) -> int:
    """As the job was submitted; 1 where that is not known."""
    match _json(handle, backend.JOB):
        case {"resources": {"processes_per_node": int(count)}} if count > 0:
            return count
        case {"resources": {"gpus_per_node": int(count)}} if count > 0:
            return count
    return 1


def _request(handle: Handle) -> dict[str, Any]:
    """The request that was sent; empty where it is not here, as for an attached job."""
    return _json(handle, "plan.json")


def _json(handle: Handle, name: str) -> dict[str, Any]:
    try:
        data = read_json(Path(handle.folder, name))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
