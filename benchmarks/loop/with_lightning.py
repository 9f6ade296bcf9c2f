"""Lightning's Trainer without logging, checkpoints and progress bar."""

from __future__ import annotations

import common
import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, clock: common.Clock) -> None:
        super().__init__()
        self.network = common.model(clock)
        self.last = float("nan")

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """The loss of a batch; remembers the last one."""
        images, labels = batch
        loss = common.loss_of(self.network(images), labels)
        if number + 1 == common.STEPS:
            self.last = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of every loop."""
        return torch.optim.AdamW(self.parameters(), lr=common.LEARNING_RATE)


def main() -> None:
    """Train, and print the line of JSON on rank 0."""
    clock = common.Clock()
    module = Module(clock)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=common.world(),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(common.dataset(), batch_size=common.BATCH, shuffle=True))
    clock.report(module.last)


if __name__ == "__main__":
    main()
    common.leave()
