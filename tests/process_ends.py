"""Ends of processes: those of others are waited for, and a forked child answers before its own."""

from __future__ import annotations

import contextlib
import gc
import os
import select
from collections.abc import Callable, Iterable

from torchdist_ref.processes.linux_calls import pidfd_open


def all_ended(pids: Iterable[int]) -> bool:
    """Return whether all processes end within 30 s. A zombie has ended: its new parent may reap it much later."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = pidfd_open(pid)
            ended, _, _ = select.select([descriptor], [], [], 30)
            os.close(descriptor)
            if not ended:
                return False
    return True


def answer_of_child(answer: Callable[[], str]) -> str:
    """Return what a function returns in a forked child, or the error that it raises there, as text.

    The child ends without what Python does at an exit, as a worker of `multiprocessing` does.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # As in `tests.backends.failing_ranks`.
        gc.freeze()
        try:
            os.write(writer, answer().encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
