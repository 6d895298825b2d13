"""One bucket through one hook: call it, wait for its Future, and let nothing that it does hang or crash the step.

`Averaging` is what DDP does without a hook, `Hooked` calls one. Whatever goes wrong is told with the
hook's name, the bucket and the rank, because a hook is user code that runs deep inside backward. Neither
knows where the bucket came from, nor where its result goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch.futures import Future

from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.peers import promises
from torchdist_ref.errors import ArgumentTypeError, DistError, RankStalledError
from torchdist_ref.parallel.bucket import GradBucket

# What torch's own backends hand out: torch.futures.Future is a subclass of it.
AnyFuture = torch._C.Future

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class Exchange(Protocol):
    """How a bucket gets its new contents. The reducer starts buckets in order, and finishes them in order.

    Attributes:
        scale: What gradients are multiplied by when they are laid into the bucket.
        dtype: In which they are laid out, if not in their own; they are multiplied after that.
        unchanged: Whether the new contents are the old ones.
        over: The group whose average the new contents are, if they are that and nobody has to see the bucket.
        divisor: By what sums over that group are divided.
    """

    @property
    def scale(self) -> float: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def unchanged(self) -> bool: ...

    @property
    def over(self) -> Any: ...

    @property
    def divisor(self) -> float: ...

    def start(self, bucket: GradBucket) -> Any:
        """Begin; what is returned is handed to `finish`."""

    def finish(self, bucket: GradBucket, started: Any, length: int) -> torch.Tensor:
        """Wait for the new contents, ``length`` elements."""


class Averaging:
    """What DDP does without a hook: add up, divided by the number of ranks.

    Waits on the call itself, which is shorter than by way of a Future. Divides first, so that a sum of half-precision
    gradients doesn't overflow; and on the way into the bucket, which saves a pass over memory.

    Args:
        group: The group that DDP was given.
        divisor: By what the sum is divided.
        early: Whether gradients are divided on their way. If not, whole buckets are, and only those that go.
    """

    def __init__(self, group: Any, divisor: float, early: bool = True) -> None:
        self.group = group
        self.divisor = divisor
        self.early = early
        self.dtype: torch.dtype | None = None
        self.unchanged = False
        self.over = group

    @property
    def scale(self) -> float:
        """One over the divisor, unless whole buckets are divided."""
        return 1.0 / self.divisor if self.early else 1.0

    def start(self, bucket: GradBucket) -> Any:
        """Begin to add up."""
        if bucket._scale == 1.0 and self.divisor != 1.0:
            bucket.buffer().div_(self.divisor)
        return groups.all_reduce(bucket.buffer(), group=self.group, async_op=True)

    def finish(self, bucket: GradBucket, started: Any, length: int) -> torch.Tensor:
        """Wait for the sum, as long as the group's time-out allows."""
        started.wait()
        return bucket.buffer()


