"""Unsupported tensors are refused before a backend reads them: Gloo would read memory outside them.

The public API refuses layouts and names the argument; backends refuse quantized tensors and devices without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.testing import run

Make = Callable[[], Tensor]

SQUARE = torch.eye(4)
LAYOUTS: dict[str, Make] = {
    "coordinates": SQUARE.to_sparse,
    "rows": SQUARE.to_sparse_csr,
    "columns": SQUARE.to_sparse_csc,
    "blocks": lambda: SQUARE.to_sparse_bsr((2, 2)),
    "oneDNN": SQUARE.to_mkldnn,
}
OTHERS: dict[str, Make] = {
    "quantized": lambda: torch.quantize_per_tensor(SQUARE, 0.1, 0, torch.quint8),
    "without memory": lambda: SQUARE.to("meta"),
}


def several(make: Make) -> list[Tensor]:
    return [make(), make()]


# Functions, how they are called on a rank, and the argument that is refused first.
CALLS: dict[str, tuple[str, Callable[[int, Make], Any]]] = {
    "all_reduce": ("tensor", lambda rank, make: dist.all_reduce(make())),
    "broadcast": ("tensor", lambda rank, make: dist.broadcast(make(), 0)),
    "reduce": ("tensor", lambda rank, make: dist.reduce(make(), 0)),
    "all_gather": ("tensor_list[0]", lambda rank, make: dist.all_gather(several(make), make())),
    "reduce_scatter": ("output", lambda rank, make: dist.reduce_scatter(make(), several(make))),
    "all_to_all": ("input_tensor_list[0]", lambda rank, make: dist.all_to_all(several(make), several(make))),
    "gather": ("tensor", lambda rank, make: dist.gather(make(), None if rank else several(make), 0)),
    "scatter": ("tensor", lambda rank, make: dist.scatter(make(), None if rank else several(make), 0)),
    "all_to_all_single": ("output", lambda rank, make: dist.all_to_all_single(make(), make())),
    "all_reduce_coalesced": ("tensors[0]", lambda rank, make: dist.all_reduce_coalesced([make()])),
    "all_gather_coalesced": (
        "input_tensor_list[0]",
        lambda rank, make: dist.all_gather_coalesced([[make()], [make()]], [make()]),
    ),
}
# Those whose layouts are looked at before anything else is, and those that any backend could send as they are.
MORE: dict[str, tuple[str, Callable[[int, Make], Any]]] = {
    "all_gather_into_tensor": ("output_tensor", lambda rank, make: dist.all_gather_into_tensor(make(), make())),
    "reduce_scatter_tensor": ("output", lambda rank, make: dist.reduce_scatter_tensor(make(), make())),
    "isend": ("tensor", lambda rank, make: dist.isend(make(), 1 - rank)),
    "irecv": ("tensor", lambda rank, make: dist.irecv(make(), 1 - rank)),
}
CASES = [
    *[
        (name, kind, f"argument {argument!r}", partial(call, make=make))
        for kind, make in LAYOUTS.items()
        for name, (argument, call) in (CALLS | MORE).items()
        # What can be done.
        if (name, kind) != ("all_reduce", "coordinates")
    ],
    *[
        (name, kind, "quantized" if kind == "quantized" else "is on meta", partial(call, make=make))
        for kind, make in OTHERS.items()
        for name, (_, call) in CALLS.items()
    ],
]


def refusals(rank: int) -> list[str]:
    """Return the cases that raise no error, or a wrong one. Backends name the operation that a function uses."""
    wrong = []
    for name, kind, words, call in CASES:
        try:
            wrong.append(f"{name}, {kind}: {call(rank)!r}")
        except dist.UnsupportedError as error:
            text, operation = str(error), name.removesuffix("_coalesced").removesuffix("_single")
            if not all(part in text for part in (operation, words, f"rank {rank}")):
                wrong.append(f"{name}, {kind}: {text}")
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == 3.0
    return wrong


# torch warns that such tensors are new or deprecated.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_unsupported_tensors_are_refused_and_the_group_remains_usable(backend: str) -> None:
    assert run(refusals, 2, backend=backend) == [[], []]
