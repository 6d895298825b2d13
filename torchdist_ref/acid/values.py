"""Checks of values: what each rank has after a call, for each function, dtype, size and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.acid.checks import INIT, Ranks, check, same, total

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
TILE = 10_007
SIZES = ((0,), (), (1,), (7,), (3, 5), (1025,), (65_537,))


def all_reduced(ranks: Ranks, dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]] = ((5,),)) -> None:
    """Sum tensors of some dtypes and shapes."""
    for dtype in dtypes:
        for shape in shapes:
            tensor = ranks.mine(shape, dtype)
            ranks.dist.all_reduce(tensor)
            same(tensor, total(ranks, shape, dtype), f"all_reduce of {dtype} {list(shape)}")


@check(INIT, "The default group has the ranks and the size that it was made with.")
def _(ranks: Ranks) -> None:
    assert ranks.dist.get_rank() == ranks.rank and ranks.dist.get_world_size() == ranks.world


@check("all_reduce of float32 and float64", "Each rank gets the sum.")
def _(ranks: Ranks) -> None:
    all_reduced(ranks, FLOATS)


@check("all_reduce of integers", "Each rank gets the sum, for integers of 8, 32 and 64 bits.")
def _(ranks: Ranks) -> None:
    all_reduced(ranks, INTEGERS)


@check("all_reduce and broadcast of int16", "16-bit integers work, or the error says that they do not.")
def _(ranks: Ranks) -> None:
    all_reduced(ranks, (torch.int16,))
    tensor = ranks.mine((4,), torch.int16)
    ranks.dist.broadcast(tensor, 0)
    same(tensor, ranks.data(0, (4,), torch.int16))


@check("all_reduce of float16 and bfloat16", "Each rank gets the sum; small integers are exact in 16 bits.")
def _(ranks: Ranks) -> None:
    all_reduced(ranks, HALVES)


@check("all_reduce of bool", "The sum of booleans is true where any rank has true.")
def _(ranks: Ranks) -> None:
    tensor = ranks.mine((33,), torch.bool)
    ranks.dist.all_reduce(tensor)
    same(tensor, torch.stack([ranks.data(rank, (33,), torch.bool) for rank in ranks.everyone]).any(0))


@check("all_reduce of complex64", "Each rank gets the sum of complex numbers.")
def _(ranks: Ranks) -> None:
    tensor = torch.complex(ranks.mine(), -ranks.mine())
    ranks.dist.all_reduce(tensor)
    same(tensor, torch.complex(total(ranks), -total(ranks)))


@check("all_reduce of each size", "Empty tensors, scalars, odd sizes and 64 Ki elements are summed.")
def _(ranks: Ranks) -> None:
    all_reduced(ranks, (torch.float32, torch.int64), SIZES)


@check("all_reduce of 32 MiB", "A tensor that exceeds each internal buffer is summed.")
def _(ranks: Ranks) -> None:
    all_reduced(ranks, (torch.float32,), ((8 * 1024 * 1024 + 3,),))


def large(ranks: Ranks, rank: int) -> Tensor:
    """Return what a rank begins with, more than 2**31 bytes: a tile, repeated."""
    tile = ranks.data(rank, (TILE,), torch.int8)
    return tile.repeat(2**31 // TILE + 2)


def same_tiles(found: Tensor, tile: Tensor) -> None:
    """Raise unless a large tensor is a tile, repeated; compare some MiB at a time."""
    rows = found.view(-1, TILE)
    for begin in range(0, len(rows), 4096):
        part = rows[begin : begin + 4096]
        if not torch.equal(part, tile.expand_as(part)):
            row = begin + int((part != tile).any(1).nonzero()[0])
            raise AssertionError(
                f"the elements from {row * TILE} on are {rows[row][:6].tolist()}, expected {tile[:6].tolist()}"
            )


@check("all_reduce of more than 2 GiB", "A tensor with more bytes than an int32 can count is summed.", large=True)
def _(ranks: Ranks) -> None:
    tensor = large(ranks, ranks.rank)
    ranks.dist.all_reduce(tensor)
    same_tiles(tensor, total(ranks, (TILE,), torch.int8))


@check("broadcast of more than 2 GiB", "All ranks get the tensor of the source.", large=True)
def _(ranks: Ranks) -> None:
    tensor = large(ranks, ranks.rank)
    ranks.dist.broadcast(tensor, ranks.world - 1)
    same_tiles(tensor, ranks.data(ranks.world - 1, (TILE,), torch.int8))


@check("a message of more than 2 GiB", "The receiver gets each byte.", large=True, needs_two=True)
def _(ranks: Ranks) -> None:
    if ranks.rank == 0:
        ranks.dist.send(large(ranks, 0), 1)
    elif ranks.rank == 1:
        tensor = large(ranks, 1)
        ranks.dist.recv(tensor, 0)
        same_tiles(tensor, ranks.data(0, (TILE,), torch.int8))


@check("all_reduce of a strided tensor", "It is summed and the elements between stay, or the error refuses it.")
def _(ranks: Ranks) -> None:
    around = ranks.mine((4, 6))
    before, view = around.clone(), around[:, ::2]
    ranks.dist.all_reduce(view)
    same(view.contiguous(), total(ranks, (4, 6))[:, ::2].contiguous())
    same(around[:, 1::2].contiguous(), before[:, 1::2].contiguous(), "what lies between the elements")


def operator(ranks: Ranks, name: str, fold: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Reduce with an operator, and compare with a fold over all ranks' tensors."""
    for dtype in dtypes:
        tensor, expected = ranks.mine((9,), dtype), ranks.data(0, (9,), dtype)
        ranks.dist.all_reduce(tensor, getattr(ranks.dist.ReduceOp, name))
        for rank in ranks.everyone[1:]:
            expected = fold(expected, ranks.data(rank, (9,), dtype))
        same(tensor, expected, f"all_reduce of {dtype} with {name}")


