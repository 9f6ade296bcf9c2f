"""Floating-point operations of a step, peak rates of GPUs, and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from trainer.task import call

PEAK_FLOPS = {
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
"""Dense bf16 (V100, T4: fp16) tensor-core operations per second, from NVIDIA's data sheets
(A10G: https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf).
"""


def flops_per_sample(build: Callable[[], nn.Module], inputs: Any) -> float:
    """Operations of one sample's forward and backward pass; torch counts the forward pass.

    `inputs` is a batch, of which the first sample counts. Raises what the model raises on tensors
    without data, and ValueError if it is not a new one: one in training on several ranks would wait
    for the others.

    The backward pass takes twice as many (https://arxiv.org/abs/2001.08361, section 2.1). The
    second forward pass of activation checkpointing does not count towards MFU.
    """
    sample = pytree.tree_map_only(Tensor, lambda leaf: leaf[:1].to("meta"), inputs)
    with torch.device("meta"):
        model = build()
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("Task.model returns a model, or parts of one, that it had built before")
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(model, sample)
    forward: int = counter.get_total_flops()
    return 3.0 * forward


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of one device; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((rate for name, rate in PEAK_FLOPS.items() if name in words), None)


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in bytes: allocated on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
