import os

import torch
import torch.multiprocessing as mp

import torchdist_ref as dist
from torchdist_ref import DistributedDataParallel as DDP


def train(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(60):
        optimizer.zero_grad()
        inputs = torch.ones(8, 4) * (rank + step % 3)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
    losses = [torch.zeros(()), loss.detach()]
    dist.all_reduce_multigpu(losses)
    if rank == 0:
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}, loss below 0.1: {losses[0].item() < 0.1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29512")
    mp.spawn(train, args=(2,), nprocs=2, join=True)
