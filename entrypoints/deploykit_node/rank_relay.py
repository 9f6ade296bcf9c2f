"""What stays of a rank's launcher while its program runs: a relay with little memory.

`rank` has started the program, and has replaced itself by this one in the same process: what it
imports would take three times the memory, of each rank.
"""

from __future__ import annotations

import os
import time

from deploykit_node import relay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str], env: dict[str, str]) -> None:
    """Relay the program, whose process id and pipes `argv` gives, and record how it ended.

    Does not return.
    """
    number, folder = env["RANK"], env["DEPLOYKIT_RANK_DIR"]
    heard = Heard(f"{folder}/rank-{number}.heard")
    end = relay.attend(relay.Child(*map(int, argv)), env, f"[rank {number}]", heard)
    from deploykit_node import rank  # now that the program has ended

    rank.end(end, env)


class Heard:
    """Called for each output of a rank: changes the time of a file, at most once a second."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._due = 0.0

    def __call__(self) -> None:
        """Note an output."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + 1
            try:
                os.close(os.open(self._file, os.O_CREAT | os.O_WRONLY))
                os.utime(self._file)
            except OSError:
                pass
