"""all_gather of tensors of unequal sizes, which the documentation allows."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    outputs = [torch.zeros(1), torch.zeros(2)]
    try:
        group.allgather([outputs], [torch.ones(rank + 1)]).wait()
        lines[rank] = f"rank {rank}: {[each.tolist() for each in outputs]}"
    except (RuntimeError, ValueError) as error:
        lines[rank] = f"rank {rank}: {str(error).splitlines()[0]}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
