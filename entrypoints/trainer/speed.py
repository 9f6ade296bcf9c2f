"""How much work a step is, and how near the machine's peak it comes (MFU)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
    "B200": 2250e12,
}
"""Dense bf16 (V100, T4: fp16) operations a second of the tensor cores, from NVIDIA's data sheets
(A10G: https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf).
"""


def operations(build: Callable[[], nn.Module], dataset: TensorDataset) -> float:
    """Floating-point operations for one sample, forward and backward, counted by torch.

    The backward pass takes twice the forward (arXiv:2001.08361, section 2.1). Activation
    checkpointing adds a forward that MFU does not count: it is not needed for the result.
    """
    sample = dataset.tensors[0][:1].to("meta")
    with torch.device("meta"):
        model = build().eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(sample)
    return 3.0 * counter.get_total_flops()


def peak(device: torch.device) -> float | None:
    """Operations a second that one device could do at most, where that is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((PEAKS[known] for known in PEAKS if known in name.replace("-", " ").split()), None)


def memory(device: torch.device) -> float:
    """The most bytes this process has held so far: on the GPU, or resident on the host."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
