"""ZeroRedundancyOptimizer: every rank has all parameters, and the optimizer's state for a part of them.

A step has two halves: each rank updates its shard with an ordinary optimizer, then each shard is broadcast by its
owner. `shards` divides parameters and states. A communication hook can update while gradients are still computed, with
`assign`, `step_with` and `share`. Do not add such hooks here.

The idea is stage 1 of S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models*, SC 2020.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdist_ref import groups
from torchdist_ref.algorithms.join import FunctionJoinHook, Join, Joinable, JoinHook
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    DistError,
    explain,
    indexed,
)
from torchdist_ref.optim.shards import (
    Shards,
    copy_options,
    flatten,
    local_groups,
    merge_states,
    on_cpu,
    own_state,
    parameter_numbers,
)
from torchdist_ref.parallel import synchronization
from torchdist_ref.work import Work

__all__ = ["ZeroRedundancyOptimizer"]

logger = logging.getLogger("torchdist_ref.optim")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer that keeps the state of a parameter on one rank only.

    Each parameter belongs to one rank. The largest parameters are assigned first, each to the rank that has the fewest
    elements so far. All ranks must construct the optimizer with the same arguments and step together. After a step all
    ranks have the same parameters, which equal those of ``optimizer_class`` in one process.

    Args:
        params: The parameters, or groups of them (dicts), as for any optimizer.
        optimizer_class: The optimizer that updates a shard, for example ``torch.optim.Adam``.
        process_group: The ranks. Default: all.
        parameters_as_bucket_view: Move the parameters of each rank into contiguous memory, so that a step needs one
            broadcast for each rank instead of one for each parameter. Each parameter's ``data`` becomes a view.
        overlap_with_ddp: Do not update in `step`; a hook of DDP updates instead, bucket by bucket, when gradients are
            ready. The hook then assigns parameters to ranks, and any optimizer class is supported.
        **defaults: The options of the optimizer, such as ``lr``.

    Attributes:
        optim: The optimizer of this rank's shard. With ``overlap_with_ddp`` it exists after `assign`.
        process_group: The ranks.
        rank: This rank in the group.
        world_size: Number of ranks.
        overlap_with_ddp: The argument.

    Raises:
        ArgumentError: A sparse parameter, or this rank is not in the group.

    Example:
        Two ranks, two parameters; each rank stores one momentum:

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
        found = groups.world.resolve_member(process_group, "ZeroRedundancyOptimizer", "process_group")
        self.process_group = found if process_group is None else process_group
        self.world_size, self.rank = found.size(), found.rank()
        _check_class(optimizer_class)
        params = _checked(params)
        self.overlap_with_ddp = overlap_with_ddp
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._class, self._options = optimizer_class, defaults
        self._shards = Shards(self.world_size)
        self._flat: list[list[Tensor]] = []
        self._whole: dict[int, Any] | None = None
        self._lock = threading.Lock()
        Optimizer.__init__(self, params, defaults)
        Joinable.__init__(self)
        parameters = self._all()
        _refuse_sparse(parameters)
        _verify_alike(parameters, self.process_group)
        if not overlap_with_ddp:
            for group in self.param_groups:
                self._shards.assign(group["params"])
            self._make_local()

    def _all(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def _make_local(self) -> None:
        mine = self._shards.of(self.rank)
        self.optim = self._class(local_groups(self.param_groups, mine), **self._options)
        # Options that the class adds belong to the whole optimizer too.
        copy_options(self.optim.param_groups, self.param_groups)
        self._flatten()

    def _flatten(self) -> None:
        if self.parameters_as_bucket_view:
            self._flat = flatten(self._shards, self.world_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. All ranks must add the same ones.

        Args:
            param_group: ``params``, and options that differ from those of the constructor.

        Raises:
            DistError: With ``overlap_with_ddp``, once constructed.
            MismatchError: Parameters differ between ranks.
        """
        made = hasattr(self, "_join_config")
        if made and self.overlap_with_ddp:
            raise DistError("ZeroRedundancyOptimizer: with overlap_with_ddp, parameters cannot be added later.")
        _check_group(param_group)
        super().add_param_group(param_group)
        if made:
            added = self.param_groups[-1]
            _refuse_sparse(added["params"])
            _verify_alike(added["params"], self.process_group)
            self._shards.assign(added["params"])
            self.optim.add_param_group(local_groups([added], [self._shards.of(self.rank)[-1]])[0])
            copy_options(self.optim.param_groups, self.param_groups)
            self._flatten()

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Update this rank's shard, and exchange shards. All ranks call it together.

        Args:
            closure: Computes the loss again, for optimizers that need it. It is passed to the optimizer's ``step``.
            **kwargs: Passed to the optimizer's own ``step``.

        Returns:
            The result of the optimizer's ``step``. With ``overlap_with_ddp`` this does nothing and returns None.

        Raises:
            ArgumentTypeError: `closure` is not a function, and the optimizer calls it.
        """
        if self.overlap_with_ddp:
            logger.warning("ZeroRedundancyOptimizer.step does nothing with overlap_with_ddp: the hook updates.")
            return None
        Join.notify_join_context(self)
        try:
            return self._step_and_broadcast(closure, **kwargs)
        except TypeError as error:
            if closure is None or callable(closure):
                raise
            text = explain("ZeroRedundancyOptimizer.step", "closure", "a function or None", closure)
            raise ArgumentTypeError(text) from error

    def _step_and_broadcast(self, closure: Any, **kwargs: Any) -> Any:
        copy_options(self.param_groups, self.optim.param_groups)
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        copy_options(self.optim.param_groups, self.param_groups)
        for work in self._broadcast_all():
            work.wait()
        return loss

    def _broadcast_all(self) -> list[Work]:
        if not self.parameters_as_bucket_view:
            return self.share(p for rank in range(self.world_size) for group in self._shards.of(rank) for p in group)
        return [self._broadcast(flat, rank) for rank, flats in enumerate(self._flat) for flat in flats]

    def _broadcast(self, tensor: Tensor, owner: int) -> Work:
        work = groups.broadcast(tensor, group=self.process_group, group_src=owner, async_op=True)
        assert work is not None
        return work

    # ---- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook of a rank without inputs: it continues to update its shard, since no other rank can."""
        return FunctionJoinHook(lambda: self._step_and_broadcast(None))

    @property
    def join_device(self) -> torch.device:
        """Device of the first parameter."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The ranks."""
        return self.process_group

    # ---- parts of an overlapping step, for hooks of DDP

    def assign(self, params_per_rank: Sequence[Sequence[Tensor]]) -> None:
        """Assign parameters to ranks, once, with ``overlap_with_ddp``; the same on all ranks.

        Args:
            params_per_rank: For each rank its parameters. Parameters in no list are never updated.

        Raises:
            ArgumentError: Not one list a rank, a parameter that is not this optimizer's, or assigned already.
        """
        known = set(self._all())
        if len(params_per_rank) != self.world_size or not known.issuperset(chain.from_iterable(params_per_rank)):
            expected = f"{self.world_size} lists of parameters of this optimizer"
            raise ArgumentError(explain("ZeroRedundancyOptimizer.assign", "params_per_rank", expected, params_per_rank))
        if self._shards.groups:
            raise ArgumentError("ZeroRedundancyOptimizer.assign: the parameters are assigned already.")
        self._shards.assign_to([group["params"] for group in self.param_groups], params_per_rank)
        self._make_local()

    @property
    def assigned(self) -> bool:
        """Whether parameters have been assigned to ranks."""
        return bool(self._shards.groups)

    def owner(self, parameter: Tensor) -> int:
        """Return the rank in the group that updates a parameter."""
        return self._shards.owner(parameter)

    def step_with(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update some parameters of this rank with given gradients; the others, and all ``grad``, stay as they are.

        Args:
            gradients: The gradient for each parameter to update; each must be one of this rank's.
        """
        with self._lock, only(self.optim, gradients):
            copy_options(self.param_groups, self.optim.param_groups)
            self.optim.step()

    def share(self, parameters: Iterable[Tensor]) -> list[Work]:
        """Start to send parameters from their owners to all ranks. All ranks pass the same ones in the same order.

        Returns:
            The broadcasts to wait for.
        """
        return [self._broadcast(p.detach(), self.owner(p)) for p in parameters]

    # ---- saving and loading

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the states of all shards on one rank, which can then call `state_dict`. All ranks call this.

        Args:
            to: The rank in the group that receives them. Default: 0.

        Raises:
            DistError: With ``overlap_with_ddp``, before parameters are assigned to ranks.
        """
        self._must_be_assigned()
        if to not in range(self.world_size):
            expected = f"a rank in the group, from 0 to {self.world_size - 1}"
            raise BackendArgumentError(explain("ZeroRedundancyOptimizer.consolidate_state_dict", "to", expected, to))
        copy_options(self.param_groups, self.optim.param_groups)
        found: list[Any] | None = [None] * self.world_size if self.rank == to else None
        groups.gather_object(on_cpu(self.optim.state_dict()), found, group=self.process_group, group_dst=to)
        self._whole = None
        if found is not None:
            ranks = [(self._shards.of(rank), state) for rank, state in enumerate(found)]
            self._whole = merge_states(self._numbers(), ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, as last collected on this rank.

        Returns:
            The state dict of the same optimizer without ranks; tensors are on the CPU.

        Raises:
            DistError: `consolidate_state_dict` was not called, or it collected the state on another rank.
        """
        self._must_be_assigned()
        if self._whole is None:
            raise DistError(
                f"ZeroRedundancyOptimizer.state_dict: rank {self.rank} does not have the state of the others. "
                f"Call consolidate_state_dict(to={self.rank}) on all ranks first."
            )
        return {"state": self._whole, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state. Every rank loads the same.

        Args:
            state_dict: From `state_dict`, or from the same optimizer without ranks; not changed.

        Raises:
            DistError: With ``overlap_with_ddp``, before parameters are assigned to ranks.
        """
        self._must_be_assigned()
        if not isinstance(state_dict, Mapping):
            raise ArgumentTypeError(
                explain("ZeroRedundancyOptimizer.load_state_dict", "state_dict", "a dict", state_dict)
            )
        missing = [name for name in ("state", "param_groups") if name not in state_dict]
        if missing:
            expected = f"a dict made by state_dict; it lacks {missing[0]!r}"
            raise indexed(
                KeyError(explain("ZeroRedundancyOptimizer.load_state_dict", "state_dict", expected, list(state_dict)))
            )
        self.optim.load_state_dict(own_state(self._numbers(), self._shards.of(self.rank), state_dict))
        copy_options(self.optim.param_groups, self.param_groups)

    def _numbers(self) -> dict[Tensor, int]:
        return parameter_numbers([group["params"] for group in self.param_groups])

    def _must_be_assigned(self) -> None:
        if not self.assigned:
            raise DistError("ZeroRedundancyOptimizer: there is no state before the hook has seen DDP's buckets.")


def _checked(params: Any) -> list[Any]:
    """Return the parameters, or groups of them, as a list."""
    if not isinstance(params, Iterable) or isinstance(params, Tensor):
        expected = "an iterable of tensors, or of dicts"
        raise ArgumentTypeError(explain("ZeroRedundancyOptimizer", "params", expected, params))
    listed = list(params)
    if not listed:
        expected, hint = "a list of at least one parameter", "The optimizer got an empty parameter list."
        raise ArgumentError(explain("ZeroRedundancyOptimizer", "params", expected, listed, hint=hint))
    for entry in listed:
        # torch takes pairs of a name and a tensor too.
        if not isinstance(entry, Tensor | tuple):
            _check_group(entry)
    return listed


def _check_group(group: Any) -> None:
    expected = "tensors, or dicts with an entry 'params'"
    message = explain("ZeroRedundancyOptimizer", "params", expected, group)
    if not isinstance(group, dict):
        raise ArgumentTypeError(message)
    if "params" not in group:
        raise indexed(KeyError(message))
    if not isinstance(group["params"], Iterable):
        raise ArgumentTypeError(message)


def _check_class(optimizer_class: Any) -> None:
    no_optimizer = isinstance(optimizer_class, type) and not hasattr(optimizer_class, "step")
    if isinstance(optimizer_class, Optimizer) or not callable(optimizer_class) or no_optimizer:
        expected = "a class of optimizers, such as torch.optim.Adam"
        raise ArgumentTypeError(explain("ZeroRedundancyOptimizer", "optimizer_class", expected, optimizer_class))


def _refuse_sparse(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.layout != torch.strided:
            expected = "dense parameters"
            raise ArgumentError(explain("ZeroRedundancyOptimizer", "params", expected, parameter.layout))


def _verify_alike(parameters: Sequence[Tensor], group: Any) -> None:
    """Raise MismatchError unless all ranks have parameters of the same dtypes and shapes, in the same order."""
    names = [f"of shape {list(parameter.shape)}" for parameter in parameters]
    device = parameters[0].device if parameters else torch.device("cpu")
    dense = [False] * len(parameters)
    synchronization.verify(parameters, names, dense, group, device, "ZeroRedundancyOptimizer")


@contextmanager
def only(optimizer: Optimizer, gradients: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let an optimizer step on some parameters only, with these gradients, inside the context.

    While other gradients are being computed, the ``grad`` of their parameters belongs to autograd and is not touched.

    Args:
        optimizer: Any optimizer.
        gradients: Gradients of the parameters to update.
    """
    lists = [group["params"] for group in optimizer.param_groups]
    former = {parameter: parameter.grad for parameter in gradients}
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in gradients]
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient_or_none in former.items():
            parameter.grad = gradient_or_none
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
