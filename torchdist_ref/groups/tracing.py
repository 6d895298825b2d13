"""torch.compile: which functions of torch's it reads in place of ours, and where its graph breaks.

The compiler knows torch's functions by identity: it rewrites in-place collectives as functional ones, and computes
ranks and sizes when it traces. Ours are other functions, which it would trace line by line, down to the backend. So a
function with the same meaning in torch names that one for the compiler. Any other function breaks the graph: compiled
code calls it as it is.

The attributes are read by the compiler alone. Setting them does not import it, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import isfunction
from typing import Any

import torch.distributed

from torchdist_ref.backends.ref_in_torch.work import hide_from_compilers

_READ_AS_TORCHS = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather_into_tensor",
    # Names of torch 2.13.
    "all_gather_single": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all_single",
    "get_backend": "get_backend",
    "get_global_rank": "get_global_rank",
    "get_group_rank": "get_group_rank",
    "get_process_group_ranks": "get_process_group_ranks",
    "get_rank": "get_rank",
    "get_world_size": "get_world_size",
    "irecv": "irecv",
    "is_available": "is_available",
    "is_initialized": "is_initialized",
    "isend": "isend",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
}


def mark_for_compilers(public: Iterable[Any]) -> None:
    """Tell torch's compiler how to read the public functions among some objects."""
    for function in filter(isfunction, public):
        hide_from_compilers(function)
        counterpart = getattr(torch.distributed, _READ_AS_TORCHS.get(function.__name__, ""), None)
        if counterpart is None:
            vars(function)["_torchdynamo_disable"] = True
        else:
            read_as(function, counterpart)


def mark_methods_for_compilers(kind: type) -> None:
    """Have compiled code call the methods of a class as they are.

    The compiler would read them line by line, and check afterwards that what it has read still holds. A call that
    completes in between, in another thread, fails that check, and the program with it.
    """
    for function in filter(isfunction, vars(kind).values()):
        vars(function)["_torchdynamo_disable"] = True


def read_as(function: Any, counterpart: Any) -> None:
    """Have torch's compiler read `counterpart`, a function of torch's, wherever a program calls `function`."""
    vars(function)["_torchdynamo_inline"] = counterpart
