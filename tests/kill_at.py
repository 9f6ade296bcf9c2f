"""Run the command line and kill it with SIGKILL before or after a function is called.

    python kill_at.py before|after module:function -- submit --backend local ...

`module:Class.method` works too. Used by the tests of interrupted submits.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any


def main() -> int:
    when, where, _, *argv = sys.argv[1:]
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for step in outer:
        owner = getattr(owner, step)
    setattr(owner, name, _deadly(getattr(owner, name), when))
    from deploykit.cli import main as cli

    return cli.main(argv)


def _deadly(function: Any, when: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    return call


if __name__ == "__main__":
    sys.exit(main())
