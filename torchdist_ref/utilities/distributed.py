"""Helpers of ``pytorch_lightning.utilities.distributed`` (1.7), for programs and metrics written against them.

Functions named ``..._if_available`` do nothing in a program of one process, so that the same lines run with and without
ranks. Available means that `init_process_group` of this library was called. All communication goes through `groups` and
`nn`; do not add collectives here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.groups import ProcessGroup, ReduceOp
from torchdist_ref.nn import reduce_scatter

__all__ = [
    "AllGatherGrad",
    "ClusterEnvironment",
    "all_gather_ddp_if_available",
    "gather_all_tensors",
    "init_dist_connection",
    "register_ddp_comm_hook",
    "sync_ddp",
    "sync_ddp_if_available",
]

log = logging.getLogger("torchdist_ref.utilities")

Hook = Callable[..., Any]

_OPS = {
    "sum": ReduceOp.SUM,
    # A sum, divided afterward: that supports integers too.
    "avg": ReduceOp.SUM,
    "mean": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
_RIGHT_NAMES = {"state": "ddp_comm_state", "hook": "ddp_comm_hook", "wrapper": "ddp_comm_wrapper"}


class ClusterEnvironment(Protocol):
    """Interface of the object that describes the cluster to `init_dist_connection`, as Lightning's environments do.

    Attributes:
        main_address: Host of rank 0.
        main_port: Port of rank 0's store.
    """

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        ...

    @property
    def main_port(self) -> int:
        """Port of rank 0's store."""
        ...

    def global_rank(self) -> int:
        """Return this process's rank, from 0."""
        ...

    def world_size(self) -> int:
        """Return the number of ranks."""
        ...


