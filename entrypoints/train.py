"""Train a small convolutional network on handwritten digits, on one process or many.

    python train.py                                      # one process
    torchrun --standalone --nproc-per-node=2 train.py    # two; the same numbers
    deploykit submit --backend local                     # or slurm, or sagemaker

From the environment it reads torchrun's variables and, where deploykit set them,
DEPLOYKIT_OUTPUT_DIR, DEPLOYKIT_CHECKPOINT_DIR and DEPLOYKIT_RESTART_COUNT. Started again with the
same checkpoint folder, it goes on where it stopped. On SIGTERM or SIGUSR2 to any rank, all ranks
finish the step, rank 0 saves, and every exit code is 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import Subset

from trainer import checkpoint, data, group, model
from trainer.group import Place
from trainer.metrics import Record

OUTPUT = Path(os.environ.get("DEPLOYKIT_OUTPUT_DIR", "output"))
CHECKPOINTS = Path(os.environ.get("DEPLOYKIT_CHECKPOINT_DIR", "checkpoints"))


def main() -> None:
    options = parse(sys.argv[1:])
    notices = listen()
    place = group.join()
    say(place, f"{place.world} rank(s) on {place.device.type}, global batch {options.batch_size}")
    train(options, place, notices)
    group.leave()


def train(options: argparse.Namespace, place: Place, notices: Sequence[int]) -> None:
    torch.manual_seed(options.seed)
    training, validation, test = data.splits()
    loader = data.training_loader(training, options.batch_size, options.seed, place)
    network = model.build().to(place.device)
    optimizer = SGD(network.parameters(), lr=options.lr, momentum=0.9)
    step = resume(options, place, network, optimizer)
    replica = DistributedDataParallel(network)  # its backward() averages gradients over the ranks
    record = Record(OUTPUT if place.first else None, step, tensorboard=options.tensorboard)

    first_epoch, done = divmod(step, len(loader))
    for epoch in range(first_epoch, options.epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in islice(loader, done, None):
            loss = cross_entropy(replica(images.to(place.device)), labels.to(place.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1

            count = len(labels)
            total, seen, stops = group.totals(place, loss.item() * count, count, bool(notices))
            if step % options.log_every == 0:
                record.write(step, epoch, loss=total / seen, lr=options.lr)
            if stops:
                path = save(options, place, network, optimizer, step)
                say(place, f"stopped early after step {step}, as told; resume from {path}")
                record.close()
                return

        done = 0  # only the epoch that a resumed run begins with has steps behind it
        accuracy, validation_loss = evaluate(network, validation, place)
        record.write(step, epoch, val_loss=validation_loss, val_accuracy=accuracy)
        say(place, f"epoch {epoch}: loss {total / seen:.4f}, validation accuracy {accuracy:.4f}")
        if (epoch + 1) % options.checkpoint_every == 0 or epoch + 1 == options.epochs:
            save(options, place, network, optimizer, step)

    accuracy, _ = evaluate(network, validation, place)
    test_accuracy, _ = evaluate(network, test, place)
    record.write(step, options.epochs, val_accuracy=accuracy, test_accuracy=test_accuracy)
    record.close()
    say(place, f"validation accuracy {accuracy:.4f} ({len(validation)} images)")
    say(place, f"test accuracy {test_accuracy:.4f} ({len(test)} images)")


@torch.no_grad()
def evaluate(network: nn.Module, dataset: Subset, place: Place) -> tuple[float, float]:
    """Accuracy and mean loss over all of `dataset`.

    Sums and counts are added up over the ranks, not means, whose shares may differ in size.
    """
    correct = loss = count = 0.0
    for images, labels in data.evaluation_loader(dataset, place):
        outputs, expected = network(images.to(place.device)), labels.to(place.device)
        correct += (outputs.argmax(dim=1) == expected).sum().item()
        loss += cross_entropy(outputs, expected, reduction="sum").item()
        count += len(labels)
    correct, loss, count = group.totals(place, correct, loss, count)
    return correct / count, loss / count


def save(
    options: argparse.Namespace, place: Place, network: nn.Module, optimizer: Optimizer, step: int
) -> Path | None:
    """Write a checkpoint on rank 0. Nothing in a step is random and the order of the images
    follows from seed and step, so these few values are the whole state of a run.
    """
    if not place.first:
        return None
    state = {
        "step": step,
        "settings": settings(options),
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    return checkpoint.save(CHECKPOINTS, step, state)


def resume(
    options: argparse.Namespace, place: Place, network: nn.Module, optimizer: Optimizer
) -> int:
    """Load the newest checkpoint, if there is one; the number of steps done.

    Only rank 0 reads it, and sends it on: other nodes need not see the folder.
    """
    found = group.from_first(place, checkpoint.newest(CHECKPOINTS) if place.first else None)
    if found is None:
        return 0
    path, state = found
    if state["settings"] != settings(options):
        sys.exit(
            f"{path} comes from a run with {state['settings']}, this one has "
            f"{settings(options)}: use the same, or another checkpoint folder"
        )
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    restarts = os.environ.get("DEPLOYKIT_RESTART_COUNT", "0")
    say(place, f"resumed from {path}, {state['step']} steps done (restart {restarts})")
    return state["step"]


def settings(options: argparse.Namespace) -> dict[str, float]:
    """The options that decide the numbers, and so cannot change when a run is resumed."""
    return {"batch_size": options.batch_size, "lr": options.lr, "seed": options.seed}


def listen() -> Sequence[int]:
    """The signals that ask for an early stop, as they come in."""
    notices: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _frame: notices.append(received))
    return notices


def say(place: Place, text: str) -> None:
    if place.first:
        print(text, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=15, help="in all, resumed ones included")
    add("--batch-size", type=int, default=64, help="global: it is split over the ranks")
    add("--lr", type=float, default=0.05, help="learning rate")
    add("--seed", type=int, default=0, help="for the first weights and the order of the images")
    add("--checkpoint-every", type=int, default=1, metavar="EPOCHS")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--no-tensorboard", dest="tensorboard", action="store_false")
    options = parser.parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch_size % world or not 0 < options.batch_size <= data.TRAINING:
        parser.error(
            f"--batch-size {options.batch_size} must be a multiple of the {world} ranks "
            f"and at most {data.TRAINING}, the number of training images"
        )
    return options


if __name__ == "__main__":
    main()
