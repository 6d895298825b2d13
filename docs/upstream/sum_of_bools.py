"""A sum of booleans: the byte that is left in memory."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=20))
    tensor = torch.tensor([True])
    group.allreduce([tensor]).wait()
    byte, equal = tensor.view(torch.uint8).item(), tensor.equal(torch.tensor([True]))
    lines[rank] = f"rank {rank}: byte {byte}, equal to True: {equal}"


threads = [Thread(target=run, args=(rank,)) for rank in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
