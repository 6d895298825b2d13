"""The life of a forked rank, and the papers that it leaves to its parent.

A forked child is a copy of a process that was in the middle of something, a test run perhaps: it must not return
there, must not print there, and must not wait for threads that were not copied. So it does its one thing and leaves
through ``os._exit``. Whom to fork, and when, is in `process_ranks`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from torchdist_ref.launcher.lifelines import die_with_parent
from torchdist_ref.stores import Store
from torchdist_ref.testing import program
from torchdist_ref.testing.outcomes import Outcome, RemoteError
from torchdist_ref.testing.program import Program


class Papers:
    """Three unnamed files that parent and child share: the outcome, the output, and the stack at a violent end.

    Files and not pipes: nobody has to read while the child lives, so a large result cannot block it, and a
    grandchild that keeps them open cannot block the parent.
    """

    def __init__(self) -> None:
        self.result = tempfile.TemporaryFile()
        self.output = tempfile.TemporaryFile()
        self.dump = tempfile.TemporaryFile()

    def outcome(self, rank: int) -> Outcome | None:
        """Read how the rank ended, if it came to saying so."""
        data = _content(self.result)
        try:
            return pickle.loads(data) if data else None
        except Exception as error:
            return Outcome(rank, error=RemoteError(f"what the rank sent back cannot be read here: {error!r}"))

    def printed(self) -> str:
        """Read what the rank wrote to its standard output and error."""
        return _content(self.output).decode(errors="replace")

    def stack(self) -> str:
        """Read the stack that a fatal signal left, without the words around it."""
        text = _content(self.dump).decode(errors="replace").partition("Extension modules:")[0]
        return "\n".join(_upper_frames(thread) for thread in text.split("\n\n") if "File " in thread)

    def close(self) -> None:
        """Drop the files."""
        for file in (self.result, self.output, self.dump):
            file.close()


def _upper_frames(thread: str) -> str:
    # Below our own call of the user's function lies only how this process came about.
    return thread.partition(f'  File "{program.__file__}"')[0].strip()


def _content(file: Any) -> bytes:
    # Positioned reads: the offset belongs to the child, which may still be writing.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def be_child(rank: int, task: Program, store: Callable[[], Store], papers: Papers, parent: int) -> NoReturn:
    """Run one rank and end the process."""
    status = 1
    # What the parent left for its collector is not this process's to end: backends wait for threads that are not here.
    gc.freeze()
    try:
        _settle(papers, parent)
        papers.result.write(_pack(task(rank, store)))
        papers.result.flush()
        status = 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _settle(papers: Papers, parent: int) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(papers.dump, all_threads=True)
    for descriptor in (1, 2):
        os.dup2(papers.output.fileno(), descriptor)
    # The parent's sys.stdout may be anything, pytest's or Jupyter's for instance.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    # OpenMP's threads do not survive a fork: a second one would be waited for for ever.
    torch.set_num_threads(1)


def _pack(outcome: Outcome) -> bytes:
    if outcome.error is None:
        try:
            return pickle.dumps(outcome)
        except Exception as error:
            outcome = replace(outcome, value=None, error=_unsendable(outcome.value, error))
    assert outcome.error is not None
    return pickle.dumps(replace(outcome, error=_sendable(outcome.rank, outcome.error)))


def _unsendable(value: Any, error: Exception) -> RemoteError:
    return RemoteError(
        f"the function returned a {type(value).__name__} that cannot be sent from the rank's process: {error}. "
        "Return tensors, numbers, strings or lists of them, or run with ranks='threads'."
    )


def _sendable(rank: int, error: BaseException) -> BaseException:
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list(_user_frames(trace.stack))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RemoteError(f"{type(error).__name__}: {error}")
    # The traceback itself stays behind with its frames; this is what it looked like.
    error.add_note(f"\nOn rank {rank}:\n{''.join(trace.format())}")
    return error


def _user_frames(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    ours = [place for place, frame in enumerate(frames) if frame.filename == program.__file__]
    return frames[ours[0] + 1 if ours else 0 :]
