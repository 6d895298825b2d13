"""Pool of ranks that are reused: forked once from a process that has torch loaded, with all groups created.

Each rank has torch's Gloo and ours side by side. After a failure the state of the groups is unknown, so a rank that
fails, dies or hangs ends its pool, and the next case starts a new one.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as oracle

import torchdist_ref as dist
from tests.meaning.cases import Case
from tests.meaning.compare import Rank, WrongResult
from tests.torchs_world import start_torch

BACKENDS = ("ref", "gloo")
TIMEOUT_SECONDS = 20.0


class Pool:
    """Ranks of one world size, as a context manager.

    Args:
        world: Number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="meaning-")
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(self.world)]
        self._pipes = [ours for ours, _ in pairs]
        self._ranks = [
            context.Process(
                target=_serve, args=(rank, self.world, pairs[rank][1], Path(self._folder.name)), daemon=True
            )
            for rank in range(self.world)
        ]
        for process in self._ranks:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def check(self, case: Case) -> None:
        """Run a case on all ranks.

        Raises:
            WrongResult: With every rank's difference, and the command that runs the case again.
        """
        if not self._ranks:
            self._start()
        for pipe in self._pipes:
            pipe.send(case)
        failures = {rank: text for rank in range(self.world) if (text := self._result(rank))}
        if failures:
            self.close()
            texts = "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise WrongResult(f"{texts}\nTo run it again: python -m tests.meaning {self.world} {str(case)!r}")

    def _result(self, rank: int) -> str:
        pipe = self._pipes[rank]
        if not wait([pipe], TIMEOUT_SECONDS):
            return f"no result in {TIMEOUT_SECONDS:g} s"
        try:
            text: str = pipe.recv()
        except EOFError:
            return "died"
        return text

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._ranks:
            process.join(0.3)
            process.kill()
            process.join()
        if self._ranks:
            self._folder.cleanup()
        self._ranks, self._pipes = [], []


def _serve(rank: int, world: int, pipe: Connection, folder: Path) -> None:
    # Objects that the parent left for garbage collection may wait for threads that the child lacks.
    gc.freeze()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ours = _connect(rank, world, folder)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            ours.check(case)
            pipe.send("")
        except WrongResult as error:
            pipe.send(str(error))
        except BaseException:
            pipe.send(traceback.format_exc())


def _connect(rank: int, world: int, folder: Path) -> Rank:
    timeout = timedelta(seconds=TIMEOUT_SECONDS / 2)
    members = {"world": list(range(world)), "head": [0], "tail": list(range(1, world)) or [0]}
    own = dist.FileStore(str(folder / "ours"), world)
    dist.init_process_group("ref", store=own, rank=rank, world_size=world, timeout=timeout)
    ours = {
        backend: {name: dist.new_group(ranks, timeout=timeout, backend=backend) for name, ranks in members.items()}
        for backend in BACKENDS
    }
    store = oracle.FileStore(str(folder / "theirs"), world)
    start_torch(store=store, rank=rank, world_size=world, timeout=timeout)
    theirs = {name: oracle.new_group(ranks, timeout=timeout) for name, ranks in members.items()}
    return Rank(rank, members, theirs, ours)