def init_dist_connection(
    cluster_environment: ClusterEnvironment,
    torch_distributed_backend: str | None,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Create the default group from a cluster environment; do nothing if it exists.

    The environment variables MASTER_ADDR and MASTER_PORT are set to the object's values, and remain set.

    Args:
        cluster_environment: Address of rank 0, and the defaults of rank and world size.
        torch_distributed_backend: Backend: ``"ref"``, ``"gloo"`` or another, see `init_process_group`.
        global_rank: This process's rank. Default: ``cluster_environment.global_rank()``.
        world_size: Number of ranks. Default: ``cluster_environment.world_size()``.
        **kwargs: Further arguments of `init_process_group`, such as ``timeout``.

    Raises:
        ArgumentTypeError: The object lacks one of the four members.
        RendezvousError: A value is wrong.
        DistNetworkError: Rank 0 cannot be reached.

    Example:
        >>> import os, torchdist_ref as dist
        >>> from torchdist_ref.utilities.distributed import init_dist_connection
        >>> class Alone:
        ...     main_address, main_port = "127.0.0.1", 29500
        ...     def global_rank(self): return 0
        ...     def world_size(self): return 1
        >>> init_dist_connection(Alone(), "ref", store=dist.HashStore())
        >>> dist.get_world_size(), os.environ.pop("MASTER_ADDR"), os.environ.pop("MASTER_PORT")
        (1, '127.0.0.1', '29500')
        >>> dist.destroy_process_group()
    """
    if groups.is_initialized():
        log.debug("init_dist_connection: the default group exists; nothing to do")
        return
    _check_environment(cluster_environment)
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    size = cluster_environment.world_size() if world_size is None else world_size
    os.environ["MASTER_ADDR"] = str(cluster_environment.main_address)
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    groups.init_process_group(torch_distributed_backend, rank=rank, world_size=size, **kwargs)
    if rank == 0:
        log.info("%d ranks connected; backend %r", size, groups.get_backend())


def _check_environment(environment: Any) -> None:
    names = ("main_address", "main_port", "global_rank", "world_size")
    missing = [name for name in names if not hasattr(environment, name)]
    if missing:
        expected = f"an object with {', '.join(names)}; {', '.join(missing)} missing"
        raise ArgumentTypeError(explain("init_dist_connection", "cluster_environment", expected, environment))


def register_ddp_comm_hook(
    model: Any,
    ddp_comm_state: Any = None,
    ddp_comm_hook: Hook | None = None,
    ddp_comm_wrapper: Callable[[Hook], Hook] | None = None,
    **unknown: Any,
) -> None:
    """Register a communication hook on a model, inside a wrapper if one is given.

    Args:
        model: A DistributedDataParallel of this library or of torch.
        ddp_comm_state: State that the hook receives as its first argument. Default: None.
        ddp_comm_hook: The hook. Default: none, and nothing is registered.
        ddp_comm_wrapper: Function from hook to hook, such as ``fp16_compress_wrapper``. Default: none.
        **unknown: Refused with the right name, since an example in Lightning's documentation writes ``state=``.

    Raises:
        ArgumentTypeError: An unknown argument, or a model without `register_comm_hook`.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import register_ddp_comm_hook
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     wrapper = default_hooks.fp16_compress_wrapper
        ...     hook = default_hooks.allreduce_hook
        ...     register_ddp_comm_hook(model, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)
        ...     model(torch.tensor([[4.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run(program, 2)
        [2.0, 2.0]
    """
    _refuse(unknown)
    if ddp_comm_hook is None:
        if ddp_comm_state is not None or ddp_comm_wrapper is not None:
            log.warning("register_ddp_comm_hook: a state or wrapper but no ddp_comm_hook; nothing was registered")
        return
    if not hasattr(model, "register_comm_hook"):
        expected = "a DistributedDataParallel, of torchdist_ref or of torch"
        raise ArgumentTypeError(explain("register_ddp_comm_hook", "model", expected, type(model).__name__))
    hook = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
    model.register_comm_hook(state=ddp_comm_state, hook=hook)


def _refuse(unknown: dict[str, Any]) -> None:
    for name in unknown:
        right = _RIGHT_NAMES.get(name, "one of model, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper")
        raise ArgumentTypeError(
            f"register_ddp_comm_hook: there is no argument {name!r}; it is {right}. Write "
            "register_ddp_comm_hook(model, ddp_comm_state=..., ddp_comm_hook=...)."
        )


def sync_ddp(result: Tensor, group: ProcessGroup | int | None = None, reduce_op: Any = None) -> Tensor:
    """Reduce a tensor over the ranks, in place, and return the result.

    Args:
        result: Input and output: this rank's tensor, of one shape and dtype on all ranks.
        group: Process group. Default: all ranks.
        reduce_op: A `ReduceOp`, or its name in any case. ``"mean"`` and ``"avg"`` return a new tensor: the sum, which
            `result` then holds, divided by the number of ranks. Default: the sum.

    Returns:
        The reduced tensor, the same on every rank.

    Raises:
        ArgumentError: An unknown reduction, a dtype that does not support it, or this rank is not in the group.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import sync_ddp
        >>> run(lambda rank: sync_ddp(torch.tensor([rank, 7]), reduce_op="mean").tolist(), 2)
        [[0.5, 7.0], [0.5, 7.0]]
    """
    size = _member_count("sync_ddp", group)
    # No barrier before it, unlike Lightning: the reduction itself waits for all ranks.
    groups.all_reduce(result, _reduction(reduce_op), group)
    return result / size if _is_mean(reduce_op) else result


def _is_mean(reduce_op: Any) -> bool:
    return isinstance(reduce_op, str) and reduce_op.lower() in ("avg", "mean")


def _reduction(reduce_op: Any) -> Any:
    if reduce_op is None:
        return ReduceOp.SUM
    if not isinstance(reduce_op, str):
        return reduce_op
    if reduce_op.lower() not in _OPS:
        raise ArgumentError(explain("sync_ddp", "reduce_op", f"one of {', '.join(_OPS)}", reduce_op))
    return _OPS[reduce_op.lower()]


def sync_ddp_if_available(result: Tensor, group: ProcessGroup | int | None = None, reduce_op: Any = None) -> Tensor:
    """Reduce a tensor over the ranks as `sync_ddp` does, or return it unchanged in a program of one process.

    Args:
        result: Input and output: this rank's tensor, of one shape and dtype on all ranks.
        group: Process group. Default: all ranks.
        reduce_op: A `ReduceOp`, or its name in any case, ``"mean"`` and ``"avg"`` included. Default: the sum.

    Returns:
        The reduced tensor, the same on every rank; `result` if there is no process group.

    Raises:
        ArgumentError: An unknown reduction, a dtype that does not support it, or this rank is not in the group.
        MismatchError: The ranks' calls differ.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import sync_ddp_if_available
        >>> sync_ddp_if_available(torch.tensor([3.0]), reduce_op="mean").item()
        3.0
        >>> run(lambda rank: sync_ddp_if_available(torch.tensor([3.0 + rank]), reduce_op="max").item(), 2)
        [4.0, 4.0]
    """
    return sync_ddp(result, group, reduce_op) if groups.is_initialized() else result


def _member_count(operation: str, group: ProcessGroup | int | None) -> int:
    """Return the number of ranks in the group; raise on a rank outside it."""
    size = groups.get_world_size(group)
    if size < 0:
        hint = "Call it on the group's members only."
        expected = "a group that this rank is in"
        raise ArgumentError(explain(operation, "group", expected, group, rank=groups.get_rank(), hint=hint))
    return size


class AllGatherGrad(torch.autograd.Function):
    """Differentiable all_gather: its backward is a reduce_scatter of the gradients.

    Call it as ``AllGatherGrad.apply(tensor, group)``. Forward stacks the tensors of all ranks: the result has shape
    ``(ranks, ...)``. Backward sums all ranks' gradients of a row on the row's rank, as if the losses of all ranks were
    one sum in one program. So every rank has to run backward. It can be differentiated again.

    Rows are in the order of the group's ranks. In a subgroup, Lightning 1.7 uses sizes and rows of the whole world.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import AllGatherGrad
        >>> def program(rank):
        ...     tensor = torch.tensor([2.0 + rank], requires_grad=True)
        ...     rows = AllGatherGrad.apply(tensor)
        ...     (rows.prod() * (rank + 1)).backward()
        ...     return rows.tolist(), tensor.grad.item()
        >>> run(program, 2)
        [([[2.0], [3.0]], 9.0), ([[2.0], [3.0]], 6.0)]
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | int | None = None) -> Tensor:
        """Gather the tensors of all ranks.

        Args:
            ctx: Autograd's context.
            tensor: This rank's tensor, of one shape and dtype on all ranks.
            group: Process group. Default: all ranks.

        Returns:
            The tensors of all ranks, stacked in rank order.

        Raises:
            ArgumentError: This rank is not in the group.
            MismatchError: Shapes or dtypes differ.
        """
        # Resolved here, since backward may run on one of autograd's threads.
        ctx.group = groups.GroupMember.WORLD if group is None else group
        rows = tensor.new_empty((_member_count("AllGatherGrad", group), *tensor.shape))
        groups.all_gather_into_tensor(rows, tensor.contiguous(), ctx.group)
        return rows

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None]:
        """Sum all ranks' gradients for each row, and return this rank's row.

        Args:
            ctx: Autograd's context.
            *grad_output: One tensor: the gradient of this rank's loss with respect to the stacked result.

        Returns:
            The gradient of the tensor, and None for the group.
        """
        rows = [row.contiguous() for row in grad_output[0]]
        return reduce_scatter(torch.empty_like(rows[0]), rows, group=ctx.group), None


def all_gather_ddp_if_available(
    tensor: Tensor, group: ProcessGroup | int | None = None, sync_grads: bool = False
) -> Tensor:
    """Return the stacked tensors of all ranks, or the tensor itself in a program of one process.

    Args:
        tensor: This rank's tensor, of one shape and dtype on all ranks.
        group: Process group. Default: all ranks.
        sync_grads: Send gradients back to the tensors' ranks, see `AllGatherGrad`. Default: False.

    Returns:
        A tensor of shape ``(ranks, ...)`` on every rank, or `tensor` if there is no process group.

    Raises:
        ArgumentError: This rank is not in the group.
        MismatchError: Shapes or dtypes differ.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import all_gather_ddp_if_available
        >>> run(lambda rank: all_gather_ddp_if_available(torch.tensor([rank, 7])).tolist(), 2)
        [[[0, 7], [1, 7]], [[0, 7], [1, 7]]]
        >>> all_gather_ddp_if_available(torch.tensor([0, 7])).tolist()
        [0, 7]
    """
    if not groups.is_initialized():
        return tensor
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        gathered: Tensor = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
    return gathered


def gather_all_tensors(result: Tensor, group: ProcessGroup | int | None = None) -> list[Tensor]:
    """Gather tensors of any shapes on every rank, without gradients.

    The ranks exchange their shapes, and then the tensors, padded to the size of the largest. So one large tensor among
    small ones costs as much as if all were large.

    Args:
        result: This rank's tensor, of one dtype on all ranks. Shapes may differ, also in the number of dimensions.
        group: Process group. Default: all ranks.

    Returns:
        One tensor for each rank, in rank order, in its own shape.

    Raises:
        ArgumentError: This rank is not in the group.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: Dtypes differ.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import gather_all_tensors
        >>> def program(rank):
        ...     return [tensor.tolist() for tensor in gather_all_tensors(torch.arange(2 * rank + 1))]
        >>> run(program, 2)
        [[[0], [0, 1, 2]], [[0], [0, 1, 2]]]
    """
    shapes: list[Any] = [None] * _member_count("gather_all_tensors", group)
    groups.all_gather_object(shapes, result.shape, group)
    largest = max(shape.numel() for shape in shapes)
    mine = result.new_zeros(largest)
    mine[: result.numel()] = result.detach().flatten()
    everyone = [torch.empty_like(mine) for _ in shapes]
    groups.all_gather(everyone, mine, group)
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(everyone, shapes, strict=True)]
