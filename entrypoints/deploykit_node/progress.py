"""The output of a program as lines, with the states of its progress bars thinned.

A bar returns to the start of its line, by a carriage return, and overwrites it many times a second.
Its last state is a line like any other. Of those before, one in `EVERY` seconds goes to the log,
marked by a carriage return before it; and of rank 0 the current one goes into a small file, which
`deploykit` shows on a terminal.
"""

from __future__ import annotations

import itertools
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EVERY = 10.0
"""Seconds between two states of a bar in a log."""
FRESH = 0.5
"""Seconds between two states in the file for terminals."""
LONGEST = 64 * 1024
"""Bytes of the longest unfinished line that is held back."""
NAME = "progress"
"""The file in the run folder."""
_DONE = b"100%"
_TRACEBACK = b"Traceback (most recent call last):"
_UP = rb"\x1b\[\d*A\s*$"
"""Ends the state of a bar that is drawn below another one, as tqdm does with `position`."""
_INVISIBLE = rb"\s|\x1b\[[0-9;]*[A-Za-z]"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def bar_file(env: Mapping[str, str]) -> str | None:
    """The file for the bar of rank 0; None for other ranks, and where the run has no folder."""
    folder = env.get("DEPLOYKIT_RUN_DIR")
    return os.path.join(folder, NAME) if folder and env.get("RANK") == "0" else None


class Lines:
    """Splits one stream of a program into lines and states of bars."""

    def __init__(self, file: str | None = None) -> None:
        self._file = file
        self._rest = b""
        """The unfinished line: of a bar, its current state and what followed."""
        self._state = self._logged = self._shown = b""
        """The current state of a bar, empty where there is none; what was logged, and shown."""
        self._logged_at = self._shown_at = -EVERY

    def whole(self, data: bytes) -> bytes | None:
        """The lines to log after `data`, joined: without a bar most output is taken at once.

        None where it has to be looked at line by line: `feed` it then.
        """
        end = data.rfind(b"\n")
        bars = self._state or self._shown or b"\r" in data or b"\r" in self._rest
        if end < 0 or bars or len(data) - end > LONGEST:
            return None
        text, self._rest = self._rest + data[:end], data[end + 1 :]
        return text

    def feed(self, data: bytes, now: float) -> Iterator[bytes]:
        """The lines to log after `data`, which was read at `now`, in seconds."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        for line in ended:
            self._state = b""
            yield from self._end(line)
        yield from self._trim()
        while len(self._rest) > LONGEST:
            yield self._rest[:LONGEST].lstrip(b"\r")
            self._rest = self._rest[LONGEST:]
        yield from self.tick(now)

    def tick(self, now: float) -> Iterator[bytes]:
        """The state of the bar where it is due at `now`; also keeps the file current."""
        if self._state != self._shown and (not self._state or now >= self._shown_at + FRESH):
            self._shown, self._shown_at = self._state, now
            self._show()
        if self._state not in (b"", self._logged) and now >= self._logged_at + EVERY:
            self._logged, self._logged_at = self._state, now
            yield b"\r" + self._state

    def due(self) -> float:
        """When `tick` has something to do, if no data comes before."""
        waiting = [float("inf")]
        if self._state not in (b"", self._logged):
            waiting.append(self._logged_at + EVERY)
        if self._state != self._shown and self._file:
            waiting.append(self._shown_at + FRESH)
        return min(waiting)

    def finish(self) -> Iterator[bytes]:
        """The last line, which may be the last state of a bar."""
        last, self._rest, self._state = self._rest, b"", b""
        if last:
            yield from self._end(last)
        if self._state:
            yield self._state
        if self._shown:
            self._shown = self._state = b""
            self._show()

    def _end(self, line: bytes) -> Iterator[bytes]:
        """What to log of a whole line."""
        if b"\r" not in line[:-1]:  # at its end it is part of a line end
            yield line
            return
        wiped, segments = _wiped(line.split(b"\r"))
        yield from wiped
        last = next(filter(_is_visible, reversed(segments)), b"")
        if wiped and not last:
            return
        above = _without(_UP, last)
        if above != last:
            self._state = above
            return
        before, traceback, after = last.partition(_TRACEBACK)
        if before and traceback and not after:  # it began behind a bar
            yield before
            last = traceback
        yield last

    def _trim(self) -> Iterator[bytes]:
        """Forget the overwritten states of an unfinished line; what to log of them."""
        if b"\r" not in self._rest[:-1]:  # at its end it may be part of a line end
            return
        wiped, segments = _wiped(self._rest.split(b"\r"))
        yield from wiped
        last = segments[-1]
        self._state = next(filter(_is_visible, reversed(segments)), b"")
        tail = b"" if last == self._state else b"\r" + last
        self._rest = b"\r" + self._state + tail

    def _show(self) -> None:
        """Write the state into the file. A reader takes an empty file for no news."""
        if self._file is None:
            return
        try:
            if not self._state:
                os.unlink(self._file)
                return
            with open(self._file, "wb", opener=_private) as file:
                file.write(self._state + b"\n")
        except OSError:
            pass


def _wiped(segments: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The last states of bars that were complete when they were overwritten with blanks.

    Also the segments after the last of these.
    """
    states, rest = [], segments
    for number, (state, after) in enumerate(itertools.pairwise(segments)):
        if _DONE in state and after and not _is_visible(after):
            states.append(state)
            rest = segments[number + 2 :] or [b""]
    return states, rest


def _is_visible(text: bytes) -> bool:
    return bool(_without(_INVISIBLE, text))


def _without(pattern: bytes, text: bytes) -> bytes:
    import re  # only where there is a bar: it would take 1 MB of each rank

    return re.sub(pattern, b"", text)
