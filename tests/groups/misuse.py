"""Wrong calls by substitution: a correct call in which one argument is replaced by a wrong one.

Both ranks make the same call, on torch's library and on ours. Calls that make torch hang, end the process or break the
group are made on ours only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

import torchdist_ref as dist

SIZE = 2


@dataclass(frozen=True)
class Site:
    """Library and rank on which a wrong call is made.

    Attributes:
        library: torch.distributed or torchdist_ref.
        rank: This rank, of two.
        group: A group of both ranks, created for this call.
    """

    library: Any
    rank: int
    group: Any

    @property
    def other(self) -> int:
        """The other rank."""
        return 1 - self.rank


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor."""
    return torch.ones(count, dtype=dtype)


def two() -> list[torch.Tensor]:
    """Return one tensor for each rank."""
    return [ones(), ones()]


def sparse() -> torch.Tensor:
    """Return a sparse COO tensor."""
    return torch.eye(3).to_sparse()


def quantized() -> torch.Tensor:
    """Return a quantized tensor."""
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


# Correct arguments of each function, in one group of two ranks.
CORRECT: dict[str, Callable[[Site], dict[str, Any]]] = {
    "all_reduce": lambda p: {"tensor": ones()},
    "reduce": lambda p: {"tensor": ones(), "dst": 0},
    "broadcast": lambda p: {"tensor": ones(), "src": 0},
    "all_gather": lambda p: {"tensor_list": two(), "tensor": ones()},
    "all_gather_into_tensor": lambda p: {"output_tensor": ones(8), "input_tensor": ones()},
    "all_gather_single": lambda p: {"output_tensor": ones(8), "input_tensor": ones()},
    "all_gather_coalesced": lambda p: {"output_tensor_lists": [two(), two()], "input_tensor_list": two()},
    "gather": lambda p: {"tensor": ones(), "gather_list": two() if p.rank == 0 else None, "dst": 0},
    "scatter": lambda p: {"tensor": ones(), "scatter_list": two() if p.rank == 0 else None, "src": 0},
    "reduce_scatter": lambda p: {"output": ones(), "input_list": two()},
    "reduce_scatter_tensor": lambda p: {"output": ones(), "input": ones(8)},
    "reduce_scatter_single": lambda p: {"output": ones(), "input": ones(8)},
    "all_reduce_coalesced": lambda p: {"tensors": two()},
    "all_to_all": lambda p: {"output_tensor_list": two(), "input_tensor_list": two()},
    "all_to_all_single": lambda p: {"output": ones(8), "input": ones(8)},
    "barrier": lambda p: {},
    "monitored_barrier": lambda p: {"timeout": timedelta(seconds=5)},
    "send": lambda p: {"tensor": ones(), "dst": p.other},
    "isend": lambda p: {"tensor": ones(), "dst": p.other},
    "recv": lambda p: {"tensor": ones(), "src": p.other},
    "irecv": lambda p: {"tensor": ones(), "src": p.other},
    "all_gather_object": lambda p: {"object_list": [None, None], "obj": 5},
    "gather_object": lambda p: {"obj": 5, "object_gather_list": [None, None] if p.rank == 0 else None, "dst": 0},
    "broadcast_object_list": lambda p: {"object_list": [5], "src": 0},
    "scatter_object_list": lambda p: {
        "scatter_object_output_list": [None],
        "scatter_object_input_list": [1, 2] if p.rank == 0 else None,
        "src": 0,
    },
    "send_object_list": lambda p: {"object_list": [5], "dst": p.other},
    "recv_object_list": lambda p: {"object_list": [5], "src": p.other},
}
TENSORS = {"tensor", "output_tensor", "input_tensor", "output", "input"}
LISTS = {
    "tensor_list",
    "gather_list",
    "scatter_list",
    "input_list",
    "output_tensor_list",
    "input_tensor_list",
    "tensors",
}
ROOTS = {"src", "dst"}
OF_ROOT = ("gather_list", "scatter_list")
REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce_coalesced",
)
MESSAGES = ("send", "isend", "recv", "irecv", "send_object_list", "recv_object_list")