@check("ReduceOp.MIN and MAX", "Each rank gets the smallest and the largest value.")
def _(ranks: Ranks) -> None:
    operator(ranks, "MIN", torch.minimum, (torch.float32, torch.int64))
    operator(ranks, "MAX", torch.maximum, (torch.float32, torch.int64))


@check("ReduceOp.PRODUCT", "Each rank gets the product.")
def _(ranks: Ranks) -> None:
    operator(ranks, "PRODUCT", torch.mul, (torch.float64, torch.int64))


@check("ReduceOp.BAND, BOR and BXOR", "Each rank gets the bitwise result of integers.")
def _(ranks: Ranks) -> None:
    folds = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    for name, fold in folds.items():
        operator(ranks, name, fold, (torch.int32,))


@check("ReduceOp.AVG", "Each rank gets the mean of floats.")
def _(ranks: Ranks) -> None:
    tensor = ranks.mine() * ranks.world
    ranks.dist.all_reduce(tensor, ranks.dist.ReduceOp.AVG)
    same(tensor, total(ranks))


@check("NaN in MAX", "A NaN of any rank is not lost.", "IEEE 754, and torch.maximum")
def _(ranks: Ranks) -> None:
    tensor = torch.tensor(
        [1.0, float("nan")] if ranks.rank == ranks.world - 1 else [2.0, 3.0], dtype=torch.float32, device=ranks.device
    )
    ranks.dist.all_reduce(tensor, ranks.dist.ReduceOp.MAX)
    assert tensor[1].isnan(), f"got {tensor.tolist()}"


@check("broadcast from each rank", "All ranks get the tensor of the source.")
def _(ranks: Ranks) -> None:
    for source in ranks.everyone:
        for dtype in (*FLOATS, *HALVES, *INTEGERS, torch.bool, torch.complex64):
            tensor = ranks.mine((4,), dtype) if ranks.rank == source else ranks.empty((4,), dtype)
            ranks.dist.broadcast(tensor, source)
            same(tensor, ranks.data(source, (4,), dtype), f"broadcast of {dtype} from rank {source}")


@check("reduce to each rank", "The destination gets the sum.")
def _(ranks: Ranks) -> None:
    for destination in ranks.everyone:
        tensor = ranks.mine()
        ranks.dist.reduce(tensor, destination)
        if ranks.rank == destination:
            same(tensor, total(ranks))


@check("all_gather into a list", "Each rank gets the tensor of each rank, and its own stays.")
def _(ranks: Ranks) -> None:
    found, own = [ranks.empty((2, 3)) for _ in ranks.everyone], ranks.mine((2, 3))
    ranks.dist.all_gather(found, own)
    for rank, tensor in enumerate(found):
        same(tensor, ranks.data(rank, (2, 3)), f"the tensor of rank {rank}")
    same(own, ranks.mine((2, 3)), "the input")


@check("all_gather of unequal sizes", "Each rank gets the tensor of each rank, or the error refuses it.")
def _(ranks: Ranks) -> None:
    found = [ranks.empty((rank + 1,)) for rank in ranks.everyone]
    ranks.dist.all_gather(found, ranks.mine((ranks.rank + 1,)))
    for rank, tensor in enumerate(found):
        same(tensor, ranks.data(rank, (rank + 1,)), f"the tensor of rank {rank}")


@check("all_gather_into_tensor", "Each rank gets all tensors one behind the other.")
def _(ranks: Ranks) -> None:
    found = ranks.empty((2 * ranks.world, 3))
    ranks.dist.all_gather_into_tensor(found, ranks.mine((2, 3)))
    same(found, torch.cat([ranks.data(rank, (2, 3)) for rank in ranks.everyone]))


