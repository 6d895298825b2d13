"""Forked ranks of which one fails: the error that each survivor raises, and the signal that ends one, if any.

`torchdist_ref.testing.run` would report the failure of the culprit; these tests are about the others, under torch's own
modules, whose C++ may crash.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.process_ends import all_ended

WORLD, CULPRIT = 3, 1
SURVIVORS = [rank for rank in range(WORLD) if rank != CULPRIT]
_ENDED_IN_ORDER = 9


@dataclass(frozen=True)
class Raised:
    """Error that a survivor raised."""

    kind: str
    text: str
    trace: str


def errors_of_survivors(program: Callable[[int], object], timeout: float = 40.0) -> dict[int, Raised]:
    """Run a program as each rank of a forked world, and return the error that it raises on each survivor.

    The culprit ends by its error. A survivor that has answered stays until all have, so that none is taken for dead.

    Args:
        program: Called with the rank; ends by an error on the survivors.
        timeout: Seconds in which all survivors have to answer.
    """
    answers, pids = {}, {}
    release, released = os.pipe()
    for rank in range(WORLD):
        reader, writer = os.pipe()
        pids[rank] = os.fork()
        if pids[rank] == 0:
            os.close(released)
            # A group of torch, garbage of this process, waits for its threads when it is collected: here for ever.
            gc.freeze()
            faulthandler.dump_traceback_later(timeout, exit=False)
            _run_rank(program, rank, writer, release)
        os.close(writer)
        answers[rank] = reader
    # Each survivor prints its stack at the time-out, before this reads no further.
    deadline = time.monotonic() + timeout + 1
    texts = {rank: _read(answers[rank], deadline) for rank in SURVIVORS}
    os.close(released)
    ended = {rank: all_ended([pids[rank]]) for rank in SURVIVORS}
    for pid in pids.values():
        # The culprit may be stopped.
        os.kill(pid, signal.SIGKILL)
    codes = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in pids.items()}
    for descriptor in (release, *answers.values()):
        os.close(descriptor)
    assert all(texts.values()), f"survivors that did not answer: {[rank for rank in texts if not texts[rank]]}"
    assert all(ended.values()), f"survivors that did not end: {[rank for rank in ended if not ended[rank]]}"
    found = {rank: codes[rank] for rank in SURVIVORS}
    assert found == dict.fromkeys(SURVIVORS, _ENDED_IN_ORDER), "a negative code is the signal that ended the rank"
    return {rank: Raised(*json.loads(text)) for rank, text in texts.items()}


def _run_rank(program: Callable[[int], object], rank: int, answer: int, release: int) -> None:
    found = ["", "no error", ""]
    try:
        # OpenMP's threads do not survive a fork.
        torch.set_num_threads(1)
        program(rank)
    except BaseException as error:
        found = [type(error).__name__, str(error), traceback.format_exc()]
    finally:
        with os.fdopen(answer, "w") as pipe:
            json.dump(found, pipe)
        if rank != CULPRIT:
            os.read(release, 1)
        os._exit(_ENDED_IN_ORDER)


def _read(reader: int, deadline: float) -> str:
    """Return what arrives on a pipe until its writer closes it or ends."""
    parts = []
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()
