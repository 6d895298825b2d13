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

# Elements of a gradient for which a call costs more than its copy: it stays in the cache until the bucket goes.
SMALL = 4096


class Rooms:
    """Memory as long as a bucket, of other dtypes, for what travels in its place; the same at every step.

    Apart from the bucket: what hooks are handed refers to it, and a bucket that referred to itself would
    outlive its reducer until the next garbage collection.

    Args:
        parameters: The bucket's parameters.
        length: That of the bucket.
        group: Who exchanges it.
    """

    def __init__(self, parameters: list[torch.Tensor], length: int, group: Any) -> None:
        self.parameters = parameters
        self.length = length
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
            memory = _empty(self.length, self.parameters[0], self.group, dtype)
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
        # Complex gradients travel as real numbers, or a hook that rounds them would lose their imaginary parts.
        dtype = parameters[0].dtype.to_real()
        self._complex = dtype is not parameters[0].dtype
        self.length = sum(parameter.numel() for parameter in parameters) * (2 if self._complex else 1)
        self.room = Rooms(parameters, self.length, group)
        # Never written where gradients travel in another dtype, and so no memory is taken for it then.
        self.buffer = _empty(self.length, parameters[0], group, dtype)
        self.views = split(self.buffer, parameters)
        self.waiting = len(members)
        self.started: Any = None
        self.sent: GradBucket | None = None
        on_cpu = self.buffer.device.type == "cpu"
        self._small = [on_cpu and parameter.numel() <= SMALL for parameter in parameters]
        self._held: list[tuple[int, torch.Tensor]] = []
        self.travel()

    def reset(self) -> None:
        """Await every gradient again."""
        self.waiting = len(self.members)
        self.started = self.sent = None

    def travel(self, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Settle how gradients are laid in, before the first one is.

        Args:
            scale: What they are multiplied by on their way, while they are in the cache.
            dtype: In which they travel, if not in their own: then they go into `room`, and are multiplied after that.
                Where they lie in the buffer after all (`.grad` is a view of it, has that dtype or is complex) nothing
                is done.
        """
        self.laid = None if self.pointing or self._complex or dtype is self.buffer.dtype else dtype
        self.scale = scale if self.laid is dtype else 1.0
        self._targets = self.views if self.laid is None else self.room.views(self.laid)
        # As a number of Python's it would be made a tensor for each gradient, which costs more than to multiply one.
        self._factor = None if self.scale == 1.0 else torch.tensor(self.scale, dtype=_exact(self.buffer.dtype))
        self._held.clear()

    def take(self, place: int) -> None:
        """Bring the gradient that autograd left at one parameter into the buffer; zeros where it left none.

        Small ones are held until the bucket goes, and then laid in together: one call costs more than their copies.
        """
        gradient = self.parameters[place].grad
        if gradient is None:
            self._targets[place].zero_()
            return
        if gradient is self._targets[place] and self._factor is None:
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._small[place]:
            self._held.append((place, gradient))
            return
        self._lay(self._targets[place], gradient)
        if self.pointing:
            self._adopt(place, gradient)

    def _lay(self, view: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._factor is not None and self.laid is None:
            torch.mul(gradient, self._factor, out=view)
            return
        if gradient is not view:
            view.copy_(gradient)
        if self._factor is not None:
            view.mul_(self._factor)

    def _lay_held(self) -> None:
        if not self._held:
            return
        views = [self._targets[place] for place, _ in self._held]
        torch._foreach_copy_(views, [gradient for _, gradient in self._held])
        if self._factor is not None:
            torch._foreach_mul_(views, self._factor)
        if self.pointing:
            for place, gradient in self._held:
                self._adopt(place, gradient)
        self._held.clear()

    def _adopt(self, place: int, gradient: torch.Tensor) -> None:
        # During backward in low precision they differ; then `give` points, when the full parameter is back.
        if gradient is not self.views[place] and gradient.dtype == self.views[place].dtype:
            self.parameters[place].grad = self.views[place]

    def offer(self) -> GradBucket:
        """The bucket as a hook sees it, with what was done to gradients on their way in."""
        self._lay_held()
        self.sent = GradBucket.of_views(
            self.index, self.buffer, self.views, self.parameters, self.is_last, self.scale, self.room, self.laid
        )
        return self.sent

    def shadow(self) -> GradBucket:
        """A bucket of zeros in this one's place: what a rank without inputs contributes."""
        self.travel()
        self.buffer.zero_()
        return self.offer()

    def give(self, value: torch.Tensor, untouched: Collection[int] = (), unchanged: bool = False) -> None:
        """Make the exchanged ``value`` the gradients of the parameters.

        Args:
            value: As long as the buffer; the buffer itself, if the exchange was in place.
            untouched: Indices of parameters whose ``.grad`` is left as it is.
            unchanged: Whether the value is what was taken from the parameters, so that ``.grad`` holds it already.
        """
        places: Sequence[int] = range(len(self.members))
        if untouched:
            places = [place for place, member in enumerate(self.members) if member not in untouched]
        if unchanged:
            places = [place for place in places if self.parameters[place].grad is None]
        sources = self._divided(value)
        if self.pointing:
            self._point(places)
        else:
            self._copy_out(places, sources)

    def _divided(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The value as one tensor per parameter; in the buffer itself if gradients are to stay there."""
        where = value.data_ptr(), value.dtype
        if where == (self.buffer.data_ptr(), self.buffer.dtype):
            return self.views
        if self.laid is not None and where == (self.room(self.laid).data_ptr(), self.laid):
            return self._targets
        if self.pointing or self._complex:
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


def _exact(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a factor loses nothing when tensors of ``dtype`` are multiplied by it."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _empty(length: int, like: torch.Tensor, group: Any, dtype: torch.dtype) -> torch.Tensor:
    if like.device.type == "cpu":
        return groups.empty_registered(length, dtype=dtype, group=group)
    return torch.empty(length, dtype=dtype, device=like.device)
