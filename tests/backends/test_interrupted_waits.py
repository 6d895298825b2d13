"""Ctrl-C during a wait for a future: the wait raises at once, and the call continues."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.testing import fill, run
from torchdist_ref.work import Work


def interrupted(rank: int, path: str, chained: bool) -> tuple[float, list[float]]:
    """Rank 0 waits for a call that rank 1 makes only after the Ctrl-C."""
    store, tensor, hit = dist.FileStore(path, 2), fill(rank, (3,)), [time.monotonic()]
    if rank == 1:
        store.wait(["interrupted"])
        dist.all_reduce(tensor)
        return 0.0, tensor.tolist()

    def interrupt() -> None:
        hit.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future()
    if chained:
        future = future.then(lambda done: done.wait())
    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    seconds = time.monotonic() - hit[-1]
    store.set("interrupted", "")
    return seconds, future.wait()[0].tolist()


@pytest.mark.parametrize("chained", [False, True], ids=["of the call", "of a callback"])
def test_ctrl_c_interrupts_a_wait_for_a_future(chained: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    (seconds, first), (_, second) = run(interrupted, 2, path, chained, ranks="processes", timeout=10.0)
    assert first == second == (fill(0, (3,)) + fill(1, (3,))).tolist()
    # The goal is 0.1 s; the rest is for a machine with other work.
    assert seconds < 0.1 + 0.4


def test_a_future_waited_for_by_several_threads_wakes_all_of_them() -> None:
    work = Work("all_reduce", [torch.ones(2)])
    future, values = work.get_future(), []
    threads = [threading.Thread(target=lambda: values.append(future.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    work.finish()
    for thread in threads:
        thread.join(10)
    assert [value[0].tolist() for value in values] == [[1.0, 1.0]] * 5


def test_a_future_raises_what_the_call_failed_with() -> None:
    work = Work("all_reduce", [])
    future = work.get_future()
    threading.Timer(0.01, lambda: work.fail(ValueError("of another shape"))).start()
    with pytest.raises(ValueError, match="of another shape"):
        future.wait()
