"""Train a small network on all processes of a job. Replace the data and the model with your own.

    deploykit submit --wait                      # with the processes that job.yaml requests
    deploykit submit --wait -- --epochs 20       # with arguments
    python train.py                              # in one process; requires only PyTorch

A job that uses an existing checkpoint folder resumes after the last saved epoch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before init_process_group: see `join`
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Join the other processes, train, and save after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="examples per process")
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()

    device = join()
    torch.manual_seed(0)
    data = points()
    sampler = DistributedSampler(data)  # gives each process its share of the examples
    loader = DataLoader(data, options.batch_size, sampler=sampler)
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(network)  # averages the gradients of all processes
    optimizer = torch.optim.Adam(model.parameters(), options.lr)
    checkpoint = Path(os.environ.get("DEPLOYKIT_CHECKPOINT_DIR", "checkpoints"), "last.pt")

    for epoch in range(load(checkpoint, network, optimizer), options.epochs):
        sampler.set_epoch(epoch)  # reshuffle
        loss = train(model, loader, optimizer, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
            save(checkpoint, network, optimizer, epoch + 1)


def join() -> torch.device:
    """Join torchrun's process group, or create one with a single process. Return the device to use.

    `torch.distributed.nn.functional` keeps the group that exists when it is first imported (2.13),
    and DDP imports it. Gloo's threads would then outlive Python and sometimes abort the process.
    """
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda" if gpu else "cpu")


def points(count: int = 4096) -> TensorDataset:
    """Return points of a square, labeled by whether they are inside a circle. Use your own data."""
    points = torch.rand(count, 2) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).long())


def train(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Train for one epoch. Return the mean loss of all processes."""
    total = torch.zeros((), device=device)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


def save(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
    scratch = path.with_suffix(".new")
    torch.save(state, scratch)
    scratch.replace(path)


def load(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if it exists. Return the number of completed epochs."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs"])


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the model is gone
