"""What each rank gets: small programs that run on 2 and on 4 ranks while the site is built.

`.. each-rank:: all_reduce`
    The input and the output of each rank, as the program of that name in `PROGRAMS` returns them.

The block is added to the documentation of each function that has a program. Programs are named like the function, with
its package where that is not `torchdist_ref`. Do not add results here: they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import torchdist_ref as dist
from torchdist_ref.nn import functional
from torchdist_ref.testing import run

SIZES = (2, 4)
Program = Callable[[int, int], tuple[Any, Any]]
PROGRAMS: dict[str, Program] = {}


def program(*names: str) -> Callable[[Program], Program]:
    """Register a program under names of functions."""

    def register(function: Program) -> Program:
        for name in names or (function.__name__,):
            PROGRAMS[name] = function
        return function

    return register


def numbers(rank: int, count: int = 2) -> torch.Tensor:
    """Return a small tensor whose values show rank and position: 2, 4 on rank 0; 3, 9 on rank 1; 4, 16 on rank 2."""
    return torch.tensor([(rank + 2) ** (i + 1) for i in range(count)])


def zeros(count: int, size: int) -> list[torch.Tensor]:
    """Return `count` outputs of `size` elements."""
    return [torch.zeros(size, dtype=torch.int64) for _ in range(count)]


def lists(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the values of tensors."""
    return [tensor.tolist() for tensor in tensors]


@program()
def all_reduce(rank: int, size: int) -> tuple[Any, Any]:
    """Sum over all ranks."""
    tensor = numbers(rank)
    before = tensor.tolist()
    dist.all_reduce(tensor)
    return before, tensor.tolist()


@program()
def all_reduce_coalesced(rank: int, size: int) -> tuple[Any, Any]:
    """Sum two tensors over all ranks."""
    tensors = [numbers(rank), numbers(rank, 1)]
    before = lists(tensors)
    dist.all_reduce_coalesced(tensors)
    return before, lists(tensors)


@program()
def broadcast(rank: int, size: int) -> tuple[Any, Any]:
    """Copy the tensor of rank 1."""
    tensor = numbers(rank)
    before = tensor.tolist()
    dist.broadcast(tensor, src=1)
    return before, tensor.tolist()


@program()
def reduce(rank: int, size: int) -> tuple[Any, Any]:
    """Sum on rank 0."""
    tensor = numbers(rank)
    before = tensor.tolist()
    dist.reduce(tensor, dst=0)
    return before, tensor.tolist() if rank == 0 else "unspecified"


@program()
def all_gather(rank: int, size: int) -> tuple[Any, Any]:
    """Gather on all ranks, as a list."""
    outputs = zeros(size, 2)
    dist.all_gather(outputs, numbers(rank))
    return numbers(rank).tolist(), lists(outputs)


@program()
def all_gather_coalesced(rank: int, size: int) -> tuple[Any, Any]:
    """Gather two tensors on all ranks, as lists."""
    inputs = [numbers(rank), numbers(rank, 1)]
    outputs = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    return lists(inputs), [lists(block) for block in outputs]


