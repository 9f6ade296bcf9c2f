"""Shared by both scripts: the training loop, its snapshots, and a record of the samples used."""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="output of shards.py, such as s3://my-bucket/images")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    return parser.parse_args()


class Run:
    """The model, and everything that a snapshot must hold so that no batch is lost or repeated."""

    def __init__(self, loader, save_every):
        self.loader, self.save_every = loader, save_every
        self.rank = distributed.get_rank()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 2))
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.step = self.epoch = 0
        self.snapshot = Path(os.environ.get("DEPLOYKIT_CHECKPOINT_DIR", "."), "snapshot.pt")
        output = Path(os.environ.get("DEPLOYKIT_OUTPUT_DIR", "."))
        self.record = (output / f"samples-{self.rank}.txt").open("a")
        if self.snapshot.exists():
            self._load()

    def train(self, epochs):
        while self.epoch < epochs:
            for numbers, images, labels in self.loader:
                loss = cross_entropy(self.model(images), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                print(self.step, *numbers.tolist(), file=self.record, flush=True)
                if self.step % self.save_every == 0:
                    self._save()
            self.epoch += 1
            if self.rank == 0:
                print(f"epoch {self.epoch}: loss {loss.item():.6f}", flush=True)

    def _save(self):
        """Rank 0 writes one file for all ranks: each has its own place in the data."""
        loaders = [None] * distributed.get_world_size()
        distributed.all_gather_object(loaders, self.loader.state_dict())
        if self.rank == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "epoch": self.epoch,
                "loaders": loaders,
            }
            unfinished = self.snapshot.with_suffix(".new")
            torch.save(state, unfinished)
            unfinished.replace(self.snapshot)

    def _load(self):
        state = torch.load(self.snapshot, weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch = state["step"], state["epoch"]
        self.loader.load_state_dict(state["loaders"][self.rank])
        if self.rank == 0:
            print(f"continuing after step {self.step}", flush=True)
