"""A classifier trained by Lightning: sampler, averaged metrics, validation, the best checkpoint, and a resumed run."""

import logging
import os
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.seen.append(self.all_gather(loss.detach()).clone())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(epochs: int, resumed: str | None = None) -> tuple[Task, ModelCheckpoint]:
    best = ModelCheckpoint(os.environ["FOLDER"], monitor="val_loss", save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_epochs=epochs,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        plugins=[LightningEnvironment()],
    )
    task = Task()
    trainer.fit(task, loader, validation, ckpt_path=resumed)
    return task, best


dist.init_process_group(os.environ["BACKEND"])
world = dist.get_world_size()
torch.manual_seed(12)
inputs, labels = torch.randn(60, 6), torch.randint(0, 3, (60,))
loader = DataLoader(TensorDataset(inputs[:44], labels[:44]), batch_size=4, shuffle=True)
validation = DataLoader(TensorDataset(inputs[44:], labels[44:]), batch_size=4)
first, best = trained(1)
task, best = trained(2, os.path.join(os.environ["FOLDER"], "last.ckpt"))
assert best.best_model_score is not None
RESULT = [*first.seen, *task.seen, best.best_model_score, *(p.detach() for p in task.parameters())]
dist.destroy_process_group()
