"""Equal replicas: parameters compared at construction, and parameters and buffers broadcast from one rank.

`verify` checks that all ranks have the same parameters, `broadcast_tensors` copies one rank's values to all, and
`broadcast_order` one rank's order of parameters. `Pack` views tensors of any dtypes and shapes as one run of bytes, so
that one broadcast sends them all. `ModuleStates` knows the tensors of a module, `BufferHook` calls a user's function
that synchronizes buffers in its own way. Do not add gradients here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentTypeError, MismatchError, RankStalledError, explain, in_context, message_of
from torchdist_ref.parallel.exchange import aborted_on_hook_failure, completed_within, timeout_seconds
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.torch_internals.torch_modes import outside_modes

copy_many = torch_private.COPY_MANY.bind()

# Bytes of one broadcast when a model is sent. Larger ones are not faster, and each needs a buffer of its size.
BROADCAST_BYTES = 25 * 1024 * 1024
ALIGNMENT_BYTES = 16


def describe(parameter: torch.Tensor, sparse: bool) -> str:
    """Return, as text, everything that has to be the same on every rank.

    >>> describe(torch.empty(2, 3), False)
    'torch.float32 of shape (2, 3), strides (3, 1)'
    """
    kind = ", sparse gradients" if sparse else ""
    return f"{parameter.dtype} of shape {tuple(parameter.shape)}, strides {parameter.stride()}{kind}"


def verify(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    sparse: Sequence[bool],
    group: Any,
    device: torch.device,
    owner: str = "DistributedDataParallel",
) -> None:
    """Check that every rank holds parameters of the same kinds, in the same order.

    Args:
        parameters: This rank's parameters.
        names: The name of each.
        sparse: Whether each has sparse gradients.
        group: The process group.
        device: The device on which texts are compared.
        owner: The class that needs equal parameters, for the message. Default: DDP.

    Raises:
        MismatchError: Some rank's parameters differ. Every rank raises, with the first parameter that differs and the
            ranks that hold each kind.
    """
    mine = [describe(parameter, flag) for parameter, flag in zip(parameters, sparse, strict=True)]
    text = "\n".join(mine).encode()
    digests = _gather(torch.tensor([len(text), zlib.crc32(text)], dtype=torch.int64, device=device), group)
    if all(torch.equal(digest, digests[0]) for digest in digests):
        return
    everyone = _gather_texts(text, [int(digest[0]) for digest in digests], group, device)
    difference = _difference([lines.split("\n") for lines in everyone], names, groups.get_rank(group))
    raise MismatchError(f"{owner}: {difference}")


def _gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(groups.get_world_size(group))]
    groups.all_gather(everyone, tensor, group=group)
    return everyone


def _gather_texts(text: bytes, lengths: Sequence[int], group: Any, device: torch.device) -> list[str]:
    padded = text.ljust(max(lengths), b"\0")
    everyone = _gather(torch.tensor(list(padded), dtype=torch.uint8, device=device), group)
    return [bytes(one.tolist()[:length]).decode() for one, length in zip(everyone, lengths, strict=True)]


def _difference(everyone: Sequence[Sequence[str]], names: Sequence[str], rank: int) -> str:
    """Return a message with the first parameter that differs, and its kinds with their ranks."""
    length = max(map(len, everyone))
    rows = [[lines[i] if i < len(lines) else "missing" for lines in everyone] for i in range(length)]
    index = next(i for i, row in enumerate(rows) if len(set(row)) > 1)
    name = repr(names[index]) if index < len(names) else "which this rank doesn't have"
    kinds = {kind: [r for r, other in enumerate(rows[index]) if other == kind] for kind in dict.fromkeys(rows[index])}
    found = "; ".join(f"{kind} on ranks {ranks}" for kind, ranks in kinds.items())
    return (
        f"parameter {index} ({name}) differs between ranks: {found} (this is rank {rank}). "
        "Build the model alike on every rank; the number and order of parameters count too."
    )


class Pack:
    """Run of bytes on one device, viewed as many tensors, which is communicated in place of the tensors.

    >>> pack = Pack([torch.tensor([1.5]), torch.tensor([True, False])])
    >>> pack.load()
    >>> pack.flat.numel(), pack.views[1].tolist()
    (32, [True, False])
    """

    @outside_modes()
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        sizes = [_padded(tensor) for tensor in self.tensors]
        self.flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.tensors[0].device)
        pieces = torch.split(self.flat, sizes)
        self.views = [_view_like(piece, tensor) for piece, tensor in zip(pieces, self.tensors, strict=True)]

    @outside_modes()
    def load(self) -> None:
        """Copy the tensors into the bytes."""
        copy_many(self.views, self.tensors)

    @outside_modes()
    def store(self) -> None:
        """Copy the bytes back into the tensors."""
        copy_many(self.tensors, self.views)

    def broadcast(self, group: Any, root: int) -> None:
        """Send the root's values to every rank. The tensors of the root are read and not written."""
        sending = groups.get_rank(group) == root
        if sending:
            self.load()
        groups.broadcast(self.flat, group=group, group_src=root)
        if not sending:
            self.store()


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _view_like(piece: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return piece[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


def _runs(tensors: Sequence[torch.Tensor], limit: int = BROADCAST_BYTES) -> Iterator[list[torch.Tensor]]:
    """Divide tensors, in order, into runs of one device and at most ``limit`` bytes (or one larger tensor)."""
    run: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        full = size + _padded(tensor) > limit or bool(run and run[0].device != tensor.device)
        if run and full:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += _padded(tensor)
    if run:
        yield run


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: Any, root: int = 0) -> None:
    """Copy the root's values of ``tensors`` to every rank, in place.

    Args:
        tensors: The same shapes and dtypes on all ranks; any mix of dtypes and devices.
        group: Group that takes part.
        root: Group rank that sends. Default 0.
    """
    for run in _runs([tensor.detach() for tensor in tensors]):
        Pack(run).broadcast(group, root)


def broadcast_order(order: Sequence[int], group: Any, device: torch.device) -> list[int]:
    """Return rank 0's order of parameters, on every rank."""
    numbers = torch.tensor(list(order), dtype=torch.int64, device=device)
    groups.broadcast(numbers, group=group, group_src=0)
    return [int(number) for number in numbers.tolist()]


def all_agree(vote: bool, group: Any, device: torch.device) -> bool:
    """Return whether all ranks vote with True."""
    votes = torch.tensor([vote], dtype=torch.int32, device=device)
    groups.all_reduce(votes, groups.ReduceOp.MIN, group=group)
    return bool(votes.item())


def any_rank(vote: bool, group: Any, device: torch.device) -> bool:
    """Return whether some rank votes with True; a rank in `Join` without inputs votes with False."""
    votes = torch.full((1,), float(vote), dtype=torch.float32, device=device)
    groups.all_reduce(votes, group=group)
    return bool(votes.item())


def highest_rank(candidate: bool, group: Any, device: torch.device) -> int:
    """Return the highest group rank among the candidates, on every rank."""
    mine = groups.get_rank(group) if candidate else -1
    rank = torch.tensor([mine], dtype=torch.int64, device=device)
    groups.all_reduce(rank, op=groups.ReduceOp.MAX, group=group)
    return int(rank)


class ModuleStates:
    """Parameters and buffers of a module that all ranks hold alike.

    Args:
        module: The module that DDP wraps.
        ignored: Names (of ``_ddp_params_and_buffers_to_ignore``) that are left to each rank.
        group: Group that DDP was given.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: Any) -> None:
        self.module = module
        self.ignored = ignored
        self.group = group
        self._pack: Pack | None = None

    def broadcast(self, with_buffers: bool, root: int = 0) -> None:
        """Copy the parameters of rank ``root`` to every rank, and also its buffers if asked to."""
        named = [*self.module.named_parameters(), *(self.module.named_buffers() if with_buffers else ())]
        broadcast_tensors([tensor for name, tensor in named if name not in self.ignored], self.group, root)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that all ranks hold alike, by name."""
        return {name: tensor for name, tensor in self.module.named_buffers() if name not in self.ignored}

    def broadcast_buffers(self, root: int) -> None:
        """Copy the buffers of rank ``root`` to every rank, in one message of a layout that is kept."""
        buffers = list(self.buffers().values())
        if not buffers:
            return
        if self._pack is None or not _fits(self._pack, buffers):
            self._pack = Pack(buffers)
        self._pack.broadcast(self.group, root)


def _fits(pack: Pack, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a pack is of these tensors, and of their present shapes."""
    return len(pack.tensors) == len(tensors) and all(
        own is tensor and view.shape == tensor.shape and view.dtype == tensor.dtype
        for own, view, tensor in zip(pack.tensors, pack.views, tensors, strict=True)
    )


class _BufferCommHookLocation(Enum):
    """When a buffer hook is called, by torch's name."""

    PRE_FORWARD = 1
    POST_FORWARD = 2


class BufferHook:
    """User's function that synchronizes buffers, and the Futures that it has returned.

    Args:
        hook: ``hook(state, buffers)``, with a dict of names and tensors; returns None or a list of Futures.
        state: First argument of the hook.
        location: Whether it is called before or after forward; ours or torch's ``_BufferCommHookLocation``.
        group: Group whose time-out bounds the wait.

    Raises:
        ArgumentTypeError: The hook cannot be called, or the location is none.
    """

    def __init__(self, hook: Callable[..., Any], state: Any, location: Any, group: Any) -> None:
        operation, rank = "_register_buffer_comm_hook", groups.get_rank(group)
        if not callable(hook):
            raise ArgumentTypeError(explain(operation, "hook", "callable", type(hook).__name__, rank=rank))
        if getattr(location, "name", None) not in _BufferCommHookLocation.__members__:
            expected = "a member of _BufferCommHookLocation"
            raise ArgumentTypeError(explain(operation, "comm_hook_location", expected, location, rank=rank))
        self.hook = hook
        self.state = state
        self.after_forward = location.name == _BufferCommHookLocation.POST_FORWARD.name
        self.group = group
        name = getattr(hook, "__name__", type(hook).__name__)
        self.name = f"DistributedDataParallel: buffer hook {name!r}, rank {rank}"
        self._pending: list[Any] = []

    def launch(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Call the hook."""
        with aborted_on_hook_failure(self.group, self.state):
            try:
                with torch.no_grad():
                    self._pending += self.hook(self.state, dict(buffers)) or ()
            except Exception as error:
                raise in_context(f"{self.name} raised {message_of(error)}", error) from error

    def wait(self) -> None:
        """Wait for the Futures that the hook has returned."""
        pending, self._pending = self._pending, []
        with aborted_on_hook_failure(self.group, self.state):
            for future in pending:
                if not completed_within(future, timeout_seconds(self.group)):
                    late = "a Future that it returned was not completed within the time-out"
                    raise RankStalledError(f"{self.name}: {late}.")
                try:
                    future.wait()
                except Exception as error:
                    raise in_context(f"{self.name}: a Future ended with {message_of(error)}", error) from error
