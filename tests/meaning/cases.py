"""A case: one call of one function, as a value that can be printed, sent to ranks and written by hand.

`formulas` has the data, arguments and expected results of a case, `memory` the layouts of tensors. To add a function,
add it to CALLS here and its formula to `formulas`. Programs on bare machines import this module: torch is all it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce_coalesced",
)
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "gather",
    "gather_single",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_gather_coalesced",
    "ring",
    "from_any_source",
    "barrier",
)
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
# Functions that accept blocks of a different size on each rank.
UNEVEN = ("all_gather", "reduce_scatter", "all_to_all_single")
CALLS = (*REDUCING, *MOVING, *OBJECTS)

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOATS8 = ("float8_e4m3fn", "float8_e5m2")
COMPLEX = ("complex64", "complex128")
DTYPES = (*INTEGERS, *FLOATS, *FLOATS8, *COMPLEX, "bool")
SHAPES = ((), (1,), (0,), (7,), (2, 3), (3, 0, 2), (4, 1, 5), (2, 3, 2, 2), (257,), (33, 65))
LAYOUTS = ("contiguous", "strided", "transposed", "channels_last", "gapped", "columns")
GROUPS = ("world", "head", "tail")
WAYS = ("sync", "wait", "future")


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        call: Name of the function, one of CALLS.
        dtype: dtype of all tensors.
        shape: Shape of a tensor, or of a block if there are several.
        layout: Memory layout of the tensors, one of LAYOUTS.
        op: Name of the reduction.
        group: ``"world"``; ``"head"``, which is rank 0 alone; ``"tail"``, all but rank 0 (or rank 0 if it is alone).
        way: ``"sync"``; ``"wait"``, asynchronous with `Work.wait`; ``"future"``, asynchronous with `Work.get_future`.
        root: Source or destination, modulo the group's size.
        uneven: True if block `r` is longer by `r` rows.
        seed: Seed of the data.
    """

    call: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (7,)
    layout: str = "contiguous"
    op: str = "SUM"
    group: str = "world"
    way: str = "sync"
    root: int = 0
    uneven: bool = False
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return f"Case({', '.join([repr(self.call), *shown])})"


def ops_for(call: str, dtype: str) -> tuple[str, ...]:
    """Return the reductions that the function and dtype support."""
    if call not in REDUCING:
        return ("SUM",)
    if dtype in COMPLEX:
        return ("SUM", "AVG", "PREMUL_SUM")
    if dtype in FLOATS8:
        return ("SUM", "MIN", "MAX", "AVG")
    if dtype in FLOATS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")
    return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
