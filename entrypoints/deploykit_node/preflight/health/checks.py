"""Run all checks of this node, in a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from deploykit_node.preflight.health import dcgm, fabric, gpus, machine, processors
from deploykit_node.preflight.health.record import Health

Environ = Mapping[str, str]


class Running:
    """Checks that run in a thread of their own from now on."""

    def __init__(self, env: Environ, nodes: int) -> None:
        self._found, self._current = Health(), ""
        self._checks: dict[str, Callable[[Health], None]] = {
            "GPUs": gpus.check,
            "network devices": fabric.check,
            "kernel log": machine.check_kernel_log,
            "memory": machine.check_memory,
            "processors": processors.check,
            "disks": lambda health: machine.check_disks(health, env, nodes),
            "GPUs by DCGM": dcgm.check,
        }
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for name, check in self._checks.items():
            self._current = name
            try:
                check(self._found)
            except Exception as error:  # noqa: BLE001 - a check that breaks is no fault of the node
                self._found.skipped.append(f"{name} ({error!r})")

    def record(self, deadline: float) -> dict[str, Any]:
        """What is known by `deadline` (`time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        record = self._found.record()
        if self._thread.is_alive():
            text = f"the check of its {self._current} has not ended: a driver or a disk that hangs?"
            record["faults"].append([text, False])
        return record
