"""Exchange of one bucket between the ranks: the sum of all ranks, or a user's communication hook.

The reducer launches and waits for either in the same way. A hook is user code that runs deep inside backward, so every
error names the hook, the bucket and the rank, and every wait has a time-out. `check_hook` accepts, at registration,
hooks written for torch, for this library, and without annotations. Do not add the bucket's origin or the use of its
result here.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import GradBucket as TorchBucket  # type: ignore[attr-defined]
from torch.futures import Future

from torchdist_ref import groups
from torchdist_ref.algorithms.bucket import GradBucket, LaunchedBucket
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import NO_TRAITS, traits_of
from torchdist_ref.algorithms.division import Divisor, average
from torchdist_ref.calls import AllReduce
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistError,
    RankStalledError,
    explain,
    in_context,
    message_of,
)
from torchdist_ref.timeouts import GROUP_TIMEOUT
from torchdist_ref.torch_internals import torch_private

# Class of the futures of torch's own backends: torch.futures.Future is a subclass of it.
AnyFuture = torch_private.FUTURE.get()

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


_SUM = AllReduce()


class AllReduceExchange:
    """Average without a hook: divide, then sum.

    Submits the call to the group's backend itself, since the reducer's own buffer needs no checks of arguments, and
    waits on the Work, which is faster than its Future. Gradients are divided while they are packed, which saves a pass
    over memory, and before the sum, so that sums of 16-bit floats stay in range.

    Args:
        group: Group that DDP was given.
        divisor: Divisor of the sums.
        fold: Whether gradients are divided while they are packed. False divides whole buckets, and only those that are
            launched. Default True.
    """

    wire_dtype: torch.dtype | None = None
    keeps_buffer = False

    def __init__(self, group: Any, divisor: Divisor, fold: bool = True) -> None:
        self.group: Any = groups.world.resolve(group)
        self.divisor = divisor
        self.fold = fold
        self.average_group = self.group

    @property
    def scale(self) -> float:
        """Reciprocal of the divisor, unless whole buckets are divided."""
        return self.divisor.factor if self.fold else 1.0

    def launch(self, bucket: LaunchedBucket) -> Any:
        """Start the sum."""
        contents = bucket.contents()
        if bucket.scale == 1.0:
            average(contents, self.divisor)
        if contents.is_sparse:
            return groups.all_reduce(contents, group=self.group, async_op=True), contents
        return self.group.backend.submit(_SUM, (contents,), (contents,), False), contents

    def wait(self, bucket: LaunchedBucket, handle: Any) -> torch.Tensor:
        """Wait for the sum, as long as the group's time-out allows."""
        work, contents = handle
        work.wait()
        result: torch.Tensor = contents
        return result


