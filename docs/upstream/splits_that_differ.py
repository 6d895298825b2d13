"""An all-to-all whose sender has three elements for a receiver that expects one."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    given = [0, 3] if rank == 0 else [0, 0]
    taken = [0, 0] if rank == 0 else [1, 0]
    output = torch.zeros(sum(taken))
    group.alltoall_base(output, torch.ones(sum(given)), taken, given).wait()
    lines[rank] = f"rank {rank}: {output.tolist()}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
