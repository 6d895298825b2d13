"""Post-local SGD: average over everybody at first, then only among neighbours, or not at all.

From step ``start_localSGD_iter`` on, gradients are averaged in a subgroup (say, the ranks of one host), and a
model averager brings the replicas together every so often, after the optimizer's step
(T. Lin, S. Stich, K. K. Patel, M. Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import average
from torchdist_ref.algorithms.ddp_comm_hooks.peers import Peers, comm_hook
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.parallel.bucket import GradBucket

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

logger = logging.getLogger("torchdist_ref.algorithms")


class PostLocalSGDState:
    """Which ranks `post_localSGD_hook` averages over, and from when on.

    Args:
        process_group: The group for the first steps; None for the default group.
        subgroup: The group for the later ones, one that this rank is in. Needed when they are averaged.
        start_localSGD_iter: Steps over ``process_group``.
        post_local_gradient_allreduce: Whether later steps are averaged at all. Default True.

    Raises:
        ArgumentError: Later steps are to be averaged, and there is no subgroup.

    Example:
        >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100, post_local_gradient_allreduce=False)
        >>> state.iter
        0
    """

    __slots__ = ("iter", "post_local_gradient_allreduce", "process_group", "start_localSGD_iter", "subgroup")

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if subgroup is None and post_local_gradient_allreduce:
            hint = "Make one of the ranks of each host with new_group, or pass post_local_gradient_allreduce=False."
            raise ArgumentError(explain("PostLocalSGDState", "subgroup", "a group", None, hint=hint))
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket goes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD begins after %d steps.", self.iter)


@comm_hook
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average over all ranks for the first steps, then over the subgroup, or not at all.

    Args:
        state: The groups, and the step at which one takes the other's place.
        bucket: The gradients; averaged in place.

    Returns:
        A Future of the bucket's buffer, with the average over this step's group.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     state = PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
        ...     steps = [dist.GradBucket(buffer=torch.tensor([4.0 * rank])) for _ in range(2)]
        ...     return [post_localSGD_hook(state, bucket).wait().item() for bucket in steps]
        >>> run(program, 2)
        [[2.0, 0.0], [2.0, 4.0]]
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(Peers(state.process_group, bucket), bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    return average(Peers(state.subgroup, bucket), bucket)
