"""Several sends and receives as one list: P2POp, batch_isend_irecv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchdist_ref.errors import ArgumentError, EntryError, explain, on_rank
from torchdist_ref.groups.arguments import check_tensor, member_group, root_of
from torchdist_ref.groups.destroyed import refuse_destroyed
from torchdist_ref.groups.group import GroupMember, ProcessGroup
from torchdist_ref.groups.point_to_point import irecv, isend
from torchdist_ref.groups.world import resolve
from torchdist_ref.work import Work


class P2POp:
    """One send or receive of a batch, for `batch_isend_irecv`. Making it communicates nothing.

    Args:
        op: `isend` or `irecv` themselves.
        tensor: What to send, or where to receive.
        peer: The other rank, as a global rank. Give this or `group_peer`.
        group: Which ranks. Default: all.
        tag: Send and receive match by it.
        group_peer: The other rank, as a rank in the group.

    Attributes:
        op: As given.
        tensor: As given.
        peer: The other rank's global rank.
        group: The group; None where this rank is not in it.
        tag: As given.
        group_peer: The other rank's rank in the group.

    Raises:
        ArgumentError: `op` is something else, or the peer is not in the group, or the group was destroyed.
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
        self.tag = tag
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
        name, group = self.op.__name__, self.group.name
        return f"P2POp({name} in {group!r}, group rank {source} to {target}, tag {self.tag}, {dtype} {shape})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start several sends and receives, in any order: ranks that exchange tensors don't wait for each other.

    Args:
        p2p_op_list: The sends and receives, at least one, all of one group.

    Returns:
        A Work for each, in the order of the list; none, with a warning, if this rank is not in the group.

    Raises:
        ArgumentError: Not a list of `P2POp`, or of several groups. Nothing has been started.
        EntryError: The list is empty.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     got = torch.zeros(1)
        ...     sending = dist.P2POp(dist.isend, torch.tensor([rank + 0.5]), (rank + 1) % 3)
        ...     receiving = dist.P2POp(dist.irecv, got, (rank - 1) % 3)
        ...     for work in dist.batch_isend_irecv([sending, receiving]):
        ...         work.wait()
        ...     return got.item()
        >>> run(program, 3)
        [2.5, 0.5, 1.5]
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ArgumentError(explain("batch_isend_irecv", "p2p_op_list", "a list of P2POp", p2p_op_list))
    if not p2p_op_list:
        raise EntryError(explain("batch_isend_irecv", "p2p_op_list", "a list of at least one P2POp", p2p_op_list))
    groups = {op.group for op in p2p_op_list}
    if len(groups) > 1:
        names = sorted(str(group and group.name) for group in groups)
        raise ArgumentError(f"batch_isend_irecv: All ops need to use the same group, and these use {names}{on_rank()}.")
    found = member_group("batch_isend_irecv", groups.pop() or GroupMember.NON_GROUP_MEMBER)
    if found is None:
        return []
    with found.backend.together():
        return [op.op(op.tensor, None, found, op.tag, op.group_peer) for op in p2p_op_list]