@program("all_gather_into_tensor", "all_gather_single")
def all_gather_into_tensor(rank: int, size: int) -> tuple[Any, Any]:
    """Gather on all ranks, in one tensor."""
    output = torch.zeros(2 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(output, numbers(rank))
    return numbers(rank).tolist(), output.tolist()


@program()
def gather(rank: int, size: int) -> tuple[Any, Any]:
    """Gather on rank 0."""
    outputs = zeros(size, 2) if rank == 0 else None
    dist.gather(numbers(rank), outputs, dst=0)
    return numbers(rank).tolist(), lists(outputs) if outputs else "nothing"


@program("gather_single", "gather_into_tensor")
def gather_single(rank: int, size: int) -> tuple[Any, Any]:
    """Gather on rank 0, in one tensor."""
    output = torch.zeros(2 * size, dtype=torch.int64) if rank == 0 else None
    dist.gather_single(numbers(rank), output, dst=0)
    return numbers(rank).tolist(), "nothing" if output is None else output.tolist()


@program()
def scatter(rank: int, size: int) -> tuple[Any, Any]:
    """Scatter the list of rank 0."""
    output = torch.zeros(2, dtype=torch.int64)
    inputs = [numbers(r) for r in range(size)] if rank == 0 else None
    dist.scatter(output, inputs, src=0)
    return lists(inputs) if inputs else "nothing", output.tolist()


@program()
def reduce_scatter(rank: int, size: int) -> tuple[Any, Any]:
    """Sum blocks of a list, one for each rank."""
    output, inputs = torch.zeros(1, dtype=torch.int64), list(numbers(rank, size).split(1))
    before = lists(inputs)
    dist.reduce_scatter(output, inputs)
    return before, output.tolist()


@program("reduce_scatter_tensor", "reduce_scatter_single")
def reduce_scatter_tensor(rank: int, size: int) -> tuple[Any, Any]:
    """Sum blocks of a tensor, one for each rank."""
    output, blocks = torch.zeros(1, dtype=torch.int64), numbers(rank, size)
    before = blocks.tolist()
    dist.reduce_scatter_tensor(output, blocks)
    return before, output.tolist()


@program()
def all_to_all(rank: int, size: int) -> tuple[Any, Any]:
    """Exchange entries of lists."""
    outputs, inputs = zeros(size, 1), list(numbers(rank, size).split(1))
    dist.all_to_all(outputs, inputs)
    return lists(inputs), lists(outputs)


@program()
def all_to_all_single(rank: int, size: int) -> tuple[Any, Any]:
    """Exchange blocks of tensors."""
    output, blocks = torch.zeros(size, dtype=torch.int64), numbers(rank, size)
    dist.all_to_all_single(output, blocks)
    return blocks.tolist(), output.tolist()


@program("isend", "irecv")
def isend(rank: int, size: int) -> tuple[Any, Any]:
    """Start to send from each even rank to the next, and wait."""
    tensor = numbers(rank)
    before = tensor.tolist()
    work = dist.isend(tensor, dst=rank + 1) if rank % 2 == 0 else dist.irecv(tensor, src=rank - 1)
    work.wait()
    return before, tensor.tolist()


@program("send", "recv")
def send(rank: int, size: int) -> tuple[Any, Any]:
    """Send from each even rank to the next."""
    tensor = numbers(rank)
    before = tensor.tolist()
    if rank % 2 == 0:
        dist.send(tensor, dst=rank + 1)
    else:
        dist.recv(tensor, src=rank - 1)
    return before, tensor.tolist()


@program("batch_isend_irecv", "P2POp")
def batch_isend_irecv(rank: int, size: int) -> tuple[Any, Any]:
    """Pass tensors around a ring."""
    tensor, received = numbers(rank), torch.zeros(2, dtype=torch.int64)
    sending = dist.P2POp(dist.isend, tensor, (rank + 1) % size)
    receiving = dist.P2POp(dist.irecv, received, (rank - 1) % size)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return tensor.tolist(), received.tolist()


@program()
def all_gather_object(rank: int, size: int) -> tuple[Any, Any]:
    """Gather objects on all ranks."""
    outputs: list[Any] = [None] * size
    dist.all_gather_object(outputs, {"rank": rank})
    return {"rank": rank}, outputs


@program()
def gather_object(rank: int, size: int) -> tuple[Any, Any]:
    """Gather objects on rank 0."""
    outputs: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, outputs, dst=0)
    return {"rank": rank}, outputs or "nothing"


@program()
def broadcast_object_list(rank: int, size: int) -> tuple[Any, Any]:
    """Copy the objects of rank 1."""
    objects: list[Any] = [f"rank {rank}", rank * rank]
    before = list(objects)
    dist.broadcast_object_list(objects, src=1)
    return before, objects


@program()
def scatter_object_list(rank: int, size: int) -> tuple[Any, Any]:
    """Scatter the objects of rank 0."""
    output: list[Any] = [None]
    inputs = [f"for rank {r}" for r in range(size)] if rank == 0 else None
    dist.scatter_object_list(output, inputs, src=0)
    return inputs or "nothing", output


@program("send_object_list", "recv_object_list")
def send_object_list(rank: int, size: int) -> tuple[Any, Any]:
    """Send objects from each even rank to the next."""
    objects: list[Any] = [f"rank {rank}", rank * rank]
    before = list(objects)
    if rank % 2 == 0:
        dist.send_object_list(objects, dst=rank + 1)
    else:
        dist.recv_object_list(objects, src=rank - 1)
    return before, objects


def pair(rank: int) -> list[torch.Tensor]:
    """Return the two tensors of a rank: those of virtual ranks 2 r and 2 r + 1."""
    return [numbers(2 * rank, 1), numbers(2 * rank + 1, 1)]


@program()
def all_reduce_multigpu(rank: int, size: int) -> tuple[Any, Any]:
    """Sum over all tensors of all ranks."""
    tensors = pair(rank)
    before = lists(tensors)
    dist.all_reduce_multigpu(tensors)
    return before, lists(tensors)


@program()
def broadcast_multigpu(rank: int, size: int) -> tuple[Any, Any]:
    """Copy the second tensor of rank 0."""
    tensors = pair(rank)
    before = lists(tensors)
    dist.broadcast_multigpu(tensors, src=0, src_tensor=1)
    return before, lists(tensors)


@program()
def reduce_multigpu(rank: int, size: int) -> tuple[Any, Any]:
    """Sum in the first tensor of rank 0."""
    tensors = pair(rank)
    before = lists(tensors)
    dist.reduce_multigpu(tensors, dst=0, dst_tensor=0)
    return before, tensors[0].tolist() if rank == 0 else "unspecified"


@program()
def all_gather_multigpu(rank: int, size: int) -> tuple[Any, Any]:
    """Gather all tensors of all ranks, for each tensor of this rank."""
    outputs = [zeros(2 * size, 1) for _ in range(2)]
    dist.all_gather_multigpu(outputs, pair(rank))
    return lists(pair(rank)), f"twice {lists(outputs[0])}"


