"""Ranks as processes forked from this one: torch is already loaded, so four of them start in a tenth of a second.

No fork survives a started accelerator. So if this process has started one, the ranks are new processes instead, which
import the program's module (`SpawnedRank`) and take seconds to start.

Each child writes its outcome into a file that the parent created, and exits. A thread of the parent waits for each
child, so every death is noticed, whatever its cause. No child, file or folder outlives the ``with`` block.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import queue
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import spawn
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, NoReturn

import torch

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, add_note, explain, message_of
from torchdist_ref.processes import control as processes
from torchdist_ref.ranks import outcomes
from torchdist_ref.ranks.outcomes import Outcome, RankProgram, RemoteError, RunLimits
from torchdist_ref.stores import FileStore, Store
from torchdist_ref.torch_internals import accelerators


class ProcessRanks:
    """Runner of a `RankProgram` on forked processes.

    Args:
        program: Program of each rank.
        limits: Times of the run.

    Attributes:
        program, limits: As given.
        outcomes: Queue of the outcomes, in order of arrival.
    """

    def __init__(self, program: RankProgram, limits: RunLimits) -> None:
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.program, self.limits = program, limits
        self._folder = ""
        self._files: list[RankFiles] = []
        self._children: list[processes.Child] = []
        self._watchers: list[threading.Thread] = []

    def __enter__(self) -> ProcessRanks:
        try:
            self._start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean_up()

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the stack of each of the ranks. This ends them: they dump their stacks on SIGABRT."""
        ranks = list(ranks)
        for rank in ranks:
            self._children[rank].signal(signal.SIGABRT)
            self._children[rank].signal(signal.SIGCONT)
        for rank in ranks:
            self._watchers[rank].join(self.limits.dump)
        return {rank: self._files[rank].stack() or "(no stack: it did not end on SIGABRT)" for rank in ranks}

    def show_output(self) -> None:
        """Print the output of the ranks in rank order, each line with its rank."""
        for rank, files in enumerate(self._files):
            for line in files.printed().splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="torchdist_ref-")
        self._files = [RankFiles() for _ in range(self.program.world_size)]
        # Loaded with the first group otherwise, by each rank for itself: 25 ms of its processor.
        importlib.import_module("torchdist_ref.backends.ref")
        sys.stdout.flush()
        sys.stderr.flush()
        start = self._spawn if accelerators.is_initialized() else self._fork
        with processes.deferred_interrupts():
            for rank in range(self.program.world_size):
                self._children.append(start(rank))
            # A rank may interrupt this process at once; a thread that has not started cannot be joined.
            self._watchers = [threading.Thread(target=self._watch, args=(rank,)) for rank in range(len(self._children))]
            for watcher in self._watchers:
                watcher.start()

    def _fork(self, rank: int) -> processes.Child:
        return processes.fork(functools.partial(run_child, rank, self.program, self._store, self._files[rank]))

    def _spawn(self, rank: int) -> processes.Child:
        path = os.path.join(self._folder, f"rank{rank}")
        SpawnedRank(rank, self.program, self._store).write(path)
        code = f"import sys; sys.path[:] = {sys.path!r}\nfrom torchdist_ref.testing.process_ranks import run_spawned\n"
        descriptors = self._files[rank].descriptors
        command = [sys.executable, "-c", f"{code}run_spawned({path!r}, {descriptors})"]
        return processes.spawn(command, pass_fds=descriptors, env={"OMP_NUM_THREADS": "1", **os.environ})

    @property
    def _store(self) -> Callable[[], Store]:
        return functools.partial(FileStore, os.path.join(self._folder, "store"), self.program.world_size)

    def _watch(self, rank: int) -> None:
        status = self._children[rank].wait()
        assert status is not None
        files = self._files[rank]
        outcome = files.outcome(rank) if status == 0 else None
        self.outcomes.put(outcome or Outcome(rank, died=_describe_death(status, files.stack())))

    def _clean_up(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)
        for watcher in self._watchers:
            watcher.join()
        for child in self._children:
            child.reap()
        for files in self._files:
            files.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe_death(status: int, stack: str) -> str:
    return f"{processes.describe_exit(status)}{', at:' if stack else ''}\n{stack}".rstrip()


