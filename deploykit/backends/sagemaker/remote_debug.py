"""What a person can do in the containers of a training job: a shell, where the job allows one.

https://docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit import shell
from deploykit.decode import read_json
from deploykit.model import Handle

_NEXT_RUN = """\
the next run can allow it: --set sagemaker.remote_debug=true
--debug has PyTorch's flight recorder write what it has when a collective times out"""
_INSIDE = """\
inside, for each process of your script: pip install py-spy; py-spy dump --pid PID
algo-2 and so on are the other nodes; the session needs the Session Manager plugin"""


def dump_by_hand(handle: Handle) -> tuple[str, str]:
    """Why `dump` cannot take the stacks of a job, and the commands that can."""
    if not _request(handle).get("RemoteDebugConfig", {}).get("EnableRemoteDebug"):
        reason = f"{handle.run} runs on SageMaker, which does not allow access to its containers"
        return reason, _NEXT_RUN
    target = f"sagemaker-training-job:{handle.run}_algo-1"
    region = ["--region", handle.target]
    enter = shell.command("aws", "ssm", "start-session", *region, "--target", target)
    reason = f"{handle.run} runs on SageMaker, whose containers only a session of SSM can enter"
    return reason, f"{enter}\n{_INSIDE}"


def _request(handle: Handle) -> dict[str, Any]:
    """The request that was sent; empty where it is not here, as for an attached job."""
    try:
        request = read_json(Path(handle.folder, "plan.json"))
    except (OSError, ValueError):
        return {}
    return request if isinstance(request, dict) else {}
