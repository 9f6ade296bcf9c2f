"""Lightning: DistributedDataParallel with mixed precision, callbacks, a logger, determinism."""

import gc
import os

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch):
        images, labels = batch
        loss = cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def test_step(self, batch):
        images, labels = batch
        hits = (self.layers(images).argmax(dim=1) == labels).float()
        self.log("accuracy", hits.mean(), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def digits():
    """1437 training and 360 test images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    split = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def main():
    lightning.seed_everything(0)
    training, test = digits()
    # Lightning does not take its layout from torchrun, it only compares: both must be said
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=per_node,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // per_node,
        strategy="ddp",
        max_epochs=15,
        precision="bf16-mixed",
        deterministic=True,
        callbacks=[ModelCheckpoint("checkpoints", every_n_epochs=5), LearningRateMonitor("epoch")],
        logger=CSVLogger(".", name="logs", version=""),
        log_every_n_steps=5,
        enable_progress_bar=False,  # its carriage returns make a mess of log files
    )
    model = Classifier()
    trainer.fit(model, DataLoader(training, batch_size=32, shuffle=True))
    (metrics,) = trainer.test(model, DataLoader(test, batch_size=60), verbose=False)
    if trainer.is_global_zero:
        print(f"final accuracy {metrics['accuracy']:.6f}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
