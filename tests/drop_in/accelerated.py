"""A classifier trained by accelerate: prepared loader, accumulated and clipped gradients, gathered metrics."""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(os.environ["BACKEND"])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(12)
data = TensorDataset(torch.randn(46, 6), torch.randint(0, 3, (46,)))
torch.manual_seed(3)
model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4)), schedule
)
history = []
for _ in range(2):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        history.append(accelerator.reduce(loss.detach(), "mean"))
        # The last batch is filled up with rows of the first: these are left out of the metrics.
        history.append(accelerator.gather_for_metrics(labels))
accelerator.save_model(model, os.environ["FOLDER"])
accelerator.wait_for_everyone()
assert os.path.exists(os.path.join(os.environ["FOLDER"], "model.safetensors"))
RESULT = [*history, *(p.detach() for p in accelerator.unwrap_model(model).parameters())]
accelerator.free_memory()
dist.destroy_process_group()
