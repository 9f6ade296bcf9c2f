"""One process per GPU: the same network, sharded with fully_shard (FSDP 2)."""

import gc
import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def digits():
    """1280 training and 517 test images of 8 x 8 pixels, scaled to 0..1."""
    images, labels = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return torch.utils.data.random_split(whole, [1280, 517], torch.Generator().manual_seed(0))


def main():
    torch.manual_seed(0)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    training, test = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=64 // world, sampler=sampler)
    share = Subset(test, range(rank, len(test), world))
    test_loader = DataLoader(share, batch_size=len(test))

    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        hits = torch.zeros(1, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                hits += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        distributed.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {hits.item() / len(test):.6f}", flush=True)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)  # on all ranks: it gathers
    if rank == 0:
        torch.save(state, "model.pt")


if __name__ == "__main__":
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    gc.collect()  # a model that outlives the group can abort the process as it exits
    distributed.destroy_process_group()
