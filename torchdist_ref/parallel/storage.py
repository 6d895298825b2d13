"""Where gradients lie while they travel: one flat buffer a bucket, and a view of it for each parameter.

`Bucket.take` copies a parameter's gradient in, `Bucket.give` hands the exchanged values out. With
``pointing`` (DDP's ``gradient_as_bucket_view``) the parameter's ``.grad`` *is* the view, so that there
is nothing to hand out and, when autograd accumulates in place, nothing to take in. When a bucket
goes, and in which order, is decided in `reducer`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.parallel.bucket import GradBucket, split


class Rooms:
    """Memory as long as a bucket, of other dtypes, for what travels in its place; the same at every step.

    Apart from the bucket: what hooks are handed refers to it, and a bucket that referred to itself would
    outlive its reducer until the next garbage collection.

    Args:
        parameters: The bucket's parameters.
        group: Who exchanges it.
    """

    def __init__(self, parameters: list[torch.Tensor], group: Any) -> None:
        self.parameters = parameters
        self.group = group
        self._made: dict[torch.dtype, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def __call__(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory of one dtype, flat."""
        return self._of(dtype)[0]

    def views(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The same memory as one view for each parameter."""
        return self._of(dtype)[1]

    def _of(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = self._made.get(dtype)
        if found is None:
            length = sum(parameter.numel() for parameter in self.parameters)
            memory = _empty(length, self.parameters[0], self.group, dtype)
            found = self._made[dtype] = memory, split(memory, self.parameters)
        return found


class Bucket:
    """Some parameters' gradients, and how many of them are still awaited.

    Args:
        index: Place in the order of communication.
        members: Indices of the parameters, as the reducer counts them.
        parameters: The parameters themselves, same order, one dtype and device.
        is_last: Whether this is the last bucket of the iteration.
        pointing: Whether ``.grad`` of the parameters is to be a view of the buffer.
        group: Who exchanges it: on the CPU the buffer lies where that is fastest.
    """

    def __init__(
        self, index: int, members: list[int], parameters: list[torch.Tensor], is_last: bool, pointing: bool, group: Any
    ) -> None:
        self.index = index
        self.members = members
        self.parameters = parameters
        self.is_last = is_last
        self.pointing = pointing
        self.length = sum(parameter.numel() for parameter in parameters)
        self.room = Rooms(parameters, group)
        self.buffer = _empty(self.length, parameters[0], group, parameters[0].dtype).zero_()
        self.views = split(self.buffer, parameters)
        self.waiting = len(members)
        self.started: Any = None
        self.sent: GradBucket | None = None

    def reset(self) -> None:
        """Await every gradient again."""
        self.waiting = len(self.members)
        self.started = self.sent = None

    def take(self, place: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Bring the gradient that autograd left at one parameter into the buffer; zeros where it left none.

        Args:
            place: Which parameter of the bucket.
            scale: What the gradient is multiplied by on its way, while it is in the cache.
            dtype: In which it travels, if not in its own: then it goes into `room`, in one pass.
        """
        rounded = self._travels(dtype)
        parameter, view = self.parameters[place], (self.room.views(rounded) if rounded else self.views)[place]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        if scale != 1.0:
            torch.mul(gradient, scale, out=view)
        elif gradient is not view:
            view.copy_(gradient)
        # During backward in low precision they differ; then `give` points, when the full parameter is back.
        if self.pointing and gradient is not view and gradient.dtype == view.dtype:
            parameter.grad = view

    def _travels(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """None where gradients lie in the buffer after all: they are views of it, or have that dtype themselves."""
        return None if self.pointing or dtype is self.buffer.dtype else dtype

    def offer(self, scale: float = 1.0, dtype: torch.dtype | None = None) -> GradBucket:
        """The bucket as a hook sees it; its gradients were scaled, or rounded to ``dtype``, on their way in."""
        self.sent = GradBucket.of_views(
            self.index, self.buffer, self.views, self.parameters, self.is_last, scale, self.room, self._travels(dtype)
        )
        return self.sent

    def shadow(self) -> GradBucket:
        """A bucket of zeros in this one's place: what a rank without inputs contributes."""
        self.buffer.zero_()
        return self.offer()

    def give(self, value: torch.Tensor, untouched: Collection[int] = ()) -> None:
        """Make the exchanged ``value`` the gradients of the parameters, but for those whose index is ``untouched``."""
        places: Sequence[int] = range(len(self.members))
        if untouched:
            places = [place for place, member in enumerate(self.members) if member not in untouched]
        sources = self._divided(value)
        if self.pointing:
            self._point(places)
        else:
            self._copy_out(places, sources)

    def _divided(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The value as one tensor per parameter; in the buffer itself if gradients are to stay there."""
        same = value.data_ptr() == self.buffer.data_ptr() and value.dtype == self.buffer.dtype
        if same:
            return self.views
        if self.pointing:
            self.buffer.copy_(value.detach().reshape(-1))
            return self.views
        return split(value.detach().contiguous().view(-1), self.parameters)

    def _point(self, places: Sequence[int]) -> None:
        for place in places:
            parameter, view = self.parameters[place], self.views[place]
            if parameter.grad is not view:
                parameter.grad = view

    def _copy_out(self, places: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        targets = []
        for place in places:
            parameter = self.parameters[place]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(self.views[place])
            targets.append(parameter.grad)
        if targets:
            torch._foreach_copy_(targets, [sources[place] for place in places])

    def adopt(self) -> None:
        """Move gradients that exist already into the buffer, where they are to be views of it."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if self.pointing and parameter.grad is not None and parameter.dtype == view.dtype:
                view.copy_(parameter.grad)
                parameter.grad = view


def _empty(length: int, like: torch.Tensor, group: Any, dtype: torch.dtype) -> torch.Tensor:
    if like.device.type == "cpu":
        return groups.empty_registered(length, dtype=dtype, group=group)
    return torch.empty(length, dtype=dtype, device=like.device)


def allocate(
    assignment: Sequence[list[int]], parameters: Sequence[torch.Tensor], pointing: bool, group: Any
) -> list[Bucket]:
    """The buckets of an assignment, in the order of communication."""
    last = len(assignment) - 1
    with torch.no_grad():
        buckets = [
            Bucket(index, members, [parameters[m] for m in members], index == last, pointing, group)
            for index, members in enumerate(assignment)
        ]
        for bucket in buckets:
            bucket.adopt()
    return buckets
