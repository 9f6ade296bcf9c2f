"""Call the function given to `deploykit.launch` on each rank, and store its result.

torchrun starts this file as the job's program; results are stored in the run folder. Beside this
file are `call.pkl` (the function and its arguments), `call.json` (where it was launched) and a copy
of cloudpickle, so the node needs only torch. Each rank writes one record, `RANK.pkl`.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Call the function; store its value or its exception, which then ends this rank."""
    folder = Path(os.environ["DEPLOYKIT_RUN_DIR"], "results")
    record: dict[str, Any] = {"rank": int(os.environ["RANK"])}
    try:
        record["value"] = _packed(_call())
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _store(folder, record | _failure(error))
            raise
        record["value"] = _packed(None)
    _store(folder, record)
    _leave_group()


def _leave_group() -> None:
    """Destroy a process group that the function has left: gloo's threads would outlive Python.

    One that frees a tensor then aborts a process that has succeeded (torch 2.13).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()
        distributed.destroy_process_group()


def _call() -> Any:
    """Load the function as the launcher's machine knew it, and call it."""
    launched = json.loads((HERE / "call.json").read_text(encoding="utf-8"))
    here = list(sys.version_info[:2])
    if here != launched["python"]:
        versions = [".".join(map(str, version)) for version in (launched["python"], here)]
        raise RuntimeError(
            f"the function was sent from Python {versions[0]}, but this node runs {versions[1]}; "
            f"choose the same version with local={'python': ...} or slurm={'python': ...}"
        )
    sys.path[1:1] = launched["path"]  # before the node's packages, as there
    if os.path.isdir(launched["folder"]):  # noqa: PTH112 - Path.is_dir() may raise
        os.chdir(launched["folder"])
    function, arguments = pickle.loads((HERE / "call.pkl").read_bytes())  # noqa: S301 - the user's own, in the run folder
    return function(*arguments)


def _failure(error: BaseException) -> dict[str, Any]:
    """The exception as text, from the function on, and as itself where that can be pickled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        packed = _packed(error)
    except Exception:  # noqa: BLE001 - its text is enough
        packed = None
    return {"kind": type(error).__name__, "traceback": text, "error": packed, "time": time.time()}


def _packed(value: Any) -> bytes:
    import cloudpickle  # the copy beside this file

    return bytes(cloudpickle.dumps(value))


def _store(folder: Path, record: dict[str, Any]) -> None:
    """Write the record under its final name only when it is complete."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = folder / f"{record['rank']}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
        file.write(pickle.dumps(record))
    partial.rename(folder / f"{record['rank']}.pkl")


if __name__ == "__main__":
    main()
