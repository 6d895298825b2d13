"""An all_gather whose list of outputs has one tensor twice."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    output = torch.zeros(2)
    group.allgather([[output, output]], [torch.tensor([1.0, 2.0]) + 10 * rank]).wait()
    lines[rank] = f"rank {rank}: {output.tolist()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
