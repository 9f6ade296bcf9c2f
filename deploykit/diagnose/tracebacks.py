"""Tracebacks of Python, of each rank of a log: where an exception was raised, and its last line."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from deploykit.diagnose import log_prefixes
from deploykit.observe import stacks

BEGIN = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "(.{1,400}?)", line (\d{1,9})(?:, in (\S{1,100}))?')
_NO_ERROR = r"Exiting|SystemExit|KeyboardInterrupt|(asyncio\.exceptions\.)?CancelledError|Message: "
"""Beginnings of lines after a traceback: an end that was asked for, or what could not be logged."""
_EXCEPTION = re.compile(rf"(?!{_NO_ERROR})[A-Za-z_][\w.]*(:( .*)?)?$")
_NUMBERED = re.compile(
    r"(?:│\s*)?(?:(?:-+>|❱)\s*\d{1,6}\s"
    r"|\d{1,6}\s(?:│|\s*(?:if|elif|raise|return|except|assert|for|while|with|def|class)\b))"
)
"""A line of code with its number, as IPython and rich print several around a frame."""
_LINE = re.compile(r"\bline \d+")
_CUT_FRAME = re.compile(r'\s*File "[^"]{1,400}$')
"""A frame whose path goes on in the next line: a console wrapped it at its width."""
_INDENT = 2
"""Blanks before a frame."""
_CODE = 200
"""Characters of a line of code that are kept."""
_MOST = 1000
"""Ranks of one log."""


@dataclass
class _Traceback:
    column: int
    """Where its lines begin, after any prefix: prefixes of a rank are equally wide."""
    frame: str = ""
    awaits_code: bool = False
    last: stacks.Frame | None = None
    own: stacks.Frame | None = None
    """The deepest frame, and the deepest one in the user's own code."""


class Tracebacks:
    """The traceback that each rank of a log printed last."""

    def __init__(self) -> None:
        self._of_rank: dict[int | None, _Traceback] = {}
        self._open: set[int | None] = set()
        self._cut_frame = ""
        self.in_frame = self.in_code = False
        """Whether the last line names a frame, or is its code: what that says did not happen."""

    def read(self, text: str) -> bool:
        """Take the next line as it is; whether it is the last of a traceback: the exception."""
        if 'File "' in text and _CUT_FRAME.match(text):
            self._cut_frame, self.in_frame, self.in_code = text, True, False
            return False
        text, self._cut_frame = self._cut_frame + text, ""
        if _NUMBERED.search(text) and _NUMBERED.match(log_prefixes.bare(text)):
            self.in_frame, self.in_code = False, True
            return False
        frame = _FRAME.search(text) if 'File "' in text else None
        self.in_frame, self.in_code = bool(frame), False
        if not frame and not self._open and BEGIN not in text:
            return False
        rank = log_prefixes.rank(text)
        if BEGIN in text:
            self._begin(rank, text.index(BEGIN))
        elif frame:
            if rank not in self._open:
                self._begin(rank, max(0, frame.start() - _INDENT))
            if rank in self._open:
                one = self._of_rank[rank]
                one.frame, one.awaits_code = f"{frame[1]} {frame[3] or ''}", True
                one.last = stacks.Frame(frame[3] or "", frame[1], int(frame[2]))
                one.own = one.last if stacks.is_users(one.last) else one.own
        elif rank in self._open:
            return self._continues(self._of_rank[rank], rank, text)
        return False

    @property
    def are_open(self) -> bool:
        """Whether the next line may be one of a traceback."""
        return bool(self._open)

    @property
    def unfinished(self) -> bool:
        """Whether frames of a rank stand without the exception that follows them."""
        return any(self._of_rank[rank].frame for rank in self._open)

    def _begin(self, rank: int | None, column: int) -> None:
        if rank in self._of_rank or len(self._of_rank) < _MOST:
            self._of_rank[rank] = _Traceback(column)
            self._open.add(rank)

    def _continues(self, one: _Traceback, rank: int | None, text: str) -> bool:
        rest = text[one.column :]
        if rest[:1].isspace():
            if one.awaits_code and one.last:
                code = rest.strip()[:_CODE]
                one.frame += f" {code}"
                was_own, one.last = one.own == one.last, replace(one.last, source=code)
                one.own = one.last if was_own else one.own
            self.in_code, one.awaits_code = one.awaits_code, False
            return False
        if rest.rstrip().endswith(" raised:"):  # the exception of torch.compile's backend follows
            return False
        self._open.discard(rank)
        return bool(one.frame) and _EXCEPTION.match(rest.rstrip()) is not None

    def without_number(self, text: str) -> str:
        """The text of the last line, each number of a frame as 1: it is no code of an exit."""
        return _LINE.sub("line 1", text) if self.in_frame else text

    def place(self, text: str) -> str:
        """``train.py:9: loss = model(x)``: the user's line that led to the exception of a rank."""
        one = self._of_rank.get(log_prefixes.rank(text))
        frame = (one.own or one.last) if one else None
        if frame is None:
            return ""
        return f"{stacks.location(frame)}{f': {frame.source}' if frame.source else ''}"

    def frame(self, text: str) -> str:
        """``PATH FUNCTION CODE`` of the deepest frame of the rank of a line; empty without one."""
        one = self._of_rank.get(log_prefixes.rank(text))
        return one.frame if one else ""
