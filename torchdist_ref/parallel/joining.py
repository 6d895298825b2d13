"""What DDP answers for a rank that has run out of inputs: the same collectives, with zeros.

The order must be that of a real iteration: `DistributedDataParallel.forward` and the reducer are
what this file shadows, so a collective added there needs its counterpart here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from torchdist_ref import groups
from torchdist_ref.algorithms.join import Join, Joinable, JoinHook

if TYPE_CHECKING:
    from torchdist_ref.parallel.distributed_data_parallel import DistributedDataParallel


class Shadow(JoinHook):
    """The join hook of DDP.

    Args:
        ddp: Whose collectives are shadowed.
        divide_by_initial_world_size: Whether sums are still divided by the number of all ranks, so that every input
            counts alike; else by the number of ranks at work.
    """

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """One iteration: rebuild, buffers, whether the others will communicate, buckets."""
        ddp = self.ddp
        ddp.reducer.rebuild()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers(working=False)
        communicate = self._others_communicate()
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers(working=False)
        ddp.require_forward_param_sync = communicate
        if ddp.require_forward_param_sync:
            ddp.reducer.shadow()

    def _others_communicate(self) -> bool:
        votes = torch.zeros(1, device=self.ddp.device)
        groups.all_reduce(votes, group=self.ddp.process_group)
        return bool(votes.item())

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of a rank that worked to the end."""
        ddp = self.ddp
        ddp.reducer.average.divisor = groups.get_world_size(ddp.process_group)
        ddp.states.share(ddp.broadcast_buffers, common_rank(ddp, is_last_joiner))


class UnevenInputs(Joinable):
    """The part of DDP that lets ranks have different numbers of inputs."""

    device: torch.device
    process_group: Any

    def __init__(self) -> None:
        super().__init__()
        self._divide_by_initial_world_size = True

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Context for a training loop in which ranks have different numbers of inputs; see `Join`.

        Args:
            divide_by_initial_world_size: Divide by the number of all ranks to the end, so that every input weighs the
                same; False divides by the number of ranks that still have inputs. Default True.
            enable: False makes the context do nothing. Default True.
            throw_on_early_termination: Raise on all ranks when one runs out. Default False.

        Returns:
            The context manager.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            ...     with model.join():
            ...         for _ in range(1 + rank):
            ...             model.zero_grad()
            ...             model(torch.tensor([[4.0]])).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> run(program, 2)[1]
            2.0
        """
        divide = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What shadows this module on a rank without inputs; takes ``divide_by_initial_world_size``."""
        return Shadow(cast("DistributedDataParallel", self), kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group over which gradients are averaged."""
        return self.process_group


def common_rank(ddp: DistributedDataParallel, candidate: bool) -> int:
    """The highest rank among those that offer themselves; the same answer on every rank."""
    rank = torch.tensor([groups.get_rank(ddp.process_group) if candidate else -1], device=ddp.device)
    groups.all_reduce(rank, op=groups.ReduceOp.MAX, group=ddp.process_group)
    return int(rank)


def count_ranks(ddp: DistributedDataParallel) -> None:
    """Inside `join`: learn how many ranks still have inputs."""
    work = Join.notify_join_context(ddp)
    if work is not None and not ddp._divide_by_initial_world_size:
        ddp.reducer.average.divisor = float(work.result()[0])


def announce(ddp: DistributedDataParallel) -> None:
    """Tell shadowing ranks whether this iteration's backward will communicate."""
    vote = torch.full((1,), float(ddp.require_backward_grad_sync), device=ddp.device)
    groups.all_reduce(vote, group=ddp.process_group)
