"""From one rank to one other: send, recv, isend, irecv.

A send is done when the receiver has the message. Messages of one pair with one tag arrive in order; tags may be
received in any order. Matching and moving are the backend's.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from torchdist_ref.calls import MOST_TAG, Recv, Send
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, BackendArgumentError, explain, on_rank
from torchdist_ref.groups.arguments import check_tensor, check_writable, member_group, root_of
from torchdist_ref.groups.group import ProcessGroup, whole_number
from torchdist_ref.work import Work

_send, _recv = lru_cache(Send), lru_cache(Recv)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send a tensor to one rank; back when that rank has received it.

    Args:
        tensor: What to send.
        dst: The destination, as a global rank. Give this or `group_dst`.
        group: Which ranks. Default: all.
        tag: The receive that takes it has the same tag.
        group_dst: The destination, as a rank in the group.

    Raises:
        ArgumentError: The destination is this rank, or not in the group; or this rank is not.
        ArgumentTypeError: Not a tensor.
        MismatchError: The receiver expects another size or dtype. Nothing was written.
        DistBackendError: The receiver died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     if rank == 0:
        ...         dist.send(torch.tensor([3.5, 4.25]), dst=1)
        ...         return None
        ...     got = torch.zeros(2)
        ...     sender = dist.recv(got, src=0)
        ...     return sender, got.tolist()
        >>> run(program, 2)
        [None, (0, [3.5, 4.25])]

    The operation is MPI's ``MPI_Ssend``.
    """
    found = member_group("send", group)
    if found is None:
        raise ArgumentError(f"send: this rank is not in the given group, so it can't send there{on_rank()}.")
    call = _send_call("send", tensor, dst, found, tag, group_dst)
    if call.dst == found.rank():
        raise ArgumentError(
            "send: Invalid destination rank: destination rank should not be the same as the rank of the current "
            f"process{on_rank()}. Use isend, or keep the tensor."
        )
    found.backend.submit(call, (tensor,), (), True)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start to send a tensor to one rank, which may be this one. Don't change the tensor before the Work is done.

    Args:
        tensor: What to send.
        dst: The destination, as a global rank. Give this or `group_dst`.
        group: Which ranks. Default: all.
        tag: The receive that takes it has the same tag.
        group_dst: The destination, as a rank in the group.

    Returns:
        A `Work`; None, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: The destination is not in the group.
        ArgumentTypeError: Not a tensor.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     got = torch.zeros(1)
        ...     sending = dist.isend(torch.tensor([rank + 0.5]), dst=1 - rank)
        ...     dist.recv(got, src=1 - rank)
        ...     sending.wait()
        ...     return got.item()
        >>> run(program, 2)
        [1.5, 0.5]
    """
    found = member_group("isend", group)
    if found is None:
        return None
    return found.backend.submit(_send_call("isend", tensor, dst, found, tag, group_dst), (tensor,), (), False)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor from one rank, or from whichever sends first.

    Args:
        tensor: Output, of the size and dtype of what is sent.
        src: The source, as a global rank. None, with `group_src` None: any rank.
        group: Which ranks. Default: all.
        tag: Only a message with this tag is taken.
        group_src: The source, as a rank in the group.

    Returns:
        The global rank that sent; -1, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: The source is not in the group.
        ArgumentTypeError: Not a tensor.
        MismatchError: The message has another size or dtype. Nothing was written.
        DistBackendError: The source died, gave up, or did not send in time.

    Example: see `send`. The operation is MPI's ``MPI_Recv``.
    """
    found = member_group("recv", group)
    if found is None:
        return -1
    work = found.backend.submit(_recv_call("recv", tensor, src, found, tag, group_src), (), (tensor,), True)
    return found.members[work.source_rank()]


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start to receive a tensor. Its content is unspecified until the Work is done.

    Args:
        tensor: Output, of the size and dtype of what is sent.
        src: The source, as a global rank. None, with `group_src` None: any rank.
        group: Which ranks. Default: all.
        tag: Only a message with this tag is taken.
        group_src: The source, as a rank in the group.

    Returns:
        A `Work`; None, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: The source is not in the group.
        ArgumentTypeError: Not a tensor.

    Example: see `isend`.
    """
    found = member_group("irecv", group)
    if found is None:
        return None
    return found.backend.submit(_recv_call("irecv", tensor, src, found, tag, group_src), (), (tensor,), False)


def _send_call(
    operation: str, tensor: Tensor, dst: int | None, group: ProcessGroup, tag: int, group_dst: int | None
) -> Send:
    check_tensor(operation, "tensor", tensor)
    return _send(root_of(group, operation, dst, group_dst, "dst"), _tag(operation, tag))


def _recv_call(
    operation: str, tensor: Tensor, src: int | None, group: ProcessGroup, tag: int, group_src: int | None
) -> Recv:
    check_tensor(operation, "tensor", tensor)
    check_writable(operation, "tensor", tensor)
    anybody = src is None and group_src is None
    return _recv(None if anybody else root_of(group, operation, src, group_src), _tag(operation, tag))


def _tag(operation: str, tag: int) -> int:
    if tag.__class__ is int and 0 <= tag <= MOST_TAG:
        return tag
    number = whole_number(tag)
    if number is None or number > MOST_TAG:
        # Where a tag is too large for torch's backends, torch raises a TypeError.
        raise ArgumentTypeError(explain(operation, "tag", f"an integer from 0 to {MOST_TAG}", tag))
    if number < 0:
        raise BackendArgumentError(explain(operation, "tag", f"an integer from 0 to {MOST_TAG}", tag))
    return number
