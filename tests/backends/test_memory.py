"""No collective needs memory that grows with the tensor: each rank adds a few windows of staging buffer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.testing import run

MIB = 1 << 20
WHOLE = 32 * MIB
# Stages, mailboxes and registers of two ranks; a temporary of one rank's part would be twice as much.
ALLOWED = 8 * MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def growth_by_operation(rank: int) -> dict[str, int]:
    """How far each call raises this rank's memory above what it holds before; all tensors have been written to."""
    a, b, part = torch.ones(WHOLE // 4), torch.ones(WHOLE // 4), torch.ones(WHOLE // 8)
    ins, outs = [*a.view(2, -1).unbind()], [*b.view(2, -1).unbind()]
    messages = [lambda: dist.send(a, 1 - rank), lambda: dist.recv(b, 1 - rank)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(a),
        "reduce": lambda: dist.reduce(a, 0),
        "broadcast": lambda: dist.broadcast(a, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(a, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, a),
        "all_to_all": lambda: dist.all_to_all(outs, ins),
        "gather": lambda: dist.gather(part, outs if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(part, ins if rank == 0 else None, 0),
        "send and recv": lambda: [call() for call in (messages if rank == 0 else messages[::-1])],
    }
    grown = {}
    # The first call of a process loads code, with a CUDA build of torch more than ALLOWED.
    dist.all_reduce(torch.ones(1))
    for name, call in calls.items():
        dist.barrier()
        # Begin to count the peak anew.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        call()
        grown[name] = resident("VmHWM") - before
    return grown


def test_no_operation_makes_a_temporary_of_a_tensors_size() -> None:
    for grown in run(growth_by_operation, 2, ranks="processes"):
        assert {name: nbytes for name, nbytes in grown.items() if nbytes > ALLOWED} == {}
