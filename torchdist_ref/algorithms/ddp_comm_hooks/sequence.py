"""Hooks of several rounds, written as generators, and the line in which they take turns.

A hook such as PowerSGD sums something, computes with the sum, and sums again. Written with callbacks that is
hard to follow, and it has a trap: with several buckets under way, two ranks may start their second
sums in different orders, and a backend that matches calls by order pairs the wrong ones. Here
such a hook is a generator that yields each tensor to be summed over the ranks, and goes on with the sum; a
`Line` runs generators to their end one after another, in the order of the buckets, on a thread of its own.
So every rank makes the same calls in the same order, on any backend, while backward goes on.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import cast

import torch
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.peers import Peers

# Yields tensors to be summed over the ranks, in place; returns the bucket's new contents.
Rounds = Generator[torch.Tensor, None, torch.Tensor]


class Line:
    """Runs generators one after another, behind the back of the caller.

    >>> import torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def rounds(x):
    ...     yield x
    ...     x += 1
    ...     yield x
    ...     return x
    >>> def program(rank):
    ...     line, peers = Line(), Peers(None, None)
    ...     futures = [line.add(rounds(torch.tensor([float(i)])), peers) for i in range(3)]
    ...     return [future.wait().item() for future in futures]
    >>> run(program, 2)
    [[2.0, 6.0, 10.0], [2.0, 6.0, 10.0]]
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._busy = False

    def add(self, rounds: Rounds, peers: Peers, device: torch.device | None = None) -> Future[torch.Tensor]:
        """Run ``rounds`` after everything that was added before.

        Args:
            rounds: The generator.
            peers: The ranks over which the tensors that it yields are summed.
            device: Where it computes, if that is an accelerator: its kernels join the caller's stream.

        Returns:
            A Future of what the generator returns, or of what it raises.
        """
        devices: list[int | str | torch.device] = [device] if device is not None and device.type == "cuda" else []
        future: Future[torch.Tensor] = Future(devices=devices)
        stream = torch.cuda.current_stream(device) if devices else None
        context = contextvars.copy_context()
        self._put(lambda: context.run(_run, rounds, peers, future, stream))
        return future

    def _put(self, job: Callable[[], None]) -> None:
        """The thread lives while there is work, so that none is left behind."""
        with self._lock:
            self._jobs.append(job)
            start, self._busy = not self._busy, True
        if start:
            threading.Thread(target=self._drain, name="torchdist_ref hooks", daemon=True).start()

    def _drain(self) -> None:
        # A new thread computes on all cores until it is told the number of threads that this process chose.
        torch.set_num_threads(torch.get_num_threads())
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._busy = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None


def _run(rounds: Rounds, peers: Peers, future: Future[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
    try:
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            future.set_result(_to_the_end(rounds, peers))
    except Exception as error:
        cast("Future[Exception]", future).set_exception(error)


def _to_the_end(rounds: Rounds, peers: Peers) -> torch.Tensor:
    try:
        while True:
            peers.sum_now(next(rounds))
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result
