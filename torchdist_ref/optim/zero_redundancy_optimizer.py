"""ZeroRedundancyOptimizer: every rank has all parameters, but keeps the optimizer's state for a part of them only.

A step has two halves: each rank updates its shard with an ordinary optimizer, then each shard is broadcast by its
owner. Who owns what is in `shards`, how states are put together in `sharded_state`. Updating while gradients
still arrive is for a communication hook to arrange, out of `assign`, `step_with` and `share`.

The idea is stage 1 of S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models*, SC 2020.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdist_ref import groups
from torchdist_ref.algorithms.join import Join
from torchdist_ref.errors import ArgumentError, DistError, explain
from torchdist_ref.optim import sharded_state
from torchdist_ref.optim.joining import JoinsSteps
from torchdist_ref.optim.partial_step import only
from torchdist_ref.optim.shards import Shards, copy_options, flatten, local_groups
from torchdist_ref.work import Work

__all__ = ["ZeroRedundancyOptimizer"]

logger = logging.getLogger("torchdist_ref.optim")


class ZeroRedundancyOptimizer(Optimizer, JoinsSteps):
    """An optimizer that keeps the state of a parameter on one rank only.

    Each parameter belongs to one rank: the largest are given out first, each to the rank with least so far. All ranks
    must construct it alike and step together. After a step all have the same parameters, those of the same optimizer
    without ranks.

    Args:
        params: The parameters, or groups of them (dicts), as for any optimizer.
        optimizer_class: The optimizer that updates a shard, for example ``torch.optim.Adam``.
        process_group: The ranks. Default: all.
        parameters_as_bucket_view: Lay out the parameters of each rank one after the other, so that a step needs one
            broadcast for each rank instead of one for each parameter. Each parameter's ``data`` becomes a view.
        overlap_with_ddp: Don't update in `step`; a hook of DDP updates instead, bucket by bucket, as gradients
            arrive. Which parameters belong to whom is then for the hook to say, and any optimizer class will do.
        **defaults: The options of the optimizer, such as ``lr``.

    Attributes:
        optim: The optimizer of this rank's shard. With ``overlap_with_ddp`` it is there after `assign`.
        process_group: The ranks.
        rank: This rank in the group.
        world_size: How many ranks there are.
        overlap_with_ddp: As given.

    Raises:
        ArgumentError: A sparse parameter, or this rank is not in the group.

    Example:
        Two ranks, two parameters; each rank remembers one momentum:

        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.optim import ZeroRedundancyOptimizer
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     weights = [torch.nn.Parameter(torch.ones(n)) for n in (3, 2)]
        ...     optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.5, momentum=0.9)
        ...     sum(weight.sum() for weight in weights).backward()
        ...     optimizer.step()
        ...     return [weight[0].item() for weight in weights], len(optimizer.optim.state)
        >>> run(program, 2)
        [([0.5, 0.5], 1), ([0.5, 0.5], 1)]
    """

    optim: Optimizer

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self.process_group = groups.GroupMember.WORLD if process_group is None else process_group
        self.world_size = groups.get_world_size(self.process_group)
        self.rank = groups.get_rank(self.process_group)
        if self.rank < 0:
            expected = "a group that this rank is in"
            raise ArgumentError(explain("ZeroRedundancyOptimizer", "process_group", expected, process_group))
        self.overlap_with_ddp = overlap_with_ddp
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._class, self._options = optimizer_class, defaults
        self._shards = Shards(self.world_size)
        self._flat: list[list[Tensor]] = []
        self._whole: dict[int, Any] | None = None
        self._turn = threading.Lock()
        Optimizer.__init__(self, params, defaults)
        JoinsSteps.__init__(self)
        _refuse_sparse(self._all())
        if not overlap_with_ddp:
            for group in self.param_groups:
                self._shards.give_out(group["params"])
            self._make_local()

    def _all(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def _make_local(self) -> None:
        mine = self._shards.of(self.rank)
        self.optim = self._class(local_groups(self.param_groups, mine), **self._options)
        # What the class adds to the options, everybody should see.
        copy_options(self.optim.param_groups, self.param_groups)
        self._lay_out()

    def _lay_out(self) -> None:
        if self.parameters_as_bucket_view:
            self._flat = flatten(self._shards, self.world_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. All ranks must do it alike.

        Args:
            param_group: ``params``, and options that differ from those of the constructor.

        Raises:
            DistError: With ``overlap_with_ddp``, once constructed.
        """
        made = hasattr(self, "_join_config")
        if made and self.overlap_with_ddp:
            raise DistError("ZeroRedundancyOptimizer: with overlap_with_ddp, parameters can't be added later.")
        super().add_param_group(param_group)
        if made:
            added = self.param_groups[-1]
            _refuse_sparse(added["params"])
            self._shards.give_out(added["params"])
            self.optim.add_param_group(local_groups([added], [self._shards.of(self.rank)[-1]])[0])
            copy_options(self.optim.param_groups, self.param_groups)
            self._lay_out()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's shard, and exchange shards. All ranks call it together.

        Args:
            closure: Computes the loss again, for optimizers that want that.
            **kwargs: Handed to the optimizer's own ``step``.

        Returns:
            What the optimizer's ``step`` returns. With ``overlap_with_ddp`` None, and nothing is done.
        """
        if self.overlap_with_ddp:
            logger.warning("ZeroRedundancyOptimizer.step does nothing with overlap_with_ddp: the hook updates.")
            return None
        Join.notify_join_context(self)
        return self._step_and_share(closure, **kwargs)

    def _step_and_share(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        copy_options(self.param_groups, self.optim.param_groups)
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        copy_options(self.optim.param_groups, self.param_groups)
        for work in self._share_all():
            work.wait()
        return loss

    def _share_all(self) -> list[Work]:
        if not self.parameters_as_bucket_view:
            return self.share(p for rank in range(self.world_size) for group in self._shards.of(rank) for p in group)
        return [self._send(flat, rank) for rank, flats in enumerate(self._flat) for flat in flats]

    def _send(self, tensor: Tensor, owner: int) -> Work:
        work = groups.broadcast(tensor, group=self.process_group, group_src=owner, async_op=True)
        assert work is not None
        return work

    # What a hook of DDP builds an overlapping step from.

    def assign(self, params_per_rank: Sequence[Sequence[Tensor]]) -> None:
        """Say which rank updates which parameters, once, with ``overlap_with_ddp``; the same on all ranks.

        Args:
            params_per_rank: For each rank its parameters. Those that are in no list are never updated.

        Raises:
            ArgumentError: Not one list a rank, a parameter that is not this optimizer's, or assigned already.
        """
        known = set(self._all())
        if len(params_per_rank) != self.world_size or not known.issuperset(chain.from_iterable(params_per_rank)):
            expected = f"{self.world_size} lists of parameters of this optimizer"
            raise ArgumentError(explain("ZeroRedundancyOptimizer.assign", "params_per_rank", expected, params_per_rank))
        if self._shards.groups:
            raise ArgumentError("ZeroRedundancyOptimizer.assign: the parameters have their ranks already.")
        self._shards.give_out_as([group["params"] for group in self.param_groups], params_per_rank)
        self._make_local()

    @property
    def assigned(self) -> bool:
        """Whether it is settled which rank updates which parameters."""
        return bool(self._shards.groups)

    def owner(self, parameter: Tensor) -> int:
        """The rank in the group that updates a parameter."""
        return self._shards.owner(parameter)

    def step_with(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update some parameters of this rank with given gradients; the others, and all ``grad``, stay as they are.

        Args:
            gradients: The gradient for each parameter to update; each must be one of this rank's.
        """
        with self._turn, only(self.optim, gradients):
            copy_options(self.param_groups, self.optim.param_groups)
            self.optim.step()

    def share(self, parameters: Iterable[Tensor]) -> list[Work]:
        """Begin to send parameters from their owners to all. All ranks pass the same ones in the same order.

        Returns:
            What to wait for.
        """
        return [self._send(p.detach(), self.owner(p)) for p in parameters]

    # Saving and loading.

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the states of all shards on one rank, for `state_dict` there. All ranks call it.

        Args:
            to: The rank in the group that gets them. Default: 0.

        Raises:
            DistError: With ``overlap_with_ddp``, before it is settled which rank updates what.
        """
        self._must_be_assigned()
        copy_options(self.param_groups, self.optim.param_groups)
        found: list[Any] | None = [None] * self.world_size if self.rank == to else None
        groups.gather_object(
            sharded_state.on_cpu(self.optim.state_dict()), found, group=self.process_group, group_dst=to
        )
        self._whole = None
        if found is not None:
            ranks = [(self._shards.of(rank), state) for rank, state in enumerate(found)]
            self._whole = sharded_state.merge(self._numbers(), ranks)

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole optimizer, as it was when last collected on this rank.

        Returns:
            What the optimizer without ranks would return; tensors are on the CPU.

        Raises:
            DistError: `consolidate_state_dict` was not called, or for another rank.
        """
        self._must_be_assigned()
        if self._whole is None:
            raise DistError(
                f"ZeroRedundancyOptimizer.state_dict: rank {self.rank} does not have the state of the others. "
                f"Call consolidate_state_dict(to={self.rank}) on all ranks first."
            )
        return {"state": self._whole, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state. Every rank loads the same.

        Args:
            state_dict: From `state_dict`, or from the same optimizer without ranks. It stays as it is.

        Raises:
            DistError: With ``overlap_with_ddp``, before it is settled which rank updates what.
        """
        self._must_be_assigned()
        self.optim.load_state_dict(sharded_state.part(self._numbers(), self._shards.of(self.rank), state_dict))
        copy_options(self.optim.param_groups, self.param_groups)

    def _numbers(self) -> dict[Tensor, int]:
        return sharded_state.numbers([group["params"] for group in self.param_groups])

    def _must_be_assigned(self) -> None:
        if not self.assigned:
            raise DistError("ZeroRedundancyOptimizer: before the hook has seen DDP's buckets there is no state.")


def _refuse_sparse(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.layout != torch.strided:
            expected = "dense parameters"
            raise ArgumentError(explain("ZeroRedundancyOptimizer", "params", expected, parameter.layout))