NOT_TENSORS: dict[str, Any] = {"text": "x", "None": None, "a number": 3, "a list": two(), "numbers": [1.0, 2.0]}
NOT_LISTS: dict[str, Any] = {
    "text": "xy",
    "a number": 3,
    "a tensor": ones(),
    "numbers": [1, 2],
    "one tensor too few": [ones()],
    "one too many": [*two(), ones()],
    "nothing": [],
    "two dtypes": [ones(), ones(4, torch.int64)],
    "other sizes": [ones(3), ones(3)],
}
NOT_ROOTS: dict[str, Any] = {"too large": 2, "negative": -1, "text": "0", "a fraction": 0.5, "None": None}
NOT_OPS: dict[str, Any] = {
    "a number": 0,
    "text": "sum",
    "None": None,
    "no factor": torch.distributed.ReduceOp.PREMUL_SUM,
}
NOT_GROUPS: dict[str, Any] = {"text": "workers", "a number": 5}


@dataclass(frozen=True)
class Misuse:
    """One wrong call.

    Attributes:
        name: The function, the argument and the mistake.
        call: Function that makes the call.
    """

    name: str
    call: Callable[[Site], Any]

    @property
    def function(self) -> str:
        """Name of the function."""
        return self.name.split(" ")[0].rstrip(":")


def replaced(function: str, argument: str, what: str, value: Any) -> Misuse:
    """Return the correct call with one argument replaced."""

    def call(site: Site) -> Any:
        arguments = {"group": site.group, **CORRECT[function](site), argument: value}
        return getattr(site.library, function)(**arguments)

    return Misuse(f"{function} {argument}: {what}", call)


def substitutions() -> Iterator[Misuse]:
    """Yield each function with each argument replaced by each value that is wrong for its kind."""
    for function, correct in CORRECT.items():
        for argument in correct(Site(None, 0, None)):
            for what, value in wrong_for(argument).items():
                yield replaced(function, argument, what, value)
        for what, value in NOT_GROUPS.items():
            yield replaced(function, "group", what, value)
        if function in REDUCING:
            for what, value in NOT_OPS.items():
                yield replaced(function, "op", what, value)


def destroyed(site: Site) -> Any:
    """Return a destroyed group."""
    group = site.library.new_group()
    # A rank that destroys it at once would break the connections of another that still makes it.
    dist.barrier()
    site.library.destroy_process_group(group)
    return group


