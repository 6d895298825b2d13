"""A model cut into stages by torch.distributed.pipelining, trained with 1F1B."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group(os.environ["BACKEND"])
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6)
layers = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(world)]
stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=2 * world, loss_fn=nn.MSELoss())
optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
inputs, targets = torch.randn(8 * world, 6), torch.randn(8 * world, 6)
losses: list[torch.Tensor] = []
for _ in range(3):
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(inputs)
    elif rank == world - 1:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step()
    optimizer.step()
RESULT = [*losses, *(p.detach() for p in layers[rank].parameters())]
dist.destroy_process_group()
