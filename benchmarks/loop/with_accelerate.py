"""Accelerate's loop."""

from __future__ import annotations

import common
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main() -> None:
    """Train, and print the line of JSON on rank 0."""
    accelerator = Accelerator(cpu=True)
    clock = common.Clock()
    network = common.model(clock)
    model, optimizer, loader = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=common.LEARNING_RATE),
        DataLoader(common.dataset(), batch_size=common.BATCH, shuffle=True),
    )
    for images, labels in loader:
        loss = common.loss_of(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    clock.report(loss.item())


if __name__ == "__main__":
    main()
    common.leave()
