"""The helpers of ``pytorch_lightning.utilities.distributed`` (1.7), for programs and metrics written against them.

Those named ``..._if_available`` do nothing in a program of one process, so that the same lines run with ranks and
without. Available means: `init_process_group` of this library was called. Nothing here talks to ranks other than
through `groups`; new collectives belong there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.groups import ProcessGroup, ReduceOp
from torchdist_ref.utilities.gathering import (
    AllGatherGrad,
    all_gather_ddp_if_available,
    gather_all_tensors,
    member_count,
)

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
    # Added up here and divided afterwards, which integers can take too.
    "avg": ReduceOp.SUM,
    "mean": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
_MEANT = {"state": "ddp_comm_state", "hook": "ddp_comm_hook", "wrapper": "ddp_comm_wrapper"}


class ClusterEnvironment(Protocol):
    """What `init_dist_connection` asks of the object that knows the cluster; Lightning's environments have it all.

    Attributes:
        main_address: The host of rank 0.
        main_port: The port on which rank 0 is met.
    """

    @property
    def main_address(self) -> str: ...

    @property
    def main_port(self) -> int: ...

    def global_rank(self) -> int:
        """Return this process's rank, from 0."""
        ...

    def world_size(self) -> int:
        """Return how many ranks there are."""
        ...


def init_dist_connection(
    cluster_environment: ClusterEnvironment,
    torch_distributed_backend: str | None,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Meet all ranks where an object says that knows the cluster; nothing if they have met already.

    The environment variables MASTER_ADDR and MASTER_PORT are set to what it says, and stay so.

    Args:
        cluster_environment: Says where rank 0 is, and rank and world size where they are not given.
        torch_distributed_backend: The backend: ``"ref"``, ``"gloo"`` or another, see `init_process_group`.
        global_rank: This process's rank. Default: ``cluster_environment.global_rank()``.
        world_size: How many ranks there are. Default: ``cluster_environment.world_size()``.
        **kwargs: Handed to `init_process_group`, say ``timeout``.

    Raises:
        ArgumentTypeError: The object lacks one of the four answers.
        RendezvousError: An answer is wrong.
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
        log.debug("init_dist_connection: initialised already; nothing done")
        return
    _check_environment(cluster_environment)
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    size = cluster_environment.world_size() if world_size is None else world_size
    os.environ["MASTER_ADDR"] = str(cluster_environment.main_address)
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    groups.init_process_group(torch_distributed_backend, rank=rank, world_size=size, **kwargs)
    if rank == 0:
        log.info("%d ranks have met; backend %r", size, groups.get_backend())


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
    """Register a communication hook on a model, with a wrapper around it if one is given.

    Args:
        model: A DistributedDataParallel of ours or of torch's.
        ddp_comm_state: What the hook gets as its state. Default: None.
        ddp_comm_hook: The hook. None: nothing is registered.
        ddp_comm_wrapper: Makes a hook of the hook, say ``fp16_compress_wrapper``.
        **unknown: Refused, with the right name: an example in Lightning's documentation writes ``state=``.

    Raises:
        ArgumentTypeError: There is no such argument, or the model takes no hooks.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import register_ddp_comm_hook
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     wrapper = default_hooks.fp16_compress_wrapper
        ...     register_ddp_comm_hook(model, ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=wrapper)
        ...     model(torch.tensor([[4.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run(program, 2)
        [2.0, 2.0]
    """
    _refuse(unknown)
    if ddp_comm_hook is None:
        if ddp_comm_state is not None or ddp_comm_wrapper is not None:
            log.warning("register_ddp_comm_hook: a state or wrapper but no ddp_comm_hook; nothing is registered")
        return
    if not hasattr(model, "register_comm_hook"):
        expected = "a DistributedDataParallel, of torchdist_ref or of torch"
        raise ArgumentTypeError(explain("register_ddp_comm_hook", "model", expected, type(model).__name__))
    hook = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
    model.register_comm_hook(state=ddp_comm_state, hook=hook)


def _refuse(unknown: dict[str, Any]) -> None:
    for name in unknown:
        right = _MEANT.get(name, "one of model, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper")
        raise ArgumentTypeError(
            f"register_ddp_comm_hook: there is no argument {name!r}; it is {right}. Write "
            "register_ddp_comm_hook(model, ddp_comm_state=..., ddp_comm_hook=...)."
        )


def sync_ddp(result: Tensor, group: ProcessGroup | int | None = None, reduce_op: Any = None) -> Tensor:
    """Reduce a tensor over the ranks, in place, and return the result.

    Args:
        result: Input and output: this rank's tensor; one shape and dtype on all ranks.
        group: Which ranks. Default: all.
        reduce_op: A `ReduceOp`, or its name in any case. ``"mean"`` or ``"avg"`` returns a new tensor, the sum (which
            `result` then holds) divided by the number of ranks. Default: the sum.

    Returns:
        The reduced tensor, the same on every rank.

    Raises:
        ArgumentError: There is no such reduction, it makes no sense for the dtype, or this rank is not in the group.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import sync_ddp
        >>> run(lambda rank: sync_ddp(torch.tensor([rank, 7]), reduce_op="mean").tolist(), 2)
        [[0.5, 7.0], [0.5, 7.0]]
    """
    size = member_count("sync_ddp", group)
    # The reduction itself waits for all ranks, so the barrier that Lightning puts before it is left out.
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
    """Reduce a tensor over the ranks, as `sync_ddp` does; in a program of one process, return it as it is.

    Args:
        result: Input and output: this rank's tensor; one shape and dtype on all ranks.
        group: Which ranks. Default: all.
        reduce_op: A `ReduceOp`, or its name in any case, ``"mean"`` and ``"avg"`` included. Default: the sum.

    Returns:
        The reduced tensor, the same on every rank; `result` if there is no process group.

    Raises:
        ArgumentError: There is no such reduction, it makes no sense for the dtype, or this rank is not in the group.
        MismatchError: Ranks called different things.

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
