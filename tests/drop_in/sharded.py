"""A transformer block with tensor parallelism inside and FSDP2 outside, its checkpoint, and a run resumed from it."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


def built() -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + mesh["data"].get_local_rank())
        loss = model(torch.randn(3, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


dist.init_process_group(os.environ["BACKEND"])
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world // 2, 2) if world % 2 == 0 else (world, 1), mesh_dim_names=("data", "tensor"))
model, optimizer = built()
train(model, optimizer, 0, 2)
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=os.environ["FOLDER"])
losses = train(model, optimizer, 2, 2)

model, optimizer = built()
weights, moments = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=os.environ["FOLDER"])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
assert train(model, optimizer, 2, 2) == losses
RESULT = [*losses, *(p.full_tensor().detach() for p in model.parameters())]
dist.destroy_process_group()
