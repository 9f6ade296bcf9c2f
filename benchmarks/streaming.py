"""Reading from S3: a request for each of many small files, against shards.

A moto server on this machine holds the images of examples/streaming in both kinds of shards, and
the first 512 as files. One process reads an epoch of each; the server counts the requests. A real
S3 takes longer to answer a request, and sends more in a second: both favor shards further.

    make .venv-streaming/.ready && .venv/bin/python benchmarks/streaming.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.aws_server import moto_server, recorder  # noqa: E402

PYTHON = ROOT / ".venv-streaming/bin/python"
DATA = "s3://my-bucket/images"
START = f"""\
import sys, time
sys.path.insert(0, {str(ROOT / "examples/streaming")!r})
import boto3, torch
from torch import distributed
s3 = boto3.client("s3")
"""
PUT = """
import shards
for number in range(512):
    pixels = shards.sample(number)["image"].numpy().tobytes()
    s3.put_object(Bucket="my-bucket", Key=f"images/files/{number:08d}.bin", Body=pixels)
"""
ALONE = 'distributed.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)\n'
READ = {
    "files, one request each": """
def one(number):
    return s3.get_object(Bucket="my-bucket", Key=f"images/files/{number:08d}.bin")["Body"].read()
batches = ([one(number)] for number in range(512))
""",
    "WebDataset": ALONE
    + f"""
from with_webdataset import Shards
batches = (numbers for numbers, *_ in Shards("{DATA}/webdataset", 32))
""",
    "LitData": ALONE
    + f"""
import os, litdata, with_litdata
cache = os.getcwd() + "/cache"
dataset = litdata.StreamingDataset("{DATA}/litdata", cache_dir=cache, shuffle=True, seed=0)
loader = litdata.StreamingDataLoader(
    dataset, batch_size=32, num_workers=1, collate_fn=with_litdata.collate
)
batches = (numbers for numbers, *_ in loader)
""",
}
COUNT = """
start = time.perf_counter()
count = sum(len(batch) for batch in batches)
print(count, time.perf_counter() - start)
"""


def main() -> None:
    with moto_server() as port, recorder(port) as server, tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_SECRET_ACCESS_KEY": "testing",
            "OMP_NUM_THREADS": "1",
        }

        def run(*words: str) -> str:
            command = [PYTHON, "-W", "ignore", *words]
            done = subprocess.run(
                command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            return done.stdout

        run("-c", START + 's3.create_bucket(Bucket="my-bucket")')
        run(str(ROOT / "examples/streaming/shards.py"), DATA)
        run("-c", START + PUT)
        print(f"{'':25} {'samples/s':>10} {'requests for 1000 samples':>26}")
        for name, read in READ.items():
            server.requests.clear()
            samples, seconds = run("-c", START + read + COUNT).split()[-2:]
            speed = int(samples) / float(seconds)
            requests = 1000 * len(server.requests) / int(samples)
            print(f"{name:25} {speed:10.0f} {requests:26.0f}", flush=True)


if __name__ == "__main__":
    main()
