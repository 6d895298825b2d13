"""Ranks as processes forked from this one: torch is there already, so four of them start in a tenth of a second.

Each child writes what came of it into a file that the parent made, and ends. A thread of the parent waits for each
child, so the parent hears of every death, by whatever cause. What one rank does is in `program`, how a child lives is
in `child`; this file only starts, watches and buries children. No child, file or folder outlives the ``with`` block.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from types import TracebackType

from torchdist_ref.launcher.lifelines import how_it_ended, interrupts_later, wait_without_reaping
from torchdist_ref.stores import FileStore
from torchdist_ref.testing.child import Papers, be_child
from torchdist_ref.testing.outcomes import Outcome
from torchdist_ref.testing.program import Program

_PATIENCE = 2.0


class ProcessRanks:
    """Runs a `Program` on forked processes; `outcomes` fills as they end."""

    def __init__(self, program: Program) -> None:
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._program = program
        self._folder = ""
        self._papers: list[Papers] = []
        self._pids: list[int] = []
        self._watchers: list[threading.Thread] = []

    def __enter__(self) -> ProcessRanks:
        try:
            self._start()
        except BaseException:
            self._bury()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bury()

    def where(self, ranks: Iterable[int]) -> dict[int, str]:
        """Say at which line each of the ranks is. This ends them: they dump their stacks on the way out."""
        ranks = list(ranks)
        for rank in ranks:
            self._kill(rank, signal.SIGABRT)
            self._kill(rank, signal.SIGCONT)
        for rank in ranks:
            self._watchers[rank].join(_PATIENCE)
        return {rank: self._papers[rank].stack() or "(it did not answer)" for rank in ranks}

    def show_output(self) -> None:
        """Print what the ranks printed, in rank order, each line with its rank."""
        for rank, papers in enumerate(self._papers):
            for line in papers.printed().splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="torchdist_ref-")
        self._papers = [Papers() for _ in range(self._program.world_size)]
        sys.stdout.flush()
        sys.stderr.flush()
        with interrupts_later():
            for rank in range(self._program.world_size):
                self._pids.append(self._fork(rank))
        self._watchers = [threading.Thread(target=self._watch, args=(rank,)) for rank in range(len(self._pids))]
        for watcher in self._watchers:
            watcher.start()

    def _fork(self, rank: int) -> int:
        parent = os.getpid()
        with _no_fork_warning():
            pid = os.fork()
        if pid == 0:
            be_child(rank, self._program, self._store, self._papers[rank], parent)
        with contextlib.suppress(OSError):
            # The child does the same: whoever comes first, the group is there once either goes on.
            os.setpgid(pid, pid)
        return pid

    def _store(self) -> FileStore:
        return FileStore(os.path.join(self._folder, "store"), self._program.world_size)

    def _watch(self, rank: int) -> None:
        status = wait_without_reaping(self._pids[rank])
        papers = self._papers[rank]
        outcome = papers.outcome(rank) if status == 0 else None
        self.outcomes.put(outcome or Outcome(rank, died=_epitaph(status, papers.stack())))

    def _kill(self, rank: int, signum: int) -> None:
        # Not yet waited for, so the number is still this child's, dead or alive.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pids[rank], signum)

    def _bury(self) -> None:
        for rank in range(len(self._pids)):
            self._kill(rank, signal.SIGKILL)
        for watcher in self._watchers:
            watcher.join()
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for papers in self._papers:
            papers.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _epitaph(status: int, stack: str) -> str:
    return f"{how_it_ended(status)}{', at:' if stack else ''}\n{stack}".rstrip()


@contextlib.contextmanager
def _no_fork_warning() -> Iterator[None]:
    # Python 3.12 warns of forking with threads about. The child touches nothing that another thread may hold.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