class HookExchange:
    """Call of a communication hook.

    Args:
        hook: Called with the state and a `GradBucket`; returns a Future of the bucket's new contents.
        state: First argument of the hook.
        group: Group that DDP was given; its time-out bounds the wait.
        fold: Whether the hook's traits are used, which saves passes over memory. A hook without traits gets gradients
            as they are. Default True.
    """

    def __init__(self, hook: Hook, state: Any, group: Any, fold: bool = True) -> None:
        self.hook = hook
        traits = traits_of(hook) if fold else NO_TRAITS
        default = Divisor(groups.get_world_size(group))
        self.scale = default.factor if traits.only_averages and default.factor_is_exact else 1.0
        self.wire_dtype = traits.wire_dtype
        self.keeps_buffer = traits.keeps_buffer
        averaged = _group_of(state) if traits.only_averages else None
        self.divisor = Divisor(averaged.size() if averaged else 1)
        # In place, gradients are multiplied by the reciprocal, and the hook divides. Only for powers of two do the two
        # have the same bits; for other numbers the hook receives every bucket.
        self.average_group = averaged if self.divisor.factor_is_exact else None
        self.state = state
        self.rank = groups.get_rank(group)
        self._group = groups.world.resolve(group)
        self._same_rank = groups.world.same_rank()
        self.timeout_seconds = timeout_seconds(group)
        self.name = _name(hook)

    def launch(self, bucket: LaunchedBucket) -> tuple[GradBucket, Future[torch.Tensor]]:
        """Call the hook. Its communication continues behind the Future."""
        shown = bucket.grad_bucket()
        with self._same_rank(), aborted_on_hook_failure(self._group, self.state):
            try:
                future: Any = self.hook(self.state, shown)
            except Exception as error:
                text = f"{self._where(bucket)} raised {message_of(error)}"
                raise in_context(f"{text}{_sparse_hint(shown)}", error) from error
            if not isinstance(future, AnyFuture):
                expected = "a torch.futures.Future whose value is one tensor, as long as bucket.buffer()"
                returned = f"returned {type(future).__name__}. It has to return {expected}."
                raise ArgumentTypeError(f"{self._where(bucket)} {returned}")
        return shown, cast("Future[torch.Tensor]", future)

    def wait(self, bucket: LaunchedBucket, handle: tuple[GradBucket, Future[torch.Tensor]]) -> torch.Tensor:
        """Wait for the Future and return its tensor."""
        shown, future = handle
        with aborted_on_hook_failure(self._group, self.state):
            if not future.done() and not completed_within(future, self.timeout_seconds):
                raise RankStalledError(
                    f"{self._where(bucket)}: its Future was not completed within {self.timeout_seconds:g} s, the "
                    "group's time-out. Some rank may not have reached this bucket, or the hook never sets its Future."
                )
            try:
                value = future.wait()
            except Exception as error:
                text = f"{self._where(bucket)}: its Future ended with {message_of(error)}"
                raise in_context(f"{text}{_sparse_hint(shown)}", error) from error
            return self._checked(bucket, shown, value)

    def _checked(self, bucket: LaunchedBucket, shown: GradBucket, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ArgumentTypeError(
                f"{self._where(bucket)}: its Future holds {type(value).__name__}, and has to hold one tensor. "
                "The Future of a collective holds a list: chain .then(lambda future: future.value()[0])."
            )
        if value.numel() != bucket.length:
            sizes = f"{value.numel()} elements, and the bucket has {bucket.length}"
            raise DistError(f"{self._where(bucket)}: its Future holds a tensor of {sizes}.")
        fault = _unusable(shown, value)
        if fault:
            kind = f"{value.dtype} on {value.device}, layout {value.layout}, shape {tuple(value.shape)}"
            raise DistError(f"{self._where(bucket)}: its Future holds a tensor of {kind}. {fault}")
        return value

    def _where(self, bucket: LaunchedBucket) -> str:
        return f"DistributedDataParallel: communication hook {self.name!r}, bucket {bucket.index}, rank {self.rank}"


def _unusable(bucket: GradBucket, value: torch.Tensor) -> str:
    """Return the requirement that a hook's tensor violates, or nothing."""
    if bucket.is_sparse:
        shape = bucket.parameters()[0].shape
        return "" if value.is_sparse and value.shape == shape else _SPARSE.format(tuple(shape))
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_complex():
        return f"It has to be dense and hold real numbers, best {bucket.buffer().dtype} as the buffer does."
    if value.dtype is not bucket.buffer().dtype:
        # The buffer may be narrower than the gradients: a wrapper has rounded it for the wire.
        wanted = bucket.parameters()[0].dtype
        if torch.promote_types(value.dtype, wanted) is not wanted:
            return f"The gradients are {wanted} and cannot hold it exactly: convert with .to({wanted})."
    return ""


def _sparse_hint(bucket: GradBucket) -> str:
    """Return the end of the error of a hook that may not support the sparse bucket that it received."""
    return f". {_SPARSE.format(tuple(bucket.parameters()[0].shape))}" if bucket.is_sparse else ""


_SPARSE = (
    "The bucket is one sparse gradient of shape {}, and such a tensor has to come back, of layout torch.sparse_coo. "
    "Hooks that do not support that need embeddings with sparse=False."
)


@contextmanager
def aborted_on_hook_failure(group: Any, state: Any) -> Iterator[None]:
    """Abort DDP's group and the groups in a hook's state if the hook fails.

    The other ranks may wait in any of these groups for a call that this rank's hook will not make. Groups that the hook
    gets in another way, such as from a global variable, are not known here.
    """
    try:
        yield
    except BaseException:
        with ExitStack() as aborted:
            for each in {groups.world.resolve(group), *_groups_in(state)} - {None}:
                aborted.enter_context(groups.world.aborted_on_failure(each.backend, "a communication hook"))
            raise


def _groups_in(state: Any) -> list[Any]:
    """Return the groups in a hook's state: the state itself, its items, or its attributes."""
    listed = list(state.values()) if isinstance(state, Mapping) else state
    held = listed if isinstance(listed, (list, tuple)) else [state, *getattr(state, "__dict__", {}).values()]
    return [each for each in held if isinstance(each, groups.ProcessGroup)]


def completed_within(future: Future[Any], seconds: float) -> bool:
    """Wait for a Future, and return whether it was completed in time."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(seconds)


def timeout_seconds(group: Any) -> float:
    """Return the time-out of a group in seconds."""
    timeout = getattr(group, "timeout", None) or GROUP_TIMEOUT
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def _group_of(state: Any) -> groups.ProcessGroup | None:
    """Return our group for a hook's `state`: None means the default group; None if the state is something else."""
    if state is None:
        return groups.GroupMember.WORLD
    return state if isinstance(state, groups.ProcessGroup) else None


def _name(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


# ---- registration

OPERATION = "register_comm_hook"
BUCKETS = (inspect.Parameter.empty, GradBucket, TorchBucket)
RESULTS = (inspect.Signature.empty, Future, Future[torch.Tensor])


def check_hook(hook: Any, registered: str | None, rank: int) -> None:
    """Raise unless ``hook`` can be registered and called as ``hook(state, bucket)``.

    Args:
        hook: The hook.
        registered: Name of the hook that DDP has already, or None.
        rank: Rank for error messages.

    Raises:
        DistError: DDP has a hook already.
        ArgumentTypeError: It cannot be called, or not with two arguments.
        ArgumentError: Its annotations name another kind of bucket or result.
    """
    if registered is not None:
        raise DistError(
            f"{OPERATION}: DistributedDataParallel has a hook already, {registered!r} (on rank {rank}), and takes one: "
            "register_comm_hook or register_builtin_comm_hook can only be called once. Combine hooks with a wrapper "
            "such as fp16_compress_wrapper, or build another DistributedDataParallel."
        )
    if not callable(hook):
        hint = "Pass the function itself, and the state first: register_comm_hook(state, hook)."
        raise ArgumentTypeError(explain(OPERATION, "hook", "callable", type(hook).__name__, rank=rank, hint=hint))
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return
    _check_arity(hook, signature, rank)
    _check_annotations(hook, signature, rank)


def _check_arity(hook: Callable[..., Any], signature: inspect.Signature, rank: int) -> None:
    try:
        signature.bind(None, None)
    except TypeError:
        hint = "DDP calls hook(state, bucket)."
        raise ArgumentTypeError(
            explain(OPERATION, "hook", "callable with two arguments", f"{_name(hook)}{signature}", rank=rank, hint=hint)
        ) from None


def _check_annotations(hook: Callable[..., Any], signature: inspect.Signature, rank: int) -> None:
    bucket = list(signature.parameters.values())[1:2]
    if bucket and bucket[0].kind is not inspect.Parameter.VAR_POSITIONAL and not _known(bucket[0].annotation, BUCKETS):
        raise ArgumentError(_disagrees(hook, f"take a GradBucket, not {bucket[0].annotation}", rank))
    if not _known(signature.return_annotation, RESULTS):
        raise ArgumentError(
            _disagrees(hook, f"return torch.futures.Future[torch.Tensor], not {signature.return_annotation}", rank)
        )


def _known(annotation: Any, known: tuple[Any, ...]) -> bool:
    """Return whether an annotation is one of the expected types.

    With postponed annotations it is text, of which only the last part of a dotted name is compared.
    """
    if isinstance(annotation, str):
        last = annotation.split(".")[-1]
        return last.startswith(("GradBucket", "Future[", "Tensor]")) or last in ("Any", "Future")
    return annotation is Any or any(annotation is one or annotation == one for one in known)


def _disagrees(hook: Callable[..., Any], expected: str, rank: int) -> str:
    hint = "Correct the annotation, or leave it out."
    return explain(OPERATION, "hook", f"annotated to {expected}", _name(hook), rank=rank, hint=hint)
