import os
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdist_ref as dist


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


dist.init_process_group("ref")
inputs = torch.arange(24.0).view(8, 3) / 24
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Task(), loader)
# In one piece, end included: lines of several ranks do not mix.
loss = trainer.callback_metrics["loss"]
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: loss {loss:.4f}\n")
dist.destroy_process_group()