@program()
def reduce_scatter_multigpu(rank: int, size: int) -> tuple[Any, Any]:
    """Sum blocks over all tensors, one block for each."""
    outputs = zeros(2, 1)
    inputs = [list(numbers(2 * rank + i, 2 * size).split(1)) for i in range(2)]
    dist.reduce_scatter_multigpu(outputs, inputs)
    return f"2 lists of {2 * size} blocks", lists(outputs)


@program("get_rank", "get_world_size")
def get_rank(rank: int, size: int) -> tuple[Any, Any]:
    """Query rank and size."""
    return "", f"get_rank() = {dist.get_rank()}, get_world_size() = {dist.get_world_size()}"


@program("new_group", "get_group_rank", "get_global_rank", "get_process_group_ranks")
def new_group(rank: int, size: int) -> tuple[Any, Any]:
    """Make a group of all ranks, in reverse order."""
    group = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    members = dist.get_process_group_ranks(group)
    return "", f"group of ranks {members}; group rank {dist.get_rank(group)}"


@program()
def new_subgroups_by_enumeration(rank: int, size: int) -> tuple[Any, Any]:
    """Divide the ranks into two groups: even and odd."""
    group, _ = dist.new_subgroups_by_enumeration([list(range(0, size, 2)), list(range(1, size, 2))])
    return "", f"group of ranks {dist.get_process_group_ranks(group)}; group rank {dist.get_rank(group)}"


@program()
def new_subgroups(rank: int, size: int) -> tuple[Any, Any]:
    """Divide the ranks into groups of two."""
    group, _ = dist.new_subgroups(2)
    return "", f"group of ranks {dist.get_process_group_ranks(group)}; group rank {dist.get_rank(group)}"


def with_gradient(rank: int, count: int, call: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
    """Call a differentiable collective; return its output, and the gradient of (rank + 1) times its sum."""
    tensor = numbers(rank, count).to(torch.float32).requires_grad_()
    before = tensor.tolist()
    output = call(tensor)
    several = isinstance(output, (list, tuple))
    parts = list(output) if several else [output]
    torch.stack([part.sum() for part in parts]).sum().mul(rank + 1).backward()
    assert tensor.grad is not None
    got = ", ".join(str(part.tolist()) for part in parts)
    return before, f"{f'[{got}]' if several else got}, gradient {tensor.grad.tolist()}"


def differentiable(name: str, call: Callable[[torch.Tensor, int], Any], blocks: bool = False) -> None:
    """Register the program of one function with gradients, on two elements or on one block for each rank."""
    PROGRAMS[f"nn.functional.{name}"] = lambda rank, size: with_gradient(
        rank, size if blocks else 2, lambda tensor: call(tensor, size)
    )


def outputs_of(size: int) -> list[torch.Tensor]:
    """Return outputs of one element for each rank."""
    return [torch.zeros(1) for _ in range(size)]


differentiable("all_reduce", lambda tensor, size: functional.all_reduce(tensor))
differentiable("broadcast", lambda tensor, size: functional.broadcast(tensor, src=1))
differentiable("reduce", lambda tensor, size: functional.reduce(tensor, dst=0))
differentiable("all_gather", lambda tensor, size: functional.all_gather(tensor[:1]))
differentiable("gather", lambda tensor, size: functional.gather(tensor[:1], dst=0))
differentiable("scatter", lambda tensor, size: functional.scatter(list(tensor.split(1)), src=0), blocks=True)
differentiable(
    "reduce_scatter", lambda tensor, size: functional.reduce_scatter(torch.zeros(1), list(tensor.split(1))), blocks=True
)
differentiable(
    "all_to_all", lambda tensor, size: functional.all_to_all(outputs_of(size), list(tensor.split(1))), blocks=True
)
differentiable(
    "all_to_all_single", lambda tensor, size: functional.all_to_all_single(torch.zeros(size), tensor), blocks=True
)


@cache
def results(name: str, size: int) -> tuple[tuple[Any, Any], ...]:
    """Return input and output of each rank of a program."""
    return tuple(run(PROGRAMS[name], size, size))


def text_of(name: str) -> str:
    """Return the lines that readers see, for each number of ranks."""
    lines = []
    for size in SIZES:
        lines.append(f"{size} ranks")
        for rank, (given, got) in enumerate(results(name, size)):
            lines.append(f"  rank {rank}: {given} -> {got}" if given != "" else f"  rank {rank}: {got}")
    return "\n".join(lines)


class EachRankDirective(Directive):
    """Input and output of each rank."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Run the program."""
        shown = text_of(self.arguments[0])
        return [
            nodes.rubric("", "Each rank: input -> output"),
            nodes.literal_block(shown, shown, language="none", classes=["each-rank"]),
        ]


def add_block(app: Sphinx, kind: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Add the block to the documentation of a function that has a program."""
    short = name.removeprefix("torchdist_ref.")
    if short in PROGRAMS:
        lines += ["", f".. each-rank:: {short}", ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive; the block comes after what napoleon and type hints make."""
    app.add_directive("each-rank", EachRankDirective)
    app.connect("autodoc-process-docstring", add_block, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