@check("gather to each rank", "The destination gets the tensor of each rank.")
def _(ranks: Ranks) -> None:
    for destination in ranks.everyone:
        found = [ranks.empty() for _ in ranks.everyone] if ranks.rank == destination else None
        ranks.dist.gather(ranks.mine(), found, destination)
        for rank, tensor in enumerate(found or []):
            same(tensor, ranks.data(rank), f"the tensor of rank {rank}")


@check("scatter from each rank", "Each rank gets its part of the source's list.")
def _(ranks: Ranks) -> None:
    for source in ranks.everyone:
        found = ranks.empty()
        parts = [ranks.data(rank + source) for rank in ranks.everyone] if ranks.rank == source else None
        ranks.dist.scatter(found, parts, source)
        same(found, ranks.data(ranks.rank + source))


@check("reduce_scatter of a list", "Each rank gets its part of the sum.")
def _(ranks: Ranks) -> None:
    found = ranks.empty()
    ranks.dist.reduce_scatter(found, [ranks.mine() * (part + 1) for part in ranks.everyone])
    same(found, total(ranks) * (ranks.rank + 1))


@check("reduce_scatter_tensor", "Each rank gets its part of the sum of one tensor.")
def _(ranks: Ranks) -> None:
    found = ranks.empty((2, 3))
    ranks.dist.reduce_scatter_tensor(found, ranks.mine((2 * ranks.world, 3)))
    same(found, total(ranks, (2 * ranks.world, 3))[2 * ranks.rank : 2 * ranks.rank + 2])


@check("all_to_all of lists", "Rank r gets from each rank the tensor that this one has for r.")
def _(ranks: Ranks) -> None:
    found = [ranks.empty() for _ in ranks.everyone]
    ranks.dist.all_to_all(found, [ranks.mine() + rank for rank in ranks.everyone])
    for rank, tensor in enumerate(found):
        same(tensor, ranks.data(rank) + ranks.rank, f"the tensor of rank {rank}")


@check("all_to_all of lists of unequal sizes", "Each tensor arrives, or the error says that sizes must be equal.")
def _(ranks: Ranks) -> None:
    found = [ranks.empty((rank + 1,)) for rank in ranks.everyone]
    ranks.dist.all_to_all(found, [ranks.mine((ranks.rank + 1,)) + rank for rank in ranks.everyone])
    for rank, tensor in enumerate(found):
        same(tensor, ranks.data(rank, (rank + 1,)) + ranks.rank, f"the tensor of rank {rank}")


@check("all_to_all_single", "Equal parts of one tensor are exchanged.")
def _(ranks: Ranks) -> None:
    found = ranks.empty((2 * ranks.world, 3))
    ranks.dist.all_to_all_single(found, ranks.mine((2 * ranks.world, 3)))
    begin = 2 * ranks.rank
    same(found, torch.cat([ranks.data(rank, (2 * ranks.world, 3))[begin : begin + 2] for rank in ranks.everyone]))


@check("all_to_all_single with splits", "Parts of unequal and of no size are exchanged.")
def _(ranks: Ranks) -> None:
    def parts(rank: int) -> list[int]:
        return [(rank + other) % 3 for other in ranks.everyone]

    def sent(source: int, target: int) -> Tensor:
        pieces: list[Tensor] = ranks.data(source, (sum(parts(source)),)).split(parts(source))
        return pieces[target]

    arriving = [parts(rank)[ranks.rank] for rank in ranks.everyone]
    found = ranks.empty((sum(arriving),))
    ranks.dist.all_to_all_single(found, ranks.mine((sum(parts(ranks.rank)),)), arriving, parts(ranks.rank))
    same(found, torch.cat([sent(rank, ranks.rank) for rank in ranks.everyone]))


@check("all_gather_object and broadcast_object_list", "Objects arrive as equal objects, small and large.")
def _(ranks: Ranks) -> None:
    found: list[Any] = [None] * ranks.world
    ranks.dist.all_gather_object(found, {"rank": ranks.rank, "text": "é" * (1000 * ranks.rank + 1)})
    assert found == [{"rank": rank, "text": "é" * (1000 * rank + 1)} for rank in ranks.everyone]
    objects = [ranks.rank, "x", (1, 2)] if ranks.rank == 0 else [None] * 3
    ranks.dist.broadcast_object_list(objects, 0)
    assert objects == [0, "x", (1, 2)], objects


@check("gather_object and scatter_object_list", "Each destination gets its objects.")
def _(ranks: Ranks) -> None:
    last = ranks.world - 1
    found: list[Any] | None = [None] * ranks.world if ranks.rank == last else None
    ranks.dist.gather_object(("from", ranks.rank), found, last)
    assert found is None or found == [("from", rank) for rank in ranks.everyone], found
    mine: list[Any] = [None]
    ranks.dist.scatter_object_list(mine, [f"to {rank}" for rank in ranks.everyone] if ranks.rank == 0 else None, 0)
    assert mine == [f"to {ranks.rank}"], mine
