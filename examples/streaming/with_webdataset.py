"""Train on shards in S3 with WebDataset; `Shards` tracks the position in the data.

The order of an epoch follows from its number alone. To continue, samples that were already used
are read again and dropped, but not decoded.
"""

import random

import boto3
import loop
import numpy as np
import torch
import webdataset
from torch import distributed


def open_s3(url, *_, **__):
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"]


webdataset.gopen_schemes["s3"] = open_s3


class Shards:
    def __init__(self, location, batch_size):
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        found = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")
        self.urls = [f"s3://{bucket}/{item['Key']}" for item in found["Contents"]]
        self.batch_size = batch_size
        self.epoch = self.batches = 0

    def __iter__(self):
        urls = random.Random(self.epoch).sample(self.urls, len(self.urls))
        rank, world = distributed.get_rank(), distributed.get_world_size()
        own = urls[rank : len(urls) // world * world : world]  # as many for each rank
        shuffle = webdataset.detshuffle(500, initial=500, seed=0, epoch=self.epoch - 1)
        samples = webdataset.DataPipeline(
            webdataset.SimpleShardList(own), webdataset.tarfile_to_samples(), shuffle
        )
        batches = webdataset.batched(self.batch_size, collation_fn=list, partial=False)(samples)
        done = self.batches
        for number, batch in enumerate(batches):
            if number >= done:
                self.batches = number + 1
                yield decoded(batch)
        self.epoch, self.batches = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state):
        self.epoch, self.batches = state["epoch"], state["batches"]


def decoded(batch):
    numbers = torch.tensor([int(one["__key__"]) for one in batch])
    pixels = [np.frombuffer(one["bin"], dtype=np.float32).reshape(16, 16) for one in batch]
    labels = torch.tensor([int(one["cls"]) for one in batch])
    return numbers, torch.tensor(np.stack(pixels)), labels


def main(options):
    loader = Shards(f"{options.data}/webdataset", options.batch_size)
    loop.Run(loader, options.save_every).train(options.epochs)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    main(loop.arguments())
    distributed.destroy_process_group()
