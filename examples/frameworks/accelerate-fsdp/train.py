"""Accelerate with FSDP 2: parameters, gradients and optimizer states sharded over the ranks."""

import gc

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A residual layer; each one is sharded, and gathered only while it is used."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.layers(x)


def digits():
    """1437 training and 360 test images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    split = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def join():
    """An Accelerator that shards, on GPUs and on CPUs."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate 1.15 knows FSDP on accelerators only, and runs plain DDP here without a word
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def main():
    set_seed(0)
    accelerator = join()
    model = nn.Sequential(nn.Linear(64, 128), Block(128), Block(128), nn.Linear(128, 10))
    whole = sum(parameter.numel() for parameter in model.parameters())
    training, test = digits()
    model, optimizer, training_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        DataLoader(training, batch_size=32, shuffle=True),
        DataLoader(test, batch_size=60),
    )
    assert isinstance(model, FSDPModule)
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    accelerator.print(f"rank 0 holds {mine} of {whole} parameters", flush=True)

    for _ in range(15):
        for images, labels in training_loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    accelerator.print(f"final accuracy {accuracy(accelerator, model, test_loader):.6f}", flush=True)


@torch.no_grad()
def accuracy(accelerator, model, loader):
    """Over all ranks; `gather_for_metrics` drops what the last batch repeats to be full."""
    hits = [
        accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels)
        for images, labels in loader
    ]
    return torch.cat(hits).float().mean().item()


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    Accelerator().end_training()
