"""Data-parallel training with a sampler, snapshots and a resumed run, as beginners write it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = os.path.join(os.environ["FOLDER"], "snapshot.pt")


class Trainer:
    def __init__(self, model: nn.Module, data: TensorDataset) -> None:
        self.rank = int(os.environ["RANK"])
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        self.first = 0
        if os.path.exists(SNAPSHOT):
            saved = torch.load(SNAPSHOT)
            model.load_state_dict(saved["model"])
            self.first = saved["epoch"]
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, last: int) -> None:
        for epoch in range(self.first, last):
            self.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(inputs), targets).backward()
                self.optimizer.step()
            if self.rank == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch + 1}, SNAPSHOT)
        dist.barrier()


dist.init_process_group(os.environ["BACKEND"])
torch.manual_seed(1)
data = TensorDataset(torch.randn(38, 6), torch.randn(38, 2))
torch.manual_seed(2)
Trainer(nn.Linear(6, 2), data).train(2)
again = Trainer(nn.Linear(6, 2), data)
again.train(4)
RESULT = [again.first, *(p.detach() for p in again.model.parameters())]
dist.destroy_process_group()
