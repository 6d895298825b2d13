"""Gradients of a fixed number of micro-batches, summed along one tree, however many ranks share them.

The tree of all micro-batches is the one of the ranks, whose leaves are the trees of each rank's own micro-batches
(`schedules.reduction_tree`), if each rank has ``2^k`` consecutive ones. So a rank sums its own along a tree, and an
`all_reduce` does the rest. The sum of a rank is complete only after its last backward pass, in which DDP communicates.
A communication hook adds the other parts to the bucket before that.

Do not add here: what else changes bits (`conditions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.futures import Future

from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import HookGroup, comm_hook, single_tensor
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain, explain_type

__all__ = ["MicroBatches"]

EXACT = (torch.float32, torch.float64)


class MicroBatches:
    """Average of the gradients of some micro-batches, with the same bits on any number of ranks.

    Ranks have equally many consecutive micro-batches each: a power of two. So 8 micro-batches run on 1, 2, 4 or 8
    ranks, and 12 on 3, 6 or 12. All micro-batches need the same number of samples.

    Args:
        count: Number of micro-batches of one step, on all ranks together.
        model: A `DistributedDataParallel`, ours or torch's, without a communication hook; this registers one.
        group: Group over which the model averages. Default: the default group.

    Attributes:
        mine: Numbers of this rank's micro-batches.

    Raises:
        ArgumentError: The micro-batches are not divided evenly, or by no power of two; or a parameter is neither
            float32 nor float64, since partial sums of 16-bit floats would be rounded on each rank.
        ArgumentTypeError: The model is not a `DistributedDataParallel`.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.reproducible import MicroBatches
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     torch.manual_seed(0)
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(5, 1))
        ...     optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), MicroBatches(8, model)
        ...     for step in range(3):
        ...         for number in batches.step():
        ...             generator = torch.Generator().manual_seed(100 * step + number)
        ...             model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        ...         optimizer.step()
        ...     return model.module.weight.tolist()
        >>> weights = [run(program, size, ranks="processes")[-1] for size in (1, 2, 8)]
        >>> weights[0] == weights[1] == weights[2]
        True
    """

    def __init__(self, count: int, model: nn.Module, group: Any = None) -> None:
        size, rank = groups.get_world_size(group), groups.get_rank(group)
        each = count // size if isinstance(count, int) and count > 0 else 0
        if each * size != count or each & (each - 1) or not each:
            expected = f"{size} (the number of ranks) times a power of two"
            raise ArgumentError(explain("MicroBatches", "count", expected, count))
        if not hasattr(model, "register_comm_hook"):
            raise ArgumentTypeError(explain_type("MicroBatches", "model", "DistributedDataParallel", str(type(model))))
        self._module = cast(Any, model)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._arrived: set[Tensor] = set()
        for parameter in self._names:
            self.check_type(parameter, parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived.add)
        self.count, self.mine = count, range(rank * each, (rank + 1) * each)
        self._group = group
        # Partial sums of each parameter's gradients, of 2^k micro-batches each, the largest first.
        self._partial: dict[Tensor, list[tuple[int, Tensor]]] = {each: [] for each in self._names}
        self._module.register_comm_hook(self, _sum_of_all)

    def step(self) -> Iterator[int]:
        """Yield the numbers of this rank's micro-batches; run forward and backward of one before the next.

        All but the last run under ``model.no_sync()``. After the last, the gradients are averages over all
        micro-batches. Gradients from before the step are removed.

        Raises:
            ArgumentError: A parameter has no gradient in a micro-batch, so that the sums would have other leaves on
                another number of ranks; or a gradient is sparse.
        """
        for partial in self._partial.values():
            partial.clear()
        for parameter in self._names:
            parameter.grad = None
        for number in self.mine:
            last = number == self.mine[-1]
            self._arrived.clear()
            with nullcontext() if last else self._module.no_sync():
                yield number
            missing = [name for parameter, name in self._names.items() if parameter not in self._arrived]
            if missing:
                raise self._wrong_model(
                    f"a model whose parameters all get gradients, and {missing[0]!r} got none in micro-batch {number}"
                )
            if not last:
                self._keep()

    def _keep(self) -> None:
        """Add the gradients of a micro-batch to the partial sums, and remove them from the parameters."""
        for parameter in self._names:
            # Autograd made it for this parameter alone, as there was none before.
            gradient = cast(Tensor, parameter.grad).detach()
            parameter.grad = None
            self.check_type(parameter, gradient)
            self._join(parameter, gradient)

    def check_type(self, parameter: Tensor, values: Tensor) -> None:
        """Raise if the values of a parameter or of its gradient cannot be summed with the same bits everywhere."""
        if values.dtype not in EXACT or values.layout is not torch.strided:
            kind = values.dtype if values.layout is torch.strided else str(values.layout).removeprefix("torch.")
            what = "" if values is parameter else "the gradient of "
            name = self._names[parameter]
            raise self._wrong_model(f"float32 or float64 parameters with dense gradients, and {what}{name!r} is {kind}")

    def _wrong_model(self, expected: str) -> ArgumentError:
        return ArgumentError(explain("MicroBatches", "model", expected, type(self._module).__name__))

    def _join(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add partial sums of as many micro-batches to a gradient, again and again, and keep the result."""
        partial, leaves = self._partial[parameter], 1
        while partial and partial[-1][0] == leaves:
            # In place: neither operand is needed afterwards, and a sum of two has the same bits in both orders.
            gradient.add_(partial.pop()[1])
            leaves *= 2
        partial.append((leaves, gradient))

    def complete(self, parameter: Tensor, gradient: Tensor) -> None:
        """Make the gradient of this rank's last micro-batch the sum of all of them, in place."""
        self._join(parameter, gradient)
        self._partial[parameter].clear()

    @property
    def group(self) -> Any:
        """Group over which the hook sums."""
        return self._group


@comm_hook
def _sum_of_all(state: MicroBatches, bucket: Any) -> Future[Tensor]:
    """Sum a bucket over the micro-batches of this rank, then over the ranks, and divide by their number."""
    group, buffer = HookGroup(state.group, bucket), bucket.buffer()
    for parameter in bucket.parameters():
        state.check_type(parameter, buffer)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        state.complete(parameter, gradient)
    return group.start_sum(buffer).then(lambda future: single_tensor(future).div_(state.count))
