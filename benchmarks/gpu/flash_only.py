"""The trainer with fused attention only: an error where a call of it cannot be FlashAttention.

https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))

import train

if __name__ == "__main__":
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        sys.exit(train.main())
