"""Run the command line and kill it with SIGKILL at the Nth function that it calls.

    python kill_after.py N -- sweep resume ...

Counted are calls of deploykit's and Optuna's functions, once the controller begins.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def main() -> int:
    count, _, *argv = sys.argv[1:]
    left = int(count)
    begun = False

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left, begun
        if event != "call":
            return
        path = frame.f_code.co_filename
        if path.endswith(("sweep/folder.py", "sweep/trial_job.py")):
            begun = begun or frame.f_code.co_name in {"require_optuna", "study", "define"}
        if begun and (path.startswith(ours) or "/optuna/" in path):
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    from deploykit.cli import main as cli

    ours = str(Path(cli.__file__).parents[1]) + os.sep  # a checkout may itself be called deploykit
    sys.setprofile(look)
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
