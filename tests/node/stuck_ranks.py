"""Ranks whose NCCL does not come to a result unless variables are set, without NCCL or PyTorch.

    stuck_ranks.py HOW VARIABLES SOCKET

HOW is ``exits`` or ``hangs``; VARIABLES has commas between the names that all must be set. ``gloo``
works without any, ``never`` in no case. The variable STARTED names a file that gets a line for each
process that loads this file, as it would load PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from deploykit_node.preflight.group import MARK, serve

if "STARTED" in os.environ:
    with open(os.environ["STARTED"], "a") as started:  # noqa: PTH123 - appended at once
        started.write(f"{os.getpid()}\n")
HOW, VARIABLES = sys.argv[1], sys.argv[2].split(",")


def say(**record):
    print(MARK + json.dumps(record), flush=True)  # noqa: T201 - to the launcher


def rank(request):
    if "store" in request:
        say(port=29500)
        signal.pause()
    name = f"GPU {request['local_rank']} matrix multiplication"
    same = {"torch": "2.9.0", "NCCL": "2.27.5", "backend": "nccl", "correct": True}
    say(**same, device=name, speed=6e14)
    for line in sys.stdin:
        order = json.loads(line)
        if "rounds" in order:
            say(small=1e7, large=1e10, size=1 << 28, busy=0.0, pairs={})
            continue
        gloo = order["backend"] == "gloo" and VARIABLES != ["never"]
        if not gloo and not all(os.environ.get(name) for name in VARIABLES):
            print("NCCL WARN stuck", flush=True)  # noqa: T201 - as NCCL does
            if HOW == "hangs":
                signal.pause()
            os._exit(1)
        say(backend="gloo" if gloo else "nccl", correct=True, seconds=0.1)


serve(int(sys.argv[3]), rank)
