"""NVIDIA's own short diagnostic of the GPUs, where DCGM is installed.

Its JSON has no published schema and has changed between releases, so that only this is relied on:
a test has a ``name``, a result a ``status`` and perhaps ``warnings``, at whatever depth.
https://docs.nvidia.com/datacenter/dcgm/latest/reference/command-line-reference/dcgmi/dcgmi-diag.html
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from deploykit_node.preflight.health.record import Health

_ARGUMENTS = ("diag", "--run", "1", "--json")
"""The quick checks, which take seconds."""
_SECONDS = 8.0
_LONGEST = 160
_SEVERE = {2, 6}
"""Severities of errors that ask to isolate or reset the GPU (DCGM_ERROR_ISOLATE, _RESET).

https://docs.nvidia.com/datacenter/dcgm/latest/reference/diagnostics/errors.html
"""
_GPU = ("gpu_id", "gpu_ids", "entity_id")


def check(health: Health) -> None:
    """Add the tests that have failed, each once for each GPU."""
    program = shutil.which("dcgmi")
    if program is None:
        return
    try:
        done = subprocess.run(
            [program, *_ARGUMENTS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        health.skipped.append(f"DCGM (no result in {_SECONDS:.0f} s)")
        return
    text = done.stdout.decode(errors="replace")
    try:
        result = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except (ValueError, RecursionError):
        last = (text + done.stderr.decode(errors="replace")).strip().splitlines()[-1:]
        health.skipped.append(f"DCGM ({_printable(' '.join(last)) or 'no output'})")
        return
    health.faults += dict.fromkeys(failures(result))


def failures(result: Any, test: str = "a test") -> Iterator[tuple[str, bool]]:
    """A sentence for each result that has failed, and whether the GPU must not be used."""
    if isinstance(result, list):
        for each in result:
            yield from failures(each, test)
    if not isinstance(result, dict):
        return
    name = result.get("name")
    test = name if isinstance(name, str) else test
    if str(result.get("status", "")).lower().startswith("fail"):
        warnings = list(_warnings(result.get("warnings")))
        gpu = next((f" of GPU {result[key]}" for key in _GPU if key in result), "")
        why = "; ".join(text for text, _ in warnings) or "no reason is given"
        severe = any(severity in _SEVERE for _, severity in warnings)
        yield _printable(f"DCGM's test {test}{gpu} has failed: {why}"), severe
        return
    for key, value in result.items():
        if key != "test_summary":  # what its results say, again
            yield from failures(value, test)


def _warnings(value: Any) -> Iterator[tuple[str, Any]]:
    """The texts and severities: of a text, an object with one, or several of either."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            yield str(each.get("warning", each)), each.get("error_severity")
        elif each:
            yield str(each), None


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST]
