"""fastai, vision: scikit-learn's digits as images, with `Learner` and a small XResNet."""

import gc

import numpy as np
import torch
from fastai.distributed import DistributedDL, rank_distrib
from fastai.vision.all import *  # fastai's own custom; it adds methods to its classes
from sklearn.datasets import load_digits
from torch import distributed

if not torch.cuda.is_available():

    @patch
    def _broadcast(_: DistributedDL, values, source):
        """As fastai 2.8's own, which calls `.cuda()` on every machine."""
        values = torch.tensor(values)
        distributed.broadcast(values, source)
        return values.tolist()


def data():
    """1797 pictures of 8 x 8 pixels; every fifth is for validation."""
    digits = load_digits()
    pixels = (digits.images * 255 / 16).astype(np.uint8)
    block = DataBlock(
        blocks=(ImageBlock(PILImageBW), CategoryBlock),
        get_x=lambda index: pixels[index],
        get_y=lambda index: digits.target[index],
        splitter=IndexSplitter(range(0, len(pixels), 5)),
    )
    return block.dataloaders(range(len(pixels)), bs=64, num_workers=0)


def main():
    set_seed(0)
    model = XResNet(ResBlock, 1, [1, 1, 1, 1], c_in=1, n_out=10, widen=0.25)
    learner = Learner(data(), model, metrics=accuracy)
    # batch norm over all ranks exists for GPUs only, and progress bars make a mess of log files
    gpu = torch.cuda.is_available()
    with learner.no_bar(), learner.distrib_ctx(cpu=not gpu, sync_bn=gpu):
        learner.fit_one_cycle(3, 1e-2)
    if rank_distrib() == 0:
        print(f"final accuracy {learner.recorder.values[-1][-1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
    # gloo's threads must not outlive Python: they abort the process (torch 2.13)
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
