"""The output of a reduce_scatter of inputs that require a gradient."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    output = torch.zeros(1)
    parts = [torch.ones(1, requires_grad=True) for _ in range(2)]
    group.reduce_scatter([output], [parts]).wait()
    lines[rank] = f"rank {rank}: requires_grad {output.requires_grad}, grad_fn {type(output.grad_fn).__name__}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
