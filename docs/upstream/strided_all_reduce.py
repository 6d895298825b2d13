"""A sum of columns of a matrix: a view with gaps."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    matrix = torch.tensor([[1.0, 100.0], [2.0, 200.0], [3.0, 300.0]])
    group.allreduce([matrix[:, 0]]).wait()
    lines[rank] = f"rank {rank}: {matrix.tolist()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
