"""A sum of float32 on one rank and int32 on the other."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    tensor = torch.tensor([1.5]) if rank == 0 else torch.tensor([1], dtype=torch.int32)
    group.allreduce([tensor]).wait()
    lines[rank] = f"rank {rank}: {tensor.item()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
