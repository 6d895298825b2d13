"""Messages between two ranks: send, recv, isend, irecv, P2POp, batch_isend_irecv.

A send completes when the receiver has the message. Messages between two ranks with one tag arrive in order; tags may be
received in any order. Do not add matching or transfer here: the backend does both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import Tensor

from torchdist_ref.backends.operands import check_writable, is_in_memory, refuse_unsupported, unwrapped
from torchdist_ref.calls import Recv, Send, checked_tag
from torchdist_ref.errors import ArgumentError, BackendArgumentError, EntryError, explain, on_rank
from torchdist_ref.groups.arguments import check_tensor, member_group, root_of
from torchdist_ref.groups.collectives import submit_inside
from torchdist_ref.groups.world import GroupMember, ProcessGroup, refuse_destroyed, resolve
from torchdist_ref.work import Work

_send, _recv = lru_cache(Send), lru_cache(Recv)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send a tensor to one rank, and return when that rank has received it.

    Args:
        tensor: Input: the tensor to send, of the receiver's dtype and number of elements.
        dst: Global rank of the destination. Pass this or `group_dst`.
        group: Process group. Default: all ranks.
        tag: Integer that the matching receive also passes. Default: 0.
        group_dst: Group rank of the destination.

    Raises:
        ArgumentError: The destination is this rank or not in the group, or this rank is not in the group.
        ArgumentTypeError: Not a tensor.
        MismatchError: The receiver expects another size or dtype. No tensor was written.
        DistBackendError: The receiver died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     if rank == 0:
        ...         dist.send(torch.tensor([3.5, 4.25]), dst=1)
        ...         return None
        ...     received = torch.zeros(2)
        ...     sender = dist.recv(received, src=0)
        ...     return sender, received.tolist()
        >>> run(program, 2)
        [None, (0, [3.5, 4.25])]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all_single` is, and can send to one rank.

    Elsewhere:
        ``MPI_Ssend`` in MPI, ``ncclSend`` in NCCL. JAX has no single message: ``jax.lax.ppermute`` sends one
        from each rank.
    """
    found = member_group("send", group)
    if found is None:
        raise ArgumentError(f"send: this rank is not in the given group, so it cannot send to its members{on_rank()}.")
    call = _send_call("send", tensor, dst, found, tag, group_dst)
    if call.dst == found.rank():
        raise ArgumentError(
            "send: Invalid destination rank: destination rank should not be the same as the rank of the current "
            f"process{on_rank()}. Use isend, or keep the tensor."
        )
    _submit(found, call, (tensor,), (), True)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start to send a tensor to one rank, which may be this one. Do not modify the tensor before the Work is done.

    Args:
        tensor: Input: the tensor to send, of the receiver's dtype and number of elements.
        dst: Global rank of the destination. Pass this or `group_dst`.
        group: Process group. Default: all ranks.
        tag: Integer that the matching receive also passes. Default: 0.
        group_dst: Group rank of the destination.

    Returns:
        A `Work`; None, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: The destination is not in the group.
        ArgumentTypeError: Not a tensor.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     received = torch.zeros(1)
        ...     sending = dist.isend(torch.tensor([rank + 0.5]), dst=1 - rank)
        ...     dist.recv(received, src=1 - rank)
        ...     sending.wait()
        ...     return received.item()
        >>> run(program, 2)
        [1.5, 0.5]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all_single` is, and can send to one rank.

    Elsewhere:
        ``MPI_Isend`` in MPI, ``ncclSend`` on a stream in NCCL, ``jax.lax.ppermute`` in JAX.
    """
    found = member_group("isend", group)
    if found is None:
        return None
    return _submit(found, _send_call("isend", tensor, dst, found, tag, group_dst), (tensor,), (), False)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor from one rank, or from the first rank that sends.

    Args:
        tensor: Output, of the size and dtype of the tensor that is sent.
        src: Global rank of the source. Default: any rank, unless `group_src` is given.
        group: Process group. Default: all ranks.
        tag: Integer that the matching send also passes. Default: 0.
        group_src: Group rank of the source.

    Returns:
        Global rank of the sender; -1, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: The source is not in the group.
        ArgumentTypeError: Not a tensor.
        MismatchError: The message has another size or dtype. No tensor was written.
        DistBackendError: The source died, aborted, or did not send in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def from_any_rank(rank):
        ...     tensor = torch.tensor([10.0 * rank])
        ...     if rank == 1:
        ...         dist.send(tensor, dst=0)
        ...     return (dist.recv(tensor), tensor.item()) if rank == 0 else None
        >>> run(from_any_rank, 2)
        [(1, 10.0), None]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all_single` is, and can send to one rank.

    Elsewhere:
        ``MPI_Recv`` in MPI, ``ncclRecv`` in NCCL, ``jax.lax.ppermute`` in JAX. Only MPI can receive from any
        rank, too.
    """
    found = member_group("recv", group)
    if found is None:
        return -1
    work = _submit(found, _recv_call("recv", tensor, src, found, tag, group_src), (), (tensor,), True)
    return found.members[work.source_rank()]


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start to receive a tensor. Its values are unspecified until the Work is done.

    Args:
        tensor: Output, of the size and dtype of the tensor that is sent.
        src: Global rank of the source. Default: any rank, unless `group_src` is given.
        group: Process group. Default: all ranks.
        tag: Integer that the matching send also passes. Default: 0.
        group_src: Group rank of the source.

    Returns:
        A `Work`; None, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: The source is not in the group.
        ArgumentTypeError: Not a tensor.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank + 1.0])
        ...     work = dist.isend(tensor, dst=1) if rank == 0 else dist.irecv(tensor, src=0)
        ...     return work.wait(), tensor.item()
        >>> run(program, 2)
        [(True, 1.0), (True, 1.0)]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all_single` is, and can send to one rank.

    Elsewhere:
        ``MPI_Irecv`` in MPI, ``ncclRecv`` on a stream in NCCL, ``jax.lax.ppermute`` in JAX.
    """
    found = member_group("irecv", group)
    if found is None:
        return None
    return _submit(found, _recv_call("irecv", tensor, src, found, tag, group_src), (), (tensor,), False)