def more() -> Iterator[Misuse]:
    """Yield mistakes that involve several arguments, or other arguments."""
    I64, ops = torch.int64, torch.distributed.ReduceOp
    calls: dict[str, Callable[[Site], Any]] = {
        "all_reduce bits of floats": lambda p: p.library.all_reduce(ones(), ops.BAND, p.group),
        "all_reduce order of complex": lambda p: p.library.all_reduce(ones(4, torch.complex64), ops.MAX, p.group),
        "broadcast src and group_src": lambda p: p.library.broadcast(ones(), 0, p.group, group_src=0),
        "broadcast group_src too large": lambda p: p.library.broadcast(ones(), group=p.group, group_src=2),
        "all_gather one dtype for two": lambda p: p.library.all_gather(two(), ones(4, I64), p.group),
        "all_gather_into_tensor size": lambda p: p.library.all_gather_into_tensor(ones(7), ones(), p.group),
        "all_gather_into_tensor dtype": lambda p: p.library.all_gather_into_tensor(ones(8, I64), ones(), p.group),
        "reduce_scatter_tensor size": lambda p: p.library.reduce_scatter_tensor(ones(), ones(7), group=p.group),
        "reduce_scatter_tensor dtype": lambda p: p.library.reduce_scatter_tensor(ones(), ones(8, I64), group=p.group),
        "all_to_all_single odd size": lambda p: p.library.all_to_all_single(ones(7), ones(7), group=p.group),
        "all_to_all_single splits": lambda p: p.library.all_to_all_single(ones(4), ones(4), [1, 2], [1, 3], p.group),
        "all_to_all_single split count": lambda p: p.library.all_to_all_single(ones(4), ones(4), [4], [4], p.group),
        "send to oneself": lambda p: p.library.send(ones(), p.rank, p.group),
        "batch_isend_irecv nothing": lambda p: p.library.batch_isend_irecv([]),
        "batch_isend_irecv a tensor": lambda p: p.library.batch_isend_irecv([ones()]),
        "batch_isend_irecv no list": lambda p: p.library.batch_isend_irecv(5),
        "P2POp another function": lambda p: p.library.P2POp(p.library.send, ones(), p.other, p.group),
        "P2POp no tensor": lambda p: p.library.P2POp(p.library.isend, "x", p.other, p.group),
        "P2POp no peer": lambda p: p.library.P2POp(p.library.isend, ones(), None, p.group),
        "scatter_object_list empty output": lambda p: p.library.scatter_object_list([], [1, 2], 0, p.group),
        "new_group ranks twice": lambda p: p.library.new_group([0, 0]),
        "new_group rank too large": lambda p: p.library.new_group([0, 2]),
        "new_group rank negative": lambda p: p.library.new_group([-1, 0]),
        "new_group ranks no list": lambda p: p.library.new_group(5),
        "new_group ranks texts": lambda p: p.library.new_group(["0", "1"]),
        "new_group ranks none": lambda p: p.library.new_group([]),
        "new_group too many ranks": lambda p: p.library.new_group([0, 1, 2]),
        "new_group timeout a number": lambda p: p.library.new_group([0, 1], timeout=5),
        "new_group timeout negative": lambda p: p.library.new_group([0, 1], timeout=-timedelta(seconds=1)),
        "new_group timeout zero": lambda p: p.library.new_group([0, 1], timeout=timedelta(0)),
        "monitored_barrier timeout zero": lambda p: p.library.monitored_barrier(p.group, timeout=timedelta(0)),
        "isend tag negative": lambda p: p.library.isend(ones(), p.other, p.group, tag=-1),
        "isend tag text": lambda p: p.library.isend(ones(), p.other, p.group, tag="a"),
        "isend tag too large": lambda p: p.library.isend(ones(), p.other, p.group, tag=2**31),
        "all_reduce sparse maximum": lambda p: p.library.all_reduce(sparse(), ops.MAX, p.group),
        "broadcast sparse": lambda p: p.library.broadcast(sparse(), 0, p.group),
        "all_reduce quantized": lambda p: p.library.all_reduce(quantized(), group=p.group),
        "all_reduce destroyed group": lambda p: p.library.all_reduce(ones(), group=destroyed(p)),
        "broadcast destroyed group": lambda p: p.library.broadcast(ones(), 0, group=destroyed(p)),
        "barrier destroyed group": lambda p: p.library.barrier(destroyed(p)),
        "get_global_rank destroyed group": lambda p: p.library.get_global_rank(destroyed(p), 5),
        "get_rank destroyed group": lambda p: p.library.get_rank(destroyed(p)),
        "get_backend destroyed group": lambda p: p.library.get_backend(destroyed(p)),
        "get_process_group_ranks destroyed group": lambda p: p.library.get_process_group_ranks(destroyed(p)),
        "get_group_rank destroyed group": lambda p: p.library.get_group_rank(destroyed(p), 0),
        "monitored_barrier destroyed group": lambda p: p.library.monitored_barrier(destroyed(p)),
        "P2POp destroyed group": lambda p: p.library.P2POp(p.library.isend, ones(), p.other, destroyed(p)),
        "split_group destroyed group": lambda p: p.library.split_group(destroyed(p), [[0, 1]]),
        "shrink_group destroyed group": lambda p: p.library.shrink_group([1 - p.rank], destroyed(p)),
        "destroy_process_group twice": lambda p: p.library.destroy_process_group(destroyed(p)),
        "new_group unknown backend": lambda p: p.library.new_group([0, 1], backend="smoke"),
        "new_subgroups size of zero": lambda p: p.library.new_subgroups(0),
        "new_subgroups size too large": lambda p: p.library.new_subgroups(3),
        "new_subgroups_by_enumeration twice": lambda p: p.library.new_subgroups_by_enumeration([[0, 1], [1]]),
        "new_subgroups_by_enumeration None": lambda p: p.library.new_subgroups_by_enumeration(None),
        "init_process_group twice": lambda p: p.library.init_process_group("gloo"),
        "get_global_rank too large": lambda p: p.library.get_global_rank(p.group, 5),
        "get_group_rank too large": lambda p: p.library.get_group_rank(p.group, 5),
        "get_group_rank no group": lambda p: p.library.get_group_rank(-100, 5),
        "get_global_rank no group": lambda p: p.library.get_global_rank(-100, 5),
        "get_backend no group": lambda p: p.library.get_backend(p.library.GroupMember.NON_GROUP_MEMBER),
        "get_process_group_ranks no group": lambda p: p.library.get_process_group_ranks(-100),
        "monitored_barrier timeout": lambda p: p.library.monitored_barrier(p.group, timeout=5),
        "send outside the group": lambda p: p.library.send(ones(), p.other, p.library.GroupMember.NON_GROUP_MEMBER),
        "Backend no text": lambda p: p.library.Backend(5),
        "supports_complex no op": lambda p: p.library.supports_complex("sum"),
    }
    for name, call in calls.items():
        yield Misuse(name, call)


