"""Backends that are wrong in one way each, which the acid test has to find and to survive."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import torch.distributed as c10d

kept: list[mmap.mmap] = []


def reserve_memory() -> None:
    """Map shared memory as some backends do: under a name that only the end of a rank removes."""
    with open(f"/dev/shm/{os.environ.get('ODD_MEMORY', 'odd')}-{os.getpid()}", "w+b") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))


def hangs(*_: Any) -> None:
    reserve_memory()
    time.sleep(1000)


def aborts(*_: Any) -> None:
    os.abort()


def refuses(*_: Any) -> None:
    raise RuntimeError("refuses needs a license")


class OneLess(c10d.ProcessGroup):
    """Gloo, whose sums lack one, and which ends the process of rank 1 in a broadcast."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        reserve_memory()
        self.gloo = gloo

    def getBackendName(self) -> str:
        return "one_less"

    def barrier(self, options: Any = None) -> Any:
        return self.gloo.barrier(c10d.BarrierOptions() if options is None else options)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        self.gloo.allreduce(tensors, options).wait()
        tensors[0].sub_(1)
        return self.gloo.barrier(c10d.BarrierOptions())

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        if self.rank() == 1:
            os._exit(7)
        return self.gloo.broadcast(tensors, options)


def one_less(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return OneLess(c10d.ProcessGroupGloo(store, rank, size, timeout), rank, size)


for name, create in {"hangs": hangs, "aborts": aborts, "refuses": refuses, "one_less": one_less}.items():
    c10d.Backend.register_backend(name, create, devices=["cpu"])
