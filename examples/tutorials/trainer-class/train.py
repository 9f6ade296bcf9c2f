"""A Trainer class like those in tutorials: a ConvNet, mixed precision, snapshots, validation."""

import argparse
import gc
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.scores = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images):
        return self.scores(self.features(images).flatten(1))


class Trainer:
    def __init__(self, model, train_data, optimizer, criterion, save_every, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.model = DistributedDataParallel(model.to(self.device))
        self.train_data = train_data
        self.optimizer = optimizer
        self.criterion = criterion
        self.save_every = save_every
        self.snapshot_path = Path(snapshot_path)
        # float16 needs its gradients scaled; bfloat16, on a CPU, does not
        on_gpu = self.device.type == "cuda"
        self.precision = torch.float16 if on_gpu else torch.bfloat16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=on_gpu)
        self.first_epoch = 0
        if self.snapshot_path.exists():
            self._load_snapshot()

    def train(self, epochs, validation_data):
        for epoch in range(self.first_epoch, epochs):
            loss = self._run_epoch(epoch)
            accuracy = self.validate(validation_data)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.6f}", flush=True)
            if (epoch + 1) % self.save_every == 0 and self.rank == 0:
                self._save_snapshot(epoch + 1)

    def _run_epoch(self, epoch):
        """Train for one epoch; return the mean loss over all ranks."""
        self.train_data.sampler.set_epoch(epoch)
        self.model.train()
        total = torch.zeros((), device=self.device)
        for images, labels in self.train_data:
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, self.precision):
                scores = self.model(images.to(self.device))
                loss = self.criterion(scores, labels.to(self.device))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += loss.detach()
        distributed.all_reduce(total)
        return total.item() / len(self.train_data) / distributed.get_world_size()

    @torch.no_grad()
    def validate(self, data):
        """The accuracy over the samples of all ranks."""
        self.model.eval()
        counts = torch.zeros(2, device=self.device)  # correct, all
        for images, labels in data:
            hits = self.model(images.to(self.device)).argmax(dim=1) == labels.to(self.device)
            counts[0] += hits.sum()
            counts[1] += len(hits)
        distributed.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def _save_snapshot(self, epochs_run):
        snapshot = {
            "epochs_run": epochs_run,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        unfinished = self.snapshot_path.with_suffix(".new")
        torch.save(snapshot, unfinished)
        unfinished.replace(self.snapshot_path)  # a killed job leaves the old one, not half a file

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=self.device, weights_only=True)
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.scaler.load_state_dict(snapshot["scaler"])
        self.first_epoch = snapshot["epochs_run"]
        if self.rank == 0:
            print(f"continuing with epoch {self.first_epoch}", flush=True)


def digits():
    """1280 training and 517 validation images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16).float().view(-1, 1, 8, 8)
    whole = TensorDataset(images, torch.tensor(labels))
    return torch.utils.data.random_split(whole, [1280, 517], torch.Generator().manual_seed(0))


def main(options):
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    training, validation = digits()
    sampler = DistributedSampler(training)
    model = ConvNet()
    trainer = Trainer(
        model,
        train_data=DataLoader(training, batch_size=options.batch_size // world, sampler=sampler),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        criterion=cross_entropy,
        save_every=options.save_every,
        snapshot_path=options.snapshot_path,
    )
    share = Subset(validation, range(rank, len(validation), world))
    trainer.train(options.epochs, DataLoader(share, batch_size=128))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="global batch size, over all ranks"
    )
    parser.add_argument("--save-every", type=int, default=2, metavar="EPOCHS")
    parser.add_argument("--snapshot-path", default="snapshot.pt")
    options = parser.parse_args()

    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main(options)
    gc.collect()  # a model that outlives the group can abort the process as it exits
    distributed.destroy_process_group()
