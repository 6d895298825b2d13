"""One model that learns with one hook, on one rank: steps, and what is to be seen of them.

The error of a hook is seen from outside of it, by a second backward pass that goes round DDP, so that a hook cannot
look better than it is. What passes between hook and backend meanwhile is for `hooks_watch` to see; which hooks take
turns, on which link, is in `hooks_measure`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.algorithms.model_averaging.averagers import PeriodicModelAverager
from torchdist_ref.benchmark.hooks_contestants import Contestant
from torchdist_ref.benchmark.hooks_tasks import Batch, Task
from torchdist_ref.benchmark.hooks_watch import Span, Spans
from torchdist_ref.optim import PostLocalSGDOptimizer
from torchdist_ref.parallel import DistributedDataParallel

# Several buckets even in a small model, so that there is something to overlap.
BUCKET_MIB = 1.0


class Trainee:
    """A model under DDP, its hook, its optimizer, and how far it has come.

    Args:
        task: What it learns.
        contestant: With which hook.
        group: The group over which gradients are averaged; None for the default group.

    >>> from torchdist_ref.benchmark.hooks_contestants import CONTESTANTS
    >>> from torchdist_ref.benchmark.hooks_tasks import Text
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     trainee = Trainee(Text(), CONTESTANTS["fp16"])
    ...     loss = trainee.step(trainee.batch())
    ...     return trainee.steps, trainee.owed()
    >>> run(program, 2)
    [(1, 1903360.0), (1, 1903360.0)]
    """

    def __init__(self, task: Task, contestant: Contestant, group: Any = None) -> None:
        self.task, self.contestant = task, contestant
        self.model = DistributedDataParallel(task.model(), process_group=group, bucket_cap_mb=BUCKET_MIB)
        self.group = self.model.process_group
        contestant.register(self.model, self.group)
        self._plain = task.optimizer(self.model)
        self.optimizer = self._with_averager(contestant.every)
        self.rank, self.world = groups.get_rank(self.group), groups.get_world_size(self.group)
        self.steps = 0
        self._drawn = 0

    def _with_averager(self, every: int) -> torch.optim.Optimizer:
        """The optimizer, which every so many steps averages the models too, if the hook wants it."""
        if not every:
            return self._plain
        return PostLocalSGDOptimizer(self._plain, PeriodicModelAverager(every, every - 1, self.group))

    def batch(self) -> Batch:
        """The next batch, another one at each call."""
        self._drawn += 1
        return self.task.batch(self._drawn - 1, self.rank, self.world)

    def step(self, batch: Batch) -> Tensor:
        """Learn from a batch: forward, backward, optimizer. Returns this rank's loss."""
        loss = self._gradients(batch)
        self.optimizer.step()
        self.steps += 1
        return loss

    def _gradients(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def spans(self) -> list[Span]:
        """Take a step, and say what happened when."""
        inputs, targets = self.batch()
        with Spans(self.model) as spans:
            with spans.part("forward"):
                self.optimizer.zero_grad()
                loss = self.task.loss(self.model(inputs), targets)
            with spans.part("backward"):
                loss.backward()
            with spans.part("optimizer"):
                self._plain.step()
        return list(spans)

    def error(self, exchange: Callable[[Any], list[Any]]) -> float:
        """Take a step, and say how far the gradients were from the exact average.

        Args:
            exchange: Hands every rank's value to every rank, by another way than the group.

        Returns:
            ‖got - average‖ / ‖average‖ of all gradients together; the average is computed in double precision.
        """
        batch = self.batch()
        everybodys = exchange(self._own(batch).numpy())
        exact = torch.stack([torch.from_numpy(each) for each in everybodys]).double().mean(0)
        self._gradients(batch)
        got = torch.cat([weight.grad.flatten() for weight in self.model.parameters() if weight.grad is not None])
        self._plain.step()
        return float((got.double() - exact).norm() / exact.norm())

    def _own(self, batch: Batch) -> Tensor:
        """The gradients of this rank's part of the batch, by themselves."""
        inputs, targets = batch
        loss = self.task.loss(self.model.module(inputs), targets)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(self.model.parameters()))])

    def buckets(self) -> list[list[torch.Size]]:
        """The shapes in each bucket, as they are now."""
        reducer = self.model.reducer
        return [[reducer.parameters[member].shape for member in members] for members in reducer.assignment]

    def owed(self) -> float:
        """Bytes that a step should send, by the hook's formula."""
        return self.contestant.nbytes(self.buckets(), self.world)
