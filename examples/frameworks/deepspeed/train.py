"""DeepSpeed: ZeRO 1, 2 or 3, one after the other, each from the same initial weights."""

import argparse
import gc
import os

import deepspeed
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CUDA = torch.cuda.is_available()


def digits():
    """1437 training and 360 test images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    split = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def settings(stage):
    """DeepSpeed's configuration, which is often a JSON file."""
    return {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def train(stage):
    """Accuracy on the test images after 15 epochs."""
    torch.manual_seed(0)
    training, test = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        config=settings(stage),
    )
    sampler = DistributedSampler(training, seed=0)
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
    found = accuracy(engine, test)
    engine.destroy()
    return found


@torch.no_grad()
def accuracy(engine, test):
    """Over all ranks: hits are added up, not averaged."""
    sampler = DistributedSampler(test, shuffle=False)
    hits = torch.zeros(2, device=engine.device)
    for images, labels in DataLoader(test, batch_size=60, sampler=sampler):
        right = engine(images.to(engine.device)).argmax(dim=1) == labels.to(engine.device)
        hits += torch.tensor([right.sum(), len(labels)], device=engine.device)
    distributed.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    stages = parser.parse_args().stages
    if not CUDA:
        # else DeepSpeed compiles an all-reduce over shared memory first, which needs g++, takes
        # half a minute and waits for ever on the lock of a run that was killed meanwhile
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if CUDA else "gloo")
    for stage in stages:
        found = train(stage)
        if os.environ["RANK"] == "0":
            print(f"final accuracy {found:.6f} with ZeRO {stage}", flush=True)
        gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
