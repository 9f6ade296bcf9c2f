"""DataParallel compared with DistributedDataParallel: timings of the same steps and batches."""

import argparse
import copy
import gc
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ON_GPU = torch.cuda.is_available()
BATCH, WIDTH = 256, 512


def network():
    torch.manual_seed(0)
    hidden = (nn.Linear(WIDTH, WIDTH), nn.ReLU()) * 2
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def batch(step):
    """Generated images and labels, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, WIDTH, generator=generator)
    return images, torch.randint(10, (BATCH,), generator=generator)


class CpuDataParallel(nn.Module):
    """What nn.DataParallel does in each step, for CPUs, which it does not support.

    One process copies the weights for each part of the batch and runs the parts in threads; the
    backward pass adds the gradients of all copies.
    """

    def __init__(self, module, parts=2):
        super().__init__()
        self.module = module
        self.replicas = [copy.deepcopy(module) for _ in range(parts)]

    def forward(self, images):
        weights = dict(self.module.named_parameters())
        copies = [{name: one.clone() for name, one in weights.items()} for _ in self.replicas]
        parts = images.chunk(len(self.replicas))
        with ThreadPoolExecutor(len(parts)) as pool:
            return torch.cat(list(pool.map(functional_call, self.replicas, copies, parts)))


def measure(name, parts, model, device, steps, rank=0, world=1):
    """Train, and print a row of the table."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds, started_cpu = [], time.process_time()
    for step in range(steps):
        images, labels = (part.chunk(world)[rank].to(device) for part in batch(step))
        started = time.perf_counter()
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    used = 1000 * (time.process_time() - started_cpu) / steps
    totals = torch.tensor([used / world, loss.item() / world], device=device)
    if world > 1:
        distributed.all_reduce(totals)
    if rank == 0:
        rate = 1 / statistics.median(seconds[steps // 4 :])
        used, mean = totals.tolist()
        print(f"| {name} | {parts} | {rate:.1f} | {used:.0f} ms | {mean:.6f} |", flush=True)


def data_parallel(parts, steps):
    if ON_GPU:
        model = nn.DataParallel(network().cuda(), device_ids=list(range(parts)))
        measure("DataParallel", parts, model, torch.device("cuda", 0), steps)
    else:
        model = CpuDataParallel(network(), parts)
        measure("DataParallel", parts, model, torch.device("cpu"), steps)


def distributed_data_parallel(rank, world, steps, file):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    backend = "nccl" if ON_GPU else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=world
    )
    model = DistributedDataParallel(network().to(device))
    measure("DistributedDataParallel", world, model, device, steps, rank, world)
    del model
    gc.collect()  # a model that outlives the group can abort the process as it exits
    distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[2, 4], help="numbers of GPUs or processes"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| | parts | steps/s | CPU time of a step and process | last loss |")
    print("|---|---|---|---|---|", flush=True)
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    measure("one process", 1, network().to(device), device, options.steps)
    for parts in options.parts:
        if ON_GPU and parts > torch.cuda.device_count():
            continue
        data_parallel(parts, options.steps)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (parts, options.steps, Path(folder, "store"))
            multiprocessing.spawn(distributed_data_parallel, arguments, nprocs=parts)


if __name__ == "__main__":
    main()
