"""A sum of tensors of nine elements on one rank and five on the other."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    tensor = torch.ones(5 if rank else 9)
    group.allreduce([tensor]).wait()
    lines[rank] = f"rank {rank}: {tensor.tolist()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
