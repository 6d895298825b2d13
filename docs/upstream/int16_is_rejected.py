"""A broadcast of int16."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    try:
        group.broadcast([torch.zeros(2, dtype=torch.int16)]).wait()
        lines[rank] = f"rank {rank}: done"
    except RuntimeError as error:
        lines[rank] = f"rank {rank}: {str(error).splitlines()[0]}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
