"""Write 2048 small images to a bucket as shards of 128: for WebDataset, and for LitData.

Usage: python shards.py s3://my-bucket/images
"""

import io
import sys
import tarfile

import boto3
import litdata
import torch

SAMPLES, SHARD = 2048, 128


def sample(number):
    """An image of 16 x 16 pixels, and the number by which it is known in the record."""
    pixels = torch.rand(16, 16, generator=torch.Generator().manual_seed(number))
    return {"number": number, "image": pixels, "label": int(pixels.mean() > 0.5)}


def tar(numbers):
    """A shard of WebDataset: a tar archive with the files of each sample side by side."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as archive:
        for one in map(sample, numbers):
            files = {"bin": one["image"].numpy().tobytes(), "cls": str(one["label"]).encode()}
            for extension, content in files.items():
                member = tarfile.TarInfo(f"{one['number']:08d}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return shard.getvalue()


def main(target):
    bucket, _, prefix = target.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3")
    for first in range(0, SAMPLES, SHARD):
        key = f"{prefix}/webdataset/{first // SHARD:06d}.tar"
        s3.put_object(Bucket=bucket, Key=key, Body=tar(range(first, first + SHARD)))
    litdata.optimize(
        sample,
        list(range(SAMPLES)),
        output_dir=f"{target}/litdata",
        chunk_size=SHARD,
        num_workers=1,
        verbose=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
