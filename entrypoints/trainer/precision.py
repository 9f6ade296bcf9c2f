"""fp16 has small gradients vanish: the loss is scaled up, and its gradients down again."""

from __future__ import annotations

import math


class LossScale:
    """The factor on the loss: halved when a gradient overflows, doubled after a calm while.

    `torch.amp.GradScaler` decides by the gradients of its own rank; under tensor and pipeline
    parallelism these differ, and ranks would part. Here the norm of the whole model decides,
    which every rank knows alike. The constants are GradScaler's defaults.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = 65536.0 if enabled else 1.0
        self._calm = 0

    def accepts(self, norm: float) -> bool:
        """Adapt to the norm of the scaled gradients; False when this step must be left out."""
        if not self.enabled:
            return True
        if not math.isfinite(norm):
            self.factor, self._calm = self.factor / 2, 0
            return False
        self._calm += 1
        if self._calm == 2000:  # noqa: PLR2004 - GradScaler's growth_interval
            self.factor, self._calm = self.factor * 2, 0
        return True
