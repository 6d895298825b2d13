"""Join: training with uneven inputs, in which ranks without inputs participate with zeros.

A rank that has no more inputs makes the same collectives as the others, so that they can continue. Each iteration
begins with one all_reduce that counts the ranks with inputs; when no rank has inputs left, all ranks leave the loop.
The objects that communicate (`Joinable`) provide these collectives: DDP those of its buckets, other classes their own.
Do not add those of a particular class here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, explain
from torchdist_ref.work import Work

__all__ = ["Join", "JoinHook", "Joinable"]

logger = logging.getLogger("torchdist_ref.algorithms")

ITERATIONS_BEFORE_WARNING = 1000


class JoinHook:
    """Functions that a rank without inputs runs in place of its iterations. Override those that you need.

    Elsewhere:
        None in MPI, NCCL and JAX.
    """

    def main_hook(self) -> None:
        """Make the collectives of one iteration of the ranks that still have inputs."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run once, when no rank has inputs.

        Args:
            is_last_joiner: Whether this rank was among the last to finish, so that its states are current.
        """


class FunctionJoinHook(JoinHook):
    """Join hook made of functions.

    Args:
        match_iteration: Makes the collectives of one iteration of the ranks that still have inputs.
        end: Called once with ``is_last_joiner``, when no rank has inputs. Default: nothing.
    """

    def __init__(self, match_iteration: Callable[[], Any], end: Callable[[bool], None] = lambda _: None) -> None:
        self._match_iteration = match_iteration
        self._end = end

    def main_hook(self) -> None:
        """Match one iteration."""
        self._match_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the join."""
        self._end(is_last_joiner)


class _JoinConfig(NamedTuple):
    """Options of the `Join` that a joinable is in, if any."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class Joinable(ABC):
    """Base class of objects that communicate in every iteration, and can do so without inputs.

    A subclass calls ``Joinable.__init__`` in its constructor and `Join.notify_join_context` before the
    first collective of each iteration.

    Elsewhere:
        None in MPI, NCCL and JAX.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = _JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook of a rank without inputs.

        Args:
            **kwargs: Further arguments of `Join`; all joinables receive the same.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Device of the tensors that `Join` itself sends."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """Group over which `Join` counts ranks."""


class Join:
    """Context manager around a training loop in which ranks may have different numbers of inputs.

    Args:
        joinables: The objects that communicate inside, all in one group. The first one's device is used.
        enable: False makes the context do nothing. Default True.
        throw_on_early_termination: Raise on every rank as soon as one has no more inputs. Needed if the loop contains
            collectives that no joinable makes. Default False.
        **kwargs: Passed to every ``join_hook``.

    Raises:
        ArgumentError: No joinables, or joinables in different groups.
        ArgumentTypeError: Not a list, or an object that is not a Joinable.
        DistError: With ``throw_on_early_termination``, on all ranks, when a rank has no more inputs.

    Example:
        Rank 1 has one input more than rank 0, and both end with the same weights:

        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.join import Join
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1))
        ...     with Join([model]):
        ...         for _ in range(2 + rank):
        ...             model(torch.ones(1, 1)).sum().backward()
        ...     return model.module.weight.grad is not None
        >>> run(program, 2)
        [True, True]

    Elsewhere:
        None in MPI, NCCL and JAX. ``hvd.join`` in Horovod, whose remaining ranks reduce with zeros, too.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_joinables(joinables)
        self._process_group = _common_group(joinables)
        self._device = joinables[0].join_device
        self._rank = groups.get_rank(self._process_group)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._joinables = joinables
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        for index, joinable in enumerate(joinables):
            config = _JoinConfig(enable, throw_on_early_termination, index == 0)
            joinable._join_config = config  # noqa: SLF001 (torch's name)

    def __enter__(self) -> None:
        """Do nothing: the joinables are configured already."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Make the collectives of the other ranks until they have no more inputs either."""
        try:
            if self._enable and kind is None:
                self._match_iterations()
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig()  # noqa: SLF001 (torch's name)

    def _match_iterations(self) -> None:
        matched = 0
        while self._working_ranks():
            self._raise_if_asked()
            for hook in self._join_hooks:
                hook.main_hook()
            matched += 1
            if matched == ITERATIONS_BEFORE_WARNING:
                logger.warning("Join: rank %d has %d inputs fewer than another rank so far.", self._rank, matched)
        for hook in self._join_hooks:
            hook.post_hook(matched == 0)

    def _working_ranks(self) -> int:
        count = torch.zeros(1, dtype=torch.float32, device=self._device)
        groups.all_reduce(count, group=self._process_group)
        return int(count)

    def _raise_if_asked(self) -> None:
        if self._throw:
            asked = torch.ones(1, dtype=torch.float32, device=self._device)
            groups.all_reduce(asked, group=self._process_group)
            raise DistError(f"Join: rank {self._rank} used up its inputs; all ranks stop (throw_on_early_termination).")

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Notify ranks without inputs that this one has an input. Joinables call it before their first collective.

        Args:
            joinable: The caller. Only the first of a `Join` communicates; for the others this does nothing.

        Returns:
            The Work that counts the ranks with inputs (its tensor is ``work.result()[0]``), or None.

        Raises:
            DistError: With ``throw_on_early_termination``, when some rank has no more inputs.
        """
        if not hasattr(joinable, "_join_config"):
            expected = "a Joinable, such as DistributedDataParallel"
            raise ArgumentTypeError(explain("Join.notify_join_context", "joinable", expected, joinable))
        config = joinable._join_config  # noqa: SLF001 (torch's name)
        if not (config.enable and config.is_first_joinable):
            return None
        group, device = joinable.join_process_group, joinable.join_device
        mine = torch.ones(1, dtype=torch.float32, device=device)
        work: Work | None = groups.all_reduce(mine, group=group, async_op=True)
        if config.throw_on_early_termination:
            finished = torch.zeros(1, dtype=torch.float32, device=device)
            groups.all_reduce(finished, group=group)
            if int(finished):
                raise DistError(f"Join: a rank has used up its inputs; rank {groups.get_rank(group)} stops with it.")
        return work


def _check_joinables(joinables: Any) -> None:
    expected = "a list of at least one Joinable"
    if not isinstance(joinables, Sequence):
        raise ArgumentTypeError(explain("Join", "joinables", expected, type(joinables).__name__))
    if not joinables:
        raise ArgumentError(explain("Join", "joinables", expected, joinables))
    for index, joinable in enumerate(joinables):
        # Joinables of torch are accepted too, and they are not subclasses of our class.
        if not hasattr(joinable, "_join_config") or not hasattr(joinable, "join_hook"):
            hint = "Wrap models in DistributedDataParallel; a class of your own calls Joinable.__init__."
            got = type(joinable).__name__
            raise ArgumentTypeError(explain("Join", f"joinables[{index}]", "a Joinable", got, hint=hint))


def _common_group(joinables: Sequence[Joinable]) -> Any:
    group = joinables[0].join_process_group
    if any(joinable.join_process_group != group for joinable in joinables):
        raise ArgumentError(explain("Join", "joinables", "objects of one process group", "several groups"))
    return group
