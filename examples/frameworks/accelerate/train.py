"""Accelerate: the plain loop, with DistributedDataParallel and a learning rate schedule."""

import gc

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 15


def digits():
    """1437 training and 360 test images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    split = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def main():
    set_seed(0)
    # without cpu=True a machine that has no GPU trains one lone process per rank, in silence
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    training, test = digits()
    training_loader = DataLoader(training, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    # in steps of one process: a prepared scheduler advances by one for each process
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=EPOCHS * len(training_loader)
    )
    model, optimizer, scheduler, training_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, training_loader, DataLoader(test, batch_size=60)
    )

    for _ in range(EPOCHS):
        for images, labels in training_loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

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
