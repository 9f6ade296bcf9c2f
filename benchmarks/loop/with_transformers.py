"""Hugging Face's Trainer without logging, checkpoints, progress bar and clipping."""

from __future__ import annotations

import common
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    """The network with the interface that the Trainer expects."""

    def __init__(self, clock: common.Clock) -> None:
        super().__init__()
        self.network = common.model(clock)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of images (batch, 64) and labels (batch,)."""
        return {"loss": common.loss_of(self.network(images), labels)}


def main() -> None:
    """Train, and print the line of JSON on rank 0."""
    clock = common.Clock()
    arguments = TrainingArguments(
        output_dir="output",
        num_train_epochs=1,
        per_device_train_batch_size=common.BATCH,
        learning_rate=common.LEARNING_RATE,
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    items = [{"images": images, "labels": label} for images, label in common.dataset()]
    done = Trainer(model=Model(clock), args=arguments, train_dataset=items).train()
    clock.report(done.training_loss)


if __name__ == "__main__":
    main()
    common.leave()
