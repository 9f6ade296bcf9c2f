"""Print what torchrun tells each process about its position in the job."""

import os

node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
print(
    f"node {node}, local rank {os.environ['LOCAL_RANK']}, rank {os.environ['RANK']}, "
    f"world size {os.environ['WORLD_SIZE']}",
    flush=True,
)
