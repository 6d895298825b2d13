"""A small GPT: accumulated gradients, clipping, a sharded optimizer, and text that all ranks agree on."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

LETTERS, LENGTH, WIDTH = 11, 8, 16


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(LETTERS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        found: Tensor = self.head(
            self.layers(self.embedding(text) + self.position[: text.shape[1]], mask, is_causal=True)
        )
        return found


dist.init_process_group(os.environ["BACKEND"])
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(8)
model = DDP(GPT(), gradient_as_bucket_view=True)
# Not Adam: the gradient of a key's bias is zero but for rounding, which Adam would scale up.
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
story = (torch.arange(400) * torch.arange(400) // 3) % LETTERS
history = []
for step in range(3):
    optimizer.zero_grad()
    for part in range(2):
        start = 13 * (world * (2 * step + part) + rank)
        rows = torch.stack([story[start + i : start + i + LENGTH + 1] for i in range(3)])
        if part == 0:
            with model.no_sync():
                (nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / 2).backward()
            continue
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    history.append(mean / world)
texts: list[object] = [None] * world
dist.all_gather_object(texts, model(story[None, :LENGTH]).argmax(-1).tolist())
assert all(text == texts[0] for text in texts)
RESULT = [*history, *(p.detach() for p in model.parameters())]
dist.destroy_process_group()
