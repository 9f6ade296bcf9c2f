"""A loop that takes turns with the hand-written one in one process: `turns.py LOOP`.

Each trains its own copy of the model, `TURN` steps at a time, so that whatever slows the
machine for a second slows both alike. Waiting for a turn takes no CPU time.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback

import common

TURN = 25
"""Steps in a turn."""


class Turns:
    """Two threads that take turns: the main one, which begins, and the reference's."""

    def __init__(self) -> None:
        self._gates = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self) -> None:
        """Wait for this thread's turn."""
        self._gates[_is_reference()].acquire()

    def give(self) -> None:
        """Let the other thread go on."""
        self._gates[not _is_reference()].release()

    def tick(self, steps: int) -> None:
        """Give and wait after each turn. The reference ends first: others close what it uses."""
        last = steps == common.STEPS
        if last and _is_reference():
            return
        if last or steps % TURN == 0:
            self.give()
            self.wait()


def _is_reference() -> bool:
    return threading.current_thread() is not threading.main_thread()


def main() -> None:
    """Train with both loops; each prints its line of JSON on rank 0."""
    turns = Turns()
    common.after_tick = turns.tick
    threading.Thread(target=_reference, args=[turns], daemon=True).start()
    importlib.import_module(sys.argv[1]).main()
    common.leave()


def _reference(turns: Turns) -> None:
    turns.wait()
    try:
        importlib.import_module("by_hand").main()
    except Exception:  # noqa: BLE001 - any; the other loop would wait for ever
        traceback.print_exc()
        os._exit(1)
    turns.give()


if __name__ == "__main__":
    main()
