"""Messages by hand, among all ranks: gradients are averaged in a loop, as DDP does."""

import os

import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss

SAMPLES, STEPS = 512, 40


def train(device):
    """Learn y = 3 x1 - 2 x2 + 1; return the model. Each rank has its own part of the samples."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    points = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
    targets = points @ torch.tensor([[3.0], [-2.0]]) + 1
    points, targets = points[rank::world].to(device), targets[rank::world].to(device)

    torch.manual_seed(rank)
    model = nn.Linear(2, 1).to(device)
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, src=0)  # all start with the weights of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step in range(STEPS):
        loss = mse_loss(model(points), targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {mean.item() / world:.6f}", flush=True)
    return model


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = train(device)
    found = torch.cat([model.weight.flatten(), model.bias]).tolist()
    print(f"weights {found[0]:.4f} {found[1]:.4f}, bias {found[2]:.4f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
