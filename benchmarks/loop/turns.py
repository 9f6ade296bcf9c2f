"""A loop that takes turns with the hand-written one in one process: `turns.py LOOP`.

Each trains its own copy of the model, `common.TURN` steps at a time, so that whatever slows the
machine for a second slows both alike. Waiting for a turn takes no CPU time.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback

import common


def main() -> None:
    """Train with both loops; each prints its line of JSON on rank 0."""
    common.turns = common.Turns()
    threading.Thread(target=_reference, args=[common.turns], daemon=True).start()
    importlib.import_module(sys.argv[1]).main()
    common.leave()


def _reference(turns: common.Turns) -> None:
    turns.wait()
    try:
        importlib.import_module("by_hand").main()
    except Exception:  # noqa: BLE001 - any; the other loop would wait for ever
        traceback.print_exc()
        os._exit(1)
    turns.give()


if __name__ == "__main__":
    main()
