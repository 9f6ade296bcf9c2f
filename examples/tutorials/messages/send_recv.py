"""Messages by hand, from one rank to another: a tensor goes around all ranks and grows by one."""

import argparse
import os
from datetime import timedelta

import torch
from torch import distributed


def pass_around(device):
    """Rank 0 starts; each rank adds one and sends the tensor on, the last one to rank 0."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    following, preceding = (rank + 1) % world, (rank - 1) % world
    tensor = torch.zeros(1, device=device)
    if rank == 0:
        distributed.send(tensor + 1, dst=following)
    distributed.recv(tensor, src=preceding)
    print(f"rank {rank} received {tensor.item():.0f} from rank {preceding}", flush=True)
    if rank != 0:
        distributed.send(tensor + 1, dst=following)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--init-method", default="env://", metavar="URL")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=options.init_method,
        rank=int(os.environ["RANK"]),  # env:// would read these two by itself; tcp:// does not
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=options.timeout),
    )
    pass_around(device)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
