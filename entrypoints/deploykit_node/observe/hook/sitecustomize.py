"""Runs when the program of a rank starts: SIGURG makes it write the stacks of its threads.

Where the job asks for a profile, some of its steps are profiled (torch_profile.py); where it asks
for a debugger, the program waits for it (debug_server.py).

`hooks.environment` puts this folder first on ``PYTHONPATH``. Before anything else it takes the
folder away again, from `sys.path` and from the environment, so that neither the program nor its
children see a difference; last it imports the ``sitecustomize`` that Python would have found.

SIGURG does nothing to a process without a handler, no trainer uses it, and `faulthandler` needs
neither the interpreter's lock nor the main thread: the stacks of a program that hangs are written
too. https://docs.python.org/3/library/faulthandler.html#faulthandler.register
"""

# ruff: noqa: PTH100, PTH120 - importing pathlib would slow down the start of every program

import contextlib
import os
import sys

_ABOVE = 100
"""The lowest number for the file descriptor: programs may count on the low ones."""


def _disappear() -> None:
    """Leave `sys.path` and the environment as they would be without this file."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != here]
    sys.path_importer_cache.pop(here, None)
    sys.modules.pop("sitecustomize", None)
    own = os.environ.pop("DEPLOYKIT_PYTHONPATH", None)
    if own is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = own


def _register(path: str) -> None:
    """Have SIGURG append all stacks to the file, whose first line is its descriptor here."""
    import faulthandler
    import fcntl
    import signal

    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    finally:
        os.close(opened)
    faulthandler.register(signal.SIGURG, file=descriptor, all_threads=True)
    os.write(descriptor, b"%d\n" % descriptor)


def _begin(name: str, *words: str) -> None:
    """Load the file `name` above this folder, and call its function `begin`."""
    import importlib.util

    code = os.path.join(os.path.dirname(__file__), os.pardir, f"{name}.py")  # noqa: PTH118
    spec = importlib.util.spec_from_file_location(f"_deploykit_{name}", code)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.begin(*words)


_file = os.environ.pop("DEPLOYKIT_STACK_FILE", None)
_trace = os.environ.pop("DEPLOYKIT_TRACE_FILE", None)
_debug = os.environ.pop("DEPLOYKIT_DEBUG_FILE", None)
_disappear()
if _file is not None:
    with contextlib.suppress(Exception):  # without it the program runs as well
        _register(_file)
if _trace is not None:
    with contextlib.suppress(Exception):
        _begin(
            "torch_profile", os.environ.get("DEPLOYKIT_PROFILE", "").removeprefix("torch:"), _trace
        )
if _debug is not None:
    try:
        _begin("debug_server", _debug)
    except Exception as error:  # noqa: BLE001 - without it the program runs as well
        print(f"cannot start the debugger: {error}", flush=True)

# the program's own; where there is none, Python expects this error
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401
