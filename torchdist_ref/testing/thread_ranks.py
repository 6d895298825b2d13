"""Ranks as threads of this process: started in no time, easy to step through, stopped only by asking.

Each thread runs in a context of its own (`contextvars`), in which `torchdist_ref.groups` keeps that rank's world.
A thread cannot be killed, so a rank that hangs is asked to give up through its group, and is left behind as a daemon
if it does not. A rank that must be killed, or that must not share memory, belongs into `process_ranks`.
"""

from __future__ import annotations

import contextvars
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import FrameType, TracebackType

import torch

from torchdist_ref.groups import world
from torchdist_ref.stores import HashStore
from torchdist_ref.testing import program
from torchdist_ref.testing.outcomes import Outcome
from torchdist_ref.testing.program import Program

_PATIENCE = 1.0


class ThreadRanks:
    """Runs a `Program` on threads; `outcomes` fills as they end."""

    def __init__(self, task: Program) -> None:
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._task = task
        self._store = HashStore()
        self._contexts = [contextvars.copy_context() for _ in range(task.world_size)]
        self._threads = [
            threading.Thread(target=context.run, args=(self._be, rank), name=f"rank {rank}", daemon=True)
            for rank, context in enumerate(self._contexts)
        ]

    def __enter__(self) -> ThreadRanks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, thread in enumerate(self._threads):
            if thread.is_alive():
                self._ask_to_stop(rank, f"the run was given up: {error!r}")
        patience = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, patience - time.monotonic()))

    def where(self, ranks: Iterable[int]) -> dict[int, str]:
        """Say at which line each of the ranks is now."""
        frames = sys._current_frames()
        return {rank: _upper_frames(frames.get(self._threads[rank].ident or 0)) for rank in ranks}

    def show_output(self) -> None:
        """Threads print where everybody prints: there is nothing left to show."""

    def _be(self, rank: int) -> None:
        # A new thread has all cores to begin with, whatever number of threads this process chose.
        torch.set_num_threads(torch.get_num_threads())
        try:
            with world.thread_rank():
                outcome = self._task(rank, lambda: self._store)
        except BaseException as error:
            # In joining or leaving the world, not in the function.
            outcome = Outcome(rank, error=error)
        self.outcomes.put(outcome)

    def _ask_to_stop(self, rank: int, reason: str) -> None:
        # A copy, because the thread is still inside the context itself.
        self._contexts[rank].copy().run(world.abort, reason)


def _upper_frames(frame: FrameType | None) -> str:
    # Below our own call of the user's function lies only how this thread came about.
    frames = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    ours = [place for place, summary in enumerate(frames) if summary.filename == program.__file__]
    return "".join(traceback.format_list(frames[ours[-1] + 1 if ours else 0 :])).rstrip()
