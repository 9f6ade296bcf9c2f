"""Have the program wait for an editor's debugger before its first line runs.

`hook/sitecustomize.py` loads this file by its path when the program starts.
https://github.com/microsoft/debugpy/wiki/API-Reference
"""

# ruff: noqa: T100 - it is here for the debugger

from __future__ import annotations

import json
import os


def begin(path: str) -> None:
    """Wait for a debugger at a port of this machine alone, which is written to the file `path`."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of frozen modules
    import debugpy

    debugpy.configure(subProcess=False)  # workers of a data loader do not wait
    _, port = debugpy.listen(("127.0.0.1", 0))
    with open(f"{path}.new", "w", encoding="utf-8", opener=_private) as file:
        json.dump({"port": port}, file)
    os.replace(f"{path}.new", path)  # noqa: PTH105
    run = os.environ.get("DEPLOYKIT_RUN", "RUN")
    print(f"waiting for a debugger: `deploykit shell {run} --debugger`", flush=True)
    debugpy.wait_for_client()
    print("the debugger is connected", flush=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