class RankFiles:
    """Three unnamed files that parent and child share: the outcome, the output, and the stack after a fatal signal.

    Files have two advantages over pipes. The parent need not read while the child runs, so a large result cannot block
    the child; and a grandchild that keeps them open cannot block the parent.
    """

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        files = [os.fdopen(each, "w+b") for each in descriptors] or [tempfile.TemporaryFile() for _ in range(3)]
        self.result, self.output, self.dump = files

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the files, with which a process that inherits them opens them again."""
        return tuple(file.fileno() for file in (self.result, self.output, self.dump))

    def outcome(self, rank: int) -> Outcome | None:
        """Read the outcome of the rank; None if it has not written one."""
        data = _content(self.result)
        try:
            return pickle.loads(data) if data else None
        except Exception as error:
            return Outcome(rank, error=RemoteError(f"the result of the rank cannot be unpickled here: {error!r}"))

    def printed(self) -> str:
        """Read the standard output and error of the rank."""
        return _content(self.output).decode(errors="replace")

    def stack(self) -> str:
        """Read the stack that a fatal signal dumped, without the text around it."""
        text = _content(self.dump).decode(errors="replace").partition("Extension modules:")[0]
        return "\n".join(_user_part(thread) for thread in text.split("\n\n") if "File " in thread)

    def close(self) -> None:
        """Close the files."""
        for file in (self.result, self.output, self.dump):
            file.close()


def _user_part(thread: str) -> str:
    # The frames below the call of the user's function show only how this process was started.
    return thread.partition(f'  File "{outcomes.__file__}"')[0].strip()


def _content(file: Any) -> bytes:
    # Positioned reads: the offset is shared with the child, which may still be writing.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


@dataclass(frozen=True)
class SpawnedRank:
    """A rank in a file, for a process that is not a fork of this one.

    Attributes:
        rank: Rank.
        program: Its program.
        store: Function that connects to the store.
    """

    rank: int
    program: RankProgram
    store: Callable[[], Store]

    def write(self, path: str) -> None:
        """Write the rank, and what its process needs before that can be read: the main module, simulated devices.

        Raises:
            ArgumentError: The program cannot be pickled.
        """
        try:
            packed = ForkingPickler.dumps(self)
        except Exception as error:
            expected = "a function at the top level of a module, with arguments that can be pickled"
            hint = f"The ranks are new processes, since no fork survives the accelerator that this one uses: {error}."
            raise ArgumentError(explain("testing.run", "fn", expected, self.program.fn, hint=hint)) from error
        simulated = sys.modules.get("torchdist_ref.testing.simulated_device")
        devices = getattr(simulated, "installed", {})
        preparation = spawn.get_preparation_data(f"rank {self.rank}")
        # The key of `multiprocessing`, which must not be written to a file.
        del preparation["authkey"]
        with open(path, "wb") as file:
            pickle.dump((preparation, devices, bytes(packed)), file)


def run_spawned(path: str, descriptors: Sequence[int]) -> NoReturn:
    """Run one rank in a new process and exit; see `SpawnedRank.write` and `run_child`."""
    with open(path, "rb") as file:
        preparation, devices, packed = pickle.load(file)
    if devices:
        importlib.import_module("torchdist_ref.testing.simulated_device").install(**devices)
    spawn.prepare(preparation)
    spawned: SpawnedRank = pickle.loads(packed)
    run_child(spawned.rank, spawned.program, spawned.store, RankFiles(descriptors))


def run_child(rank: int, program: RankProgram, store: Callable[[], Store], files: RankFiles) -> NoReturn:
    """Run one rank in a child process and exit.

    A forked child is a copy of a process in the middle of another task, a test run for example. It must not return
    there, print there, or wait for threads that were not copied. So it leaves through ``os._exit``.

    Args:
        rank: Rank.
        program: Program of the rank.
        store: Function that connects to the store.
        files: Files shared with the parent.
    """
    status = 1
    try:
        _set_up_child(files)
        outcome = program(rank, store)
        # Nothing is gained by a collection now, and torch's reducer may hang in one: it joins Gloo's threads while it
        # holds the interpreter lock, for which a thread that releases a tensor waits.
        gc.disable()
        files.result.write(_pack(outcome))
        files.result.flush()
        status = 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _set_up_child(files: RankFiles) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(files.dump, all_threads=True)
    processes.redirect_output(files.output.fileno())
    if groups.is_initialized():
        # The caller of `run` is a rank itself.
        groups.destroy_process_group()
    # OpenMP's threads do not survive a fork: a second thread would be waited for without end.
    torch.set_num_threads(1)


def _pack(outcome: Outcome) -> bytes:
    if outcome.error is None:
        try:
            return pickle.dumps(outcome)
        except Exception as error:
            outcome = replace(outcome, value=None, error=_unpicklable(outcome.value, error))
    assert outcome.error is not None
    return pickle.dumps(replace(outcome, error=_picklable(outcome.rank, outcome.error)))


def _unpicklable(value: Any, error: Exception) -> RemoteError:
    return RemoteError(
        f"the function returned a {type(value).__name__} that cannot be sent from the rank's process: {error}. "
        "Return tensors, numbers, strings or lists of them, or run with ranks='threads'."
    )


def _picklable(rank: int, error: BaseException) -> BaseException:
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list(outcomes.user_frames(trace.stack))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RemoteError(message_of(error))
    # Frames cannot be pickled, so the traceback travels as text.
    add_note(error, f"\nOn rank {rank}:\n{''.join(trace.format())}")
    return error
