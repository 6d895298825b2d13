"""An image classifier: batch norm, learning-rate schedule, averaged meters, validation, and the best checkpoint."""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def averaged(total: float, count: int) -> float:
    values = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.SUM)
    return float(values[0] / values[1])


def validate(model: nn.Module, loader: Iterable[Any]) -> float:
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    model.train()
    return averaged(right, seen)


dist.init_process_group(os.environ["BACKEND"], init_method="env://")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, labels = torch.randn(64, 1, 6, 6), torch.randint(0, 3, (64,))
images[range(64), 0, labels] += 1.5
training, held_out = TensorDataset(images[:48], labels[:48]), TensorDataset(images[48:], labels[48:])
sampler = DistributedSampler(training, shuffle=True, seed=3, drop_last=True)
loader = DataLoader(training, batch_size=6, sampler=sampler)
rest = DataLoader(Subset(held_out, range(rank, 16, world)), batch_size=4)

torch.manual_seed(4)
network = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
)
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
best, history = -1.0, []
for epoch in range(3):
    sampler.set_epoch(epoch)
    losses = []
    for batch, wanted in loader:
        loss = nn.functional.cross_entropy(model(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    schedule.step()
    accuracy = validate(model, rest)
    history += [averaged(sum(losses), len(losses)), accuracy]
    if accuracy > best and rank == 0:
        torch.save({"state": model.module.state_dict()}, os.path.join(os.environ["FOLDER"], "best.pt"))
    best = max(best, accuracy)
dist.barrier()
kept = torch.load(os.path.join(os.environ["FOLDER"], "best.pt"))["state"]
RESULT = [*history, *kept.values(), *(p.detach() for p in model.parameters())]
dist.destroy_process_group()
