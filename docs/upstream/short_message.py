"""A receive of five elements from a send of three."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    tensor = torch.ones(3) if rank == 0 else torch.zeros(5)
    (group.send([tensor], 1, 0) if rank == 0 else group.recv([tensor], 0, 0)).wait()
    lines[rank] = f"rank {rank}: {tensor.tolist()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
