"""Tools from which communication hooks are made: traits, the hook's group, and hooks of several rounds.

`hook_traits` declares properties of a hook that let DDP save work. `HookGroup` has the collectives of a hook on either
DDP, ours or torch's; `comm_hook` removes annotations, because torch's DDP refuses hooks that name another bucket class.
`RoundQueue` runs hooks that sum something, compute with the sum, and sum again. Do not add hooks here.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch.distributed import GradBucket as TorchBucket  # type: ignore[attr-defined]
from torch.futures import Future

from torchdist_ref import groups
from torchdist_ref.algorithms.bucket import GradBucket
from torchdist_ref.algorithms.division import Divisor, average
from torchdist_ref.errors import ArgumentTypeError, explain
from torchdist_ref.torch_internals import accelerators
from torchdist_ref.work import CallFuture

HookType = TypeVar("HookType", bound=Callable[..., Any])
Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]

# ---- traits


@dataclass(frozen=True, slots=True)
class HookTraits:
    """Properties of a hook that `DistributedDataParallel` makes use of; see `hook_traits`.

    Attributes:
        only_averages: Whether the result is the average over the group that is the hook's state, or the default group.
        wire_dtype: Dtype in which the hook communicates, or None.
        keeps_buffer: Whether the result equals the gradients of this rank.
    """

    only_averages: bool = False
    wire_dtype: torch.dtype | None = None
    keeps_buffer: bool = False


NO_TRAITS = HookTraits()

# Traits are not attributes of the functions: functools.wraps would copy them to a wrapper, which may change gradients.
_DECLARED: WeakKeyDictionary[Any, HookTraits] = WeakKeyDictionary()


def hook_traits(
    *,
    only_averages: bool = False,
    wire_dtype: torch.dtype | None = None,
    keeps_buffer: bool = False,
    like: Callable[..., Any] | None = None,
) -> Callable[[HookType], HookType]:
    """Declare properties of a communication hook, so that `DistributedDataParallel` can save passes over memory.

    The declaration belongs to the function that is decorated. A ``functools.partial`` of it has it too, and so have
    bound methods; the compression wrappers of this library derive theirs from the hook inside. A function made with
    ``functools.wraps`` may look at gradients or change them, so it does not inherit traits: decorate it with
    ``hook_traits(like=hook)`` if it preserves them. The order of the two decorators does not matter.

    Args:
        only_averages: The result is the average over the group that is the hook's state (None: the default group). Then
            DDP may divide while it packs, and `GradBucket.scale` is the factor: the hook divides by the number of ranks
            times ``bucket.scale``. DDP may also average without calling the hook. Default False.
        wire_dtype: The hook communicates gradients in this dtype. Then DDP may convert them while it packs, and
            `GradBucket.wire_dtype` is the dtype; ``bucket.wire_buffer(wire_dtype)`` returns them in any case, and
            ``bucket.buffer()`` may not. The result may have this dtype. Default None.
        keeps_buffer: The result equals the gradients of this rank, so DDP need not copy it. Default False.
        like: A hook whose traits are declared for this function too. Default None.

    Returns:
        A decorator that returns the hook itself.

    Example:
        An average that divides what DDP has left to divide:

        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks import hook_traits
        >>> from torchdist_ref.testing import run
        >>> @hook_traits(only_averages=True)
        ... def mean_hook(group, bucket):
        ...     bucket.buffer().div_(dist.get_world_size(group) * bucket.scale)
        ...     work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        ...     return work.get_future().then(lambda done: done.value()[0])
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     model.register_comm_hook(None, mean_hook)
        ...     model(torch.tensor([[4.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run(program, 2)
        [2.0, 2.0]
    """
    traits = HookTraits(only_averages, wire_dtype, keeps_buffer) if like is None else traits_of(like)

    def declare(hook: HookType) -> HookType:
        _DECLARED[hook] = traits
        return hook

    return declare


def traits_of(hook: Any) -> HookTraits:
    """Return the traits that `hook_traits` has declared for a hook; all false if it has not.

    >>> import functools
    >>> from torchdist_ref.algorithms.ddp_comm_hooks import hook_traits, traits_of
    >>> @hook_traits(keeps_buffer=True)
    ... def hook(state, bucket): ...
    >>> traits_of(functools.partial(hook)).keeps_buffer
    True
    >>> traits_of(functools.wraps(hook)(lambda state, bucket: hook(state, bucket))).keeps_buffer
    False
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    for function in (hook, getattr(hook, "__func__", None), inspect.getattr_static(type(hook), "__call__", None)):
        try:
            found = _DECLARED.get(function)
        except TypeError:
            # An object without hash or weak references, for which nothing can have been declared.
            continue
        if found is not None:
            return found
    return NO_TRAITS


# ---- groups and buckets of either DDP


def comm_hook(hook: HookType) -> HookType:
    """Return a hook that checks its bucket, with a signature without annotations, which every DDP accepts."""

    @functools.wraps(hook)
    def checked(*arguments: Any, **named: Any) -> Any:
        bucket = arguments[1] if len(arguments) > 1 else named.get("bucket")
        if not hasattr(bucket, "buffer"):
            raise ArgumentTypeError(explain(hook.__name__, "bucket", "a GradBucket", bucket))
        return hook(*arguments, **named)

    bare = [p.replace(annotation=p.empty) for p in inspect.signature(hook).parameters.values()]
    vars(checked)["__signature__"] = inspect.Signature(bare)
    return cast(HookType, checked)


class HookGroup:
    """Group of a hook, with the collectives that hooks use.

    A group of ours is used through `torchdist_ref.groups`, a group of torch's through `torch.distributed`.

    Args:
        group: A group of ours or of torch's; None for the default group.
        bucket: The bucket, whose class decides whose default group None is.
    """

    def __init__(self, group: Any, bucket: Any) -> None:
        self.group = group
        # Groups of ours are of torch's type too.
        of_torch = isinstance(group, torch.distributed.ProcessGroup) and not isinstance(group, groups.ProcessGroup)
        torchs = isinstance(bucket, TorchBucket) if group is None else of_torch
        self.api: ModuleType = torch.distributed if torchs else groups
        self.size: int = self.api.get_world_size(group)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return int(self.api.get_rank(self.group))

    @property
    def divisor(self) -> Divisor:
        """Divisor of a sum over the group."""
        return Divisor(self.size)

    def divide(self, bucket: Any, gradients: torch.Tensor) -> torch.Tensor:
        """Divide a bucket's gradients by the size of the group, in place, but for the factor that DDP has folded in."""
        scale = bucket.scale if isinstance(bucket, GradBucket) else 1.0
        return average(gradients, Divisor(self.size * scale))

    def average(self, bucket: Any) -> Future[torch.Tensor]:
        """Start to average the bucket's buffer, in place."""
        return self.start_sum(self.divide(bucket, bucket.buffer())).then(single_tensor)

    def start_sum(self, tensor: torch.Tensor) -> Future[list[torch.Tensor]]:
        """Start to sum a tensor over the ranks, in place."""
        future: Future[list[torch.Tensor]] = self.api.all_reduce(tensor, group=self.group, async_op=True).get_future()
        return future

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        self.api.all_reduce(tensor, group=self.group)

    def start_gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Future[Any]]:
        """Start to collect every rank's tensor. Return the outputs, in rank order, and a Future of their arrival."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        return everyone, self.api.all_gather(everyone, tensor, group=self.group, async_op=True).get_future()


def single_tensor(future: Future[list[torch.Tensor]]) -> torch.Tensor:
    """Return the one tensor of a finished collective."""
    return future.value()[0]


def wire_buffer(bucket: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a bucket's gradients in another dtype, in memory that the hook may write to."""
    if isinstance(bucket, GradBucket):
        return bucket.wire_buffer(dtype)
    buffer: torch.Tensor = bucket.buffer()
    return buffer.to(dtype, copy=True)


def converted_back(bucket: Any, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` in ``buffer``'s dtype, or as it is if our DDP converts it.

    Our DDP packs gradients in the hook's wire dtype and converts results of that dtype while it unpacks them. With one
    compression wrapper inside another, the buffer of the inner one has the outer wrapper's dtype already, and the
    result is copied into it.
    """
    packed = bucket.wire_dtype if isinstance(bucket, GradBucket) else None
    return buffer.copy_(value) if packed is None or packed is buffer.dtype else value


# ---- several rounds

# Yields tensors to be summed over the ranks, in place; returns the bucket's new contents.
HookRounds = Generator[torch.Tensor, None, torch.Tensor]


class RoundQueue:
    """Queue that runs hooks of several rounds one after another, on a thread of its own.

    A hook such as PowerSGD sums something, computes with the sum, and sums again. With callbacks and several buckets,
    two ranks might start their second sums in different orders, and a backend that matches calls by order would pair
    the wrong ones. Here such a hook is a generator that yields each tensor to be summed and resumes with the sum. The
    queue runs generators to completion in the order of buckets, so every rank makes the same calls in the same order,
    while backward continues.

    >>> import torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def rounds(x):
    ...     yield x
    ...     x += 1
    ...     yield x
    ...     return x
    >>> def program(rank):
    ...     queue, group = RoundQueue(), HookGroup(None, None)
    ...     futures = [queue.submit(rounds(torch.tensor([float(i)])), group) for i in range(3)]
    ...     return [future.wait().item() for future in futures]
    >>> run(program, 2)
    [[2.0, 6.0, 10.0], [2.0, 6.0, 10.0]]
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._busy = False

    def submit(self, rounds: HookRounds, group: HookGroup, device: torch.device | None = None) -> Future[torch.Tensor]:
        """Run ``rounds`` after everything that was submitted before.

        Args:
            rounds: The generator.
            group: Group over which the tensors that it yields are summed.
            device: Device of its tensors. On an accelerator, its kernels join the caller's stream. Default None: CPU.

        Returns:
            A Future of the generator's return value, or of its exception.
        """
        devices: list[Any] = [device] if device is not None and accelerators.is_accelerator(device) else []
        future = CallFuture(None, devices)
        stream = accelerators.current_stream(devices[0]) if devices else None
        context = contextvars.copy_context()
        self._put(lambda: context.run(_run, rounds, group, future, stream))
        return future

    def _put(self, job: Callable[[], None]) -> None:
        # The thread lives while there are jobs, so that none outlives the training.
        with self._lock:
            self._jobs.append(job)
            start, self._busy = not self._busy, True
        if start:
            threading.Thread(target=self._drain, name="torchdist_ref hooks", daemon=True).start()

    def _drain(self) -> None:
        # PyTorch keeps the number of compute threads per thread. A new thread starts with all cores, whatever the
        # program has set, until it sets the number itself.
        torch.set_num_threads(torch.get_num_threads())
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._busy = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None


def _run(rounds: HookRounds, group: HookGroup, future: CallFuture, stream: torch.Stream | None) -> None:
    try:
        with torch.no_grad(), accelerators.on_stream(stream) if stream is not None else nullcontext():
            future.set_result(_exhaust(rounds, group))
    except Exception as error:
        future.set_exception(error)


def _exhaust(rounds: HookRounds, group: HookGroup) -> torch.Tensor:
    try:
        while True:
            group.sum(next(rounds))
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result
