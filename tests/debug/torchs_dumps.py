"""Program that writes dumps of torch's own flight recorder: three ranks on Gloo, of which rank 1 lacks the last call.

Its arguments are two directories, for pickles and for JSON. It is a program of its own, since torch decides once in a
process whether to record.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
import torch._C._distributed_c10d as c
import torch.distributed as theirs


def dump() -> bytes:
    """Return torch's record, without stacks: reading their symbols takes five seconds."""
    found: bytes = c._dump_fr_trace(includeStackTraces=False)  # type: ignore[attr-defined]
    return found


def program(rank: int, pickles: Path, texts: Path) -> None:
    """Make two calls on all ranks and one on all but rank 1, and write torch's dumps."""
    store = theirs.FileStore(str(pickles / ".store"), 3)
    theirs.init_process_group("gloo", store=store, rank=rank, world_size=3)
    tensor = torch.ones(3, 4)
    theirs.all_reduce(tensor)
    theirs.broadcast(tensor, 0)
    # torch notes the end of a call on a thread of its own, after the call has returned.
    while not all(entry["retired"] for entry in pickle.loads(dump())["entries"]):
        pass
    if rank != 1:
        theirs.all_reduce(torch.ones(5), async_op=True)
    (pickles / f"nccl_trace_rank_{rank}").write_bytes(dump())
    (texts / f"nccl_trace_rank_{rank}.json").write_bytes(c._dump_fr_trace_json())  # type: ignore[attr-defined]
    store.add("written", 1)
    while store.add("written", 0) < 3:
        pass


if __name__ == "__main__":
    children = []
    for rank in range(3):
        child = os.fork()
        if not child:
            program(rank, *map(Path, sys.argv[1:]))
            # The last call of ranks 0 and 2 would wait.
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
