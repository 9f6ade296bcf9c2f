"""fastai's Learner without a progress bar, with a broadcast that works on CPUs."""

from __future__ import annotations

import common
import torch
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, OptimWrapper
from fastai.distributed import DistributedDL
from torch import distributed
from torch.utils.data import TensorDataset


def _broadcast(_: DistributedDL, values: list[int], source: int) -> list[int]:
    sent = torch.tensor(values)
    distributed.broadcast(sent, source)
    return sent.tolist()


def main() -> None:
    """Train, and print the line of JSON on rank 0."""
    DistributedDL._broadcast = _broadcast  # noqa: SLF001 - its own calls .cuda()
    clock = common.Clock()
    data = common.dataset()
    # its own loader; the batch size is per rank, as in the other loops
    loader = DataLoader(data, bs=common.BATCH, shuffle=True, num_workers=0)
    small = DataLoader(TensorDataset(*data[:64]), bs=common.BATCH)  # it requires validation data
    learner = Learner(
        DataLoaders(loader, small),
        common.model(clock),
        loss_func=CrossEntropyLossFlat(),
        opt_func=lambda groups, lr: OptimWrapper(groups, torch.optim.AdamW, lr=lr),
        lr=common.LEARNING_RATE,
    )
    with learner.no_bar(), learner.no_logging(), learner.distrib_ctx(cpu=True, sync_bn=False):
        learner.fit(1)
    clock.report(float(learner.recorder.losses[-1]))


if __name__ == "__main__":
    main()
    common.leave()