class Hooked:
    """A hook, its state, and the group whose time-out bounds the wait.

    Args:
        hook: Called with the state and a `GradBucket`; returns a Future of the bucket's new contents.
        state: Handed to the hook as it is.
        group: The group that DDP was given.
        early: Whether gradients may be divided or rounded on their way into the bucket, which saves passes over memory.
            Only for a hook that says that it takes them so: others see them as they are. Likewise, what a hook leaves
            as it is need not be handed out.
    """

    def __init__(self, hook: Hook, state: Any, group: Any, early: bool = True) -> None:
        self.hook = hook
        says = promises(hook) if early else {}
        averages = bool(says.get("only_averages"))
        size = groups.get_world_size(group)
        self.scale = 1.0 / size if averages and _power_of_two(size) else 1.0
        self.dtype: torch.dtype | None = says.get("takes_rounded")
        self.unchanged = bool(says.get("changes_nothing"))
        over = _group_of(state) if averages else None
        self.divisor = float(over.size()) if over else 1.0
        self.over = over if _power_of_two(int(self.divisor)) else None
        self.state = state
        self.rank = groups.get_rank(group)
        self.patience = patience(group)
        self.name = getattr(hook, "__name__", type(hook).__name__)

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Call the hook. Its own work goes on behind the Future."""
        try:
            future: Any = self.hook(self.state, bucket)
        except Exception as error:
            raise DistError(f"{self.where(bucket)} raised {type(error).__name__}: {error}{_of(bucket)}") from error
        if not isinstance(future, AnyFuture):
            expected = "It has to return a torch.futures.Future whose value is one tensor, as long as bucket.buffer()."
            raise ArgumentTypeError(f"{self.where(bucket)} returned {type(future).__name__}. {expected}")
        return cast("Future[torch.Tensor]", future)

    def finish(self, bucket: GradBucket, future: Future[torch.Tensor], length: int) -> torch.Tensor:
        """Wait for the Future and return its tensor, which has to have ``length`` elements."""
        if not future.done():
            self._await(bucket, future)
        try:
            value = future.wait()
        except Exception as error:
            ending = f"its Future ended with {type(error).__name__}: {error}"
            raise DistError(f"{self.where(bucket)}: {ending}{_of(bucket)}") from error
        return self._checked(bucket, value, length)

    def _await(self, bucket: GradBucket, future: Future[torch.Tensor]) -> None:
        if not ended_within(future, self.patience):
            raise RankStalledError(
                f"{self.where(bucket)}: its Future was not completed within {self.patience:g} s, the group's time-out. "
                "Some rank may not have reached this bucket, or the hook never sets its Future."
            )

    def _checked(self, bucket: GradBucket, value: Any, length: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ArgumentTypeError(
                f"{self.where(bucket)}: its Future holds {type(value).__name__}, and has to hold one tensor. "
                "The Future of a collective holds a list: chain .then(lambda future: future.value()[0])."
            )
        if value.numel() != length:
            sizes = f"{value.numel()} elements, and the bucket has {length}"
            raise DistError(f"{self.where(bucket)}: its Future holds a tensor of {sizes}.")
        fault = _unfit(bucket, value)
        if fault:
            kind = f"{value.dtype} on {value.device}, layout {value.layout}, shape {tuple(value.shape)}"
            raise DistError(f"{self.where(bucket)}: its Future holds a tensor of {kind}. {fault}")
        return value

    def where(self, bucket: GradBucket) -> str:
        """How errors begin: which hook, which bucket, which rank."""
        return f"DistributedDataParallel: communication hook {self.name!r}, bucket {bucket.index()}, rank {self.rank}"


def _unfit(bucket: GradBucket, value: torch.Tensor) -> str:
    """What a hook's tensor should have been, if it is of a kind that can't be handed out."""
    if bucket._layout is torch.sparse_coo:
        shape = bucket.parameters()[0].shape
        return "" if value.is_sparse and value.shape == shape else _SPARSE.format(tuple(shape))
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_complex():
        return f"It has to be dense and hold real numbers, best {bucket.buffer().dtype} as the buffer does."
    return ""


def _of(bucket: GradBucket) -> str:
    """What to add to the error of a hook that may not have been made for the bucket that it got."""
    shape = tuple(bucket.parameters()[0].shape) if bucket._layout is torch.sparse_coo else ()
    return f". {_SPARSE.format(shape)}" if shape else ""


_SPARSE = (
    "The bucket is one sparse gradient of shape {}, and such a tensor has to come back, of layout torch.sparse_coo. "
    "Hooks that can't take that ask for embeddings with sparse=False."
)


def ended_within(future: Future[Any], seconds: float) -> bool:
    """Wait for a Future, and say whether it was completed in time."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(seconds)


def _power_of_two(size: int) -> bool:
    """Whether to multiply by 1/size gives the same bits as to divide, which is what hooks do."""
    return size & (size - 1) == 0


def _group_of(state: Any) -> groups.ProcessGroup | None:
    """Which group of ours the state of a hook means that takes a group."""
    if state is None:
        return groups.GroupMember.WORLD
    return state if isinstance(state, groups.ProcessGroup) else None


def patience(group: Any) -> float:
    """The time-out of a group in seconds."""
    timeout = getattr(group, "timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout or 1800.0)
