"""Loss scaling for fp16, which keeps small gradients from underflowing to zero."""

from __future__ import annotations

import math

_INITIAL_FACTOR = 65536.0
_GROWTH_INTERVAL = 2000
"""Both are the defaults of `torch.amp.GradScaler`."""


class LossScaler:
    """The loss factor: halved when a gradient overflows, doubled after 2000 steps without overflow.

    `torch.amp.GradScaler` checks the gradients of its own rank. Those differ between ranks under
    tensor and pipeline parallelism, and ranks would disagree. Here the norm of the whole model's
    gradient decides, which is the same on every rank.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = _INITIAL_FACTOR if enabled else 1.0
        self._steps_without_overflow = 0

    def update(self, norm: float) -> bool:
        """Adapt the factor to the norm of the gradients; False if this step must be skipped."""
        if not self.enabled:
            return True
        if not math.isfinite(norm):
            self.factor, self._steps_without_overflow = self.factor / 2, 0
            return False
        self._steps_without_overflow += 1
        if self._steps_without_overflow == _GROWTH_INTERVAL:
            self.factor, self._steps_without_overflow = self.factor * 2, 0
        return True