def _submit(
    group: ProcessGroup, call: Send | Recv, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], wait: bool
) -> Work:
    """Submit a message to the group's backend, as `collectives.submit` does a collective."""
    try:
        return group.backend.submit(call, inputs, outputs, wait)
    except BackendArgumentError as refused:
        return submit_inside(refused, _submit, group, call, inputs, outputs, wait)


def _send_call(
    operation: str, tensor: Tensor, dst: int | None, group: ProcessGroup, tag: int, group_dst: int | None
) -> Send:
    check_tensor(operation, "tensor", tensor)
    return _send(root_of(group, operation, dst, group_dst, "dst"), checked_tag(operation, tag))


def _recv_call(
    operation: str, tensor: Tensor, src: int | None, group: ProcessGroup, tag: int, group_src: int | None
) -> Recv:
    """Check the arguments of a receive, and return it as a value."""
    check_tensor(operation, "tensor", tensor)
    if not tensor.is_contiguous():
        check_writable(operation, "tensor", tensor)
    any_source = src is None and group_src is None
    return _recv(None if any_source else root_of(group, operation, src, group_src), checked_tag(operation, tag))


class P2POp:
    """Send or receive operation of a batch, for `batch_isend_irecv`. Its construction does not communicate.

    Args:
        op: The function `isend` or `irecv`.
        tensor: The tensor to send, or the output of a receive.
        peer: Global rank of the other rank. Pass this or `group_peer`.
        group: Process group. Default: all ranks.
        tag: Integer by which a send and a receive match. Default: 0.
        group_peer: Group rank of the other rank.

    Attributes:
        op: The function passed.
        tensor: The tensor passed.
        peer: Global rank of the other rank.
        group: The group; None if this rank is not in it.
        tag: The tag passed.
        group_peer: Group rank of the other rank.

    Raises:
        ArgumentError: `op` is another function, the peer is not in the group, or the group was destroyed.
        ArgumentTypeError: Not a tensor.

    Example: see `batch_isend_irecv`.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | int | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ArgumentError(
                explain("P2POp", "op", "torchdist_ref.isend or torchdist_ref.irecv", op, hint="Invalid ``op``.")
            )
        check_tensor("P2POp", "tensor", tensor)
        self.op = op
        self.tensor = tensor
        self.group = resolve(group, "P2POp")
        self.tag = checked_tag("P2POp", tag)
        self.group_peer, self.peer = group_peer, peer
        if self.group is not None:
            refuse_destroyed(self.group, "P2POp")
            self.group_peer = root_of(self.group, "P2POp", peer, group_peer, "peer")
            self.peer = self.group.members[self.group_peer]

    def __repr__(self) -> str:
        if self.group is None:
            return f"P2POp({self.op.__name__} in a group that this rank is not in)"
        me, other = self.group.rank(), self.group_peer
        source, target = (me, other) if self.op is isend else (other, me)
        shape, dtype = list(self.tensor.shape), self.tensor.dtype
        name, group = self.op.__name__, self.group.group_desc
        return f"P2POp({name} in {group!r}, group rank {source} to {target}, tag {self.tag}, {dtype} {shape})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start several sends and receives; their order in the list cannot cause a deadlock.

    Args:
        p2p_op_list: The sends and receives, at least one, all on one group. Their tensors may have different shapes and
            dtypes; a receive has those of its send.

    Returns:
        One Work per operation, in list order; an empty list, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: Not a list of `P2POp`, operations on several groups, or two receives into the same memory, where
            chance decides which is last. None of them was started.
        EntryError: The list is empty.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     received = torch.zeros(1)
        ...     sending = dist.P2POp(dist.isend, torch.tensor([rank + 0.5]), (rank + 1) % 3)
        ...     receiving = dist.P2POp(dist.irecv, received, (rank - 1) % 3)
        ...     for work in dist.batch_isend_irecv([sending, receiving]):
        ...         work.wait()
        ...     return received.item()
        >>> run(program, 3)
        [2.5, 0.5, 1.5]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all_single` is, and can send to one rank.

    Elsewhere:
        ``MPI_Isend``, ``MPI_Irecv`` and ``MPI_Waitall`` in MPI, ``ncclGroupStart`` and ``ncclGroupEnd`` in
        NCCL, ``jax.lax.ppermute`` in JAX.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ArgumentError(explain("batch_isend_irecv", "p2p_op_list", "a list of P2POp", p2p_op_list))
    if not p2p_op_list:
        raise EntryError(explain("batch_isend_irecv", "p2p_op_list", "a list of at least one P2POp", p2p_op_list))
    groups = {op.group for op in p2p_op_list}
    if len(groups) > 1:
        names = sorted(str(group and group.group_desc) for group in groups)
        raise ArgumentError(f"batch_isend_irecv: All ops need to use the same group, and these use {names}{on_rank()}.")
    found = member_group("batch_isend_irecv", groups.pop() or GroupMember.NON_GROUP_MEMBER)
    if found is None:
        return []
    _require_separate_receives(p2p_op_list)
    for op in p2p_op_list:
        _check_before_any_begins(op, found)
    with found.backend.coalescing():
        return [op.op(op.tensor, None, found, op.tag, op.group_peer) for op in p2p_op_list]


def _check_before_any_begins(op: P2POp, group: ProcessGroup) -> None:
    """Raise what `isend` or `irecv` would when the messages before this one have begun."""
    if op.op is irecv:
        check_writable("irecv", "tensor", op.tensor)
    # On `fake` a tensor need not be in memory.
    if group.backend.name != "fake" and (op.tensor.is_meta or not is_in_memory(op.tensor)):
        tensors = (op.tensor,)
        call = _send(0) if op.op is isend else _recv(0)
        refuse_unsupported(call, unwrapped(tensors), (), group.backend.name)


def _require_separate_receives(operations: list[P2POp]) -> None:
    """Raise if two receives write to the same bytes; tensors with gaps are not examined."""
    if sum(op.op is irecv for op in operations) < 2:
        return
    spans = []
    for index, op in enumerate(operations):
        if op.op is irecv and op.tensor.is_contiguous() and op.tensor.numel():
            begin = op.tensor.data_ptr()
            spans.append((begin, begin + op.tensor.numel() * op.tensor.element_size(), index))
    spans.sort()
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end:
            first, second = sorted((one, other))
            raise ArgumentError(
                f"batch_isend_irecv: receives {first} and {second} of the list write to the same memory{on_rank()}. "
                f"Chance decides which message arrives last. Receive into separate tensors."
            )
