import sys

import torch

import torchdist_ref as dist

dist.init_process_group()
rank, local_rank = dist.get_rank(), dist.get_node_local_rank()
torch.manual_seed(0)
model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
for _ in range(3):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
ranks = f"rank {rank} of {dist.get_world_size()}, local rank {local_rank}, on {dist.get_backend()}"
# In one piece, end included: lines of several ranks do not mix.
sys.stdout.write(f"{ranks}: weights {weights:.4f}\n")
dist.destroy_process_group()
