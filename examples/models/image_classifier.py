"""torchvision's ResNet-18 on a folder of images, with one subfolder per class.

    PYTHONPATH=entrypoints python examples/models/image_classifier.py images
    PYTHONPATH=examples/models torchrun ... entrypoints/train.py --sync-batchnorm \
        --task image_classifier:task --task-option data=images

The first command writes such a folder, with images of stripes. The model has batch normalization,
and --sync-batchnorm gives it the same statistics as in one process.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms.v2 import Compose, Normalize, ToDtype, ToImage
from trainer.task import Task

SIZE = 32
CLASSES = {"falling": (1, 1), "flat": (0, 1), "rising": (1, -1), "upright": (1, 0)}
PREPARE = Compose([ToImage(), ToDtype(torch.float32, scale=True), Normalize([0.5] * 3, [0.25] * 3)])


def blocks(model):
    """The residual blocks, which are sharded one by one; a pipeline is cut between them."""
    return [part for name, stage in model.named_children() if "layer" in name for part in stage]


def build(classes):
    model = resnet18(num_classes=classes)
    for block in blocks(model):
        nn.init.zeros_(block.bn2.weight)  # each block starts as the identity
    return model


def task(options):
    data = Path(options.task_options["data"])
    training, validation = (ImageFolder(data / part, PREPARE) for part in ("train", "val"))

    def model():
        return build(len(training.classes))

    return Task(model, training, validation, layers=blocks, unit="images")


def write_stripes(folder, counts):
    """Write noisy stripes in four directions, `counts` images of each by part."""
    from torchvision.utils import save_image

    torch.manual_seed(0)
    place = torch.arange(SIZE) / 4
    for part, count in counts.items():
        for name, (right, down) in CLASSES.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                across = right * place[None, :] + down * place[:, None]
                stripes = (across + 6 * torch.rand(())).sin() / 4 + 0.5
                noisy = stripes + torch.randn(3, SIZE, SIZE) / 6
                save_image(noisy, folder / part / name / f"{number}.png")


if __name__ == "__main__":
    write_stripes(Path(sys.argv[1]), {"train": 64, "val": 8})
