"""Train on shards in S3 with LitData, which can continue in the middle of an epoch."""

import tempfile
from pathlib import Path

import litdata
import loop
import torch
from torch import distributed


def collate(samples):
    numbers, images, labels = zip(
        *((one["number"], one["image"], one["label"]) for one in samples), strict=True
    )
    return torch.tensor(numbers), torch.stack(images), torch.tensor(labels)


def main(options):
    # a cache for each rank: in a shared one, a rank can miss the index that another is fetching
    cache = Path(tempfile.gettempdir(), f"images-{distributed.get_rank()}")
    dataset = litdata.StreamingDataset(
        f"{options.data}/litdata", cache_dir=str(cache), shuffle=True, seed=0
    )
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=options.batch_size, num_workers=1, collate_fn=collate, drop_last=True
    )
    loop.Run(loader, options.save_every).train(options.epochs)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    main(loop.arguments())
    distributed.destroy_process_group()
