"""all_gather_into_tensor with a stacked output, which the documentation allows."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    output = torch.zeros(2, 3)
    try:
        group._allgather_base(output, torch.full((3,), float(rank))).wait()
        lines[rank] = f"rank {rank}: {output.tolist()}"
    except (RuntimeError, ValueError) as error:
        lines[rank] = f"rank {rank}: {str(error).splitlines()[0]}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
