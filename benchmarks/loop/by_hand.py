"""The loop of PyTorch's tutorials, the reference for all others."""

from __future__ import annotations

import common
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train, and print the line of JSON on rank 0."""
    if not distributed.is_initialized():  # by the loop with which it takes turns
        distributed.init_process_group("gloo")
    clock = common.Clock()
    network = common.model(clock)
    for layer in network if common.COMPILE else ():
        layer.compile()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=common.LEARNING_RATE)
    data = common.dataset()
    loader = DataLoader(data, batch_size=common.BATCH, sampler=DistributedSampler(data))
    for images, labels in loader:
        loss = common.loss_of(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    clock.report(loss.item())


if __name__ == "__main__":
    main()
    common.leave()