def of_stores() -> Iterator[Misuse]:
    """Yield store operations with keys and values of wrong types and sizes."""
    calls: dict[str, Callable[[Any], Any]] = {
        "set key a number": lambda s: s.set(5, "v"),
        "set value a number": lambda s: s.set("k", 5),
        "set value None": lambda s: s.set("k", None),
        "get key a number": lambda s: s.get(5),
        "get key None": lambda s: s.get(None),
        "add amount text": lambda s: s.add("n", "1"),
        "add amount a fraction": lambda s: s.add("n", 1.5),
        "add amount too large": lambda s: s.add("n", 2**63),
        "wait keys text": lambda s: s.wait("key", timedelta(milliseconds=10)),
        "wait keys numbers": lambda s: s.wait([1], timedelta(milliseconds=10)),
        "wait timeout a number": lambda s: s.wait(["key"], 5),
        "check keys numbers": lambda s: s.check([1]),
        "compare_set desired a number": lambda s: s.compare_set("k", "a", 5),
        "delete_key key a number": lambda s: s.delete_key(5),
        "set_timeout timeout a number": lambda s: s.set_timeout(5),
        "multi_set one value for two keys": lambda s: s.multi_set(["a", "b"], ["1"]),
        "append value a number": lambda s: s.append("k", 5),
        "set value half a letter": lambda s: s.set("k", "\ud800"),
        "get key half a letter": lambda s: s.get("\udfff\ud800"),
    }
    for name, call in calls.items():
        yield Misuse(name, lambda site, call=call: call(site.library.HashStore()))
    yield Misuse("PrefixStore of a number", lambda site: site.library.PrefixStore("p", 5))


def wrong_for(argument: str) -> dict[str, Any]:
    """Return values that are wrong for an argument of this name."""
    kinds = ((TENSORS, NOT_TENSORS), (LISTS, NOT_LISTS), (ROOTS, NOT_ROOTS))
    found = next((values for names, values in kinds if argument in names), {})
    # An empty list is valid on non-root ranks, which would then wait for the root, which raises.
    return {what: value for what, value in found.items() if what != "nothing" or argument not in OF_ROOT}
