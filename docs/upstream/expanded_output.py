"""A sum into a tensor whose four elements share one place in memory."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    memory = torch.tensor([1.0, 20.0, 30.0, 40.0])
    group.allreduce([memory[:1].expand(4)]).wait()
    lines[rank] = f"rank {rank}: {memory.tolist()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
