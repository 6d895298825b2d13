"""is_completed() of a reduce_scatter after wait(), and its future."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

store, lines = dist.HashStore(), {}


def run(rank: int) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    work = group.reduce_scatter([torch.zeros(1)], [[torch.ones(1), torch.ones(1)]])
    work.wait()
    try:
        future = type(work.get_future()).__name__
    except RuntimeError as error:
        future = str(error).splitlines()[0]
    lines[rank] = f"rank {rank}: completed {work.is_completed()}, future: {future}"


threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(lines[rank] for rank in sorted(lines)))
