"""Ctrl-C during a wait for a future: the wait raises at once, and the call continues."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.calls import Numbers
from torchdist_ref.testing import fill, run
from torchdist_ref.work import InterruptibleFuture, Work


def interrupted(rank: int, path: str, chained: bool) -> list[float]:
    """Rank 0 waits for a call that rank 1 makes only after the Ctrl-C."""
    store, tensor = dist.FileStore(path, 2), fill(rank, (3,))
    if rank == 1:
        store.wait(["interrupted"])
        dist.all_reduce(tensor)
        return tensor.tolist()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future()
    if chained:
        future = future.then(lambda done: done.wait())
    with pytest.raises(KeyboardInterrupt):
        # In the block: on a busy machine the signal may come before the wait.
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        future.wait()
    store.set("interrupted", "")
    return future.wait()[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("chained", [False, True], ids=["of the call", "of a callback"])
def test_ctrl_c_interrupts_a_wait_for_a_future(chained: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    first, second = run(interrupted, 2, path, chained, ranks="processes", timeout=10.0)
    assert first == second == (fill(0, (3,)) + fill(1, (3,))).tolist()


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


def press_ctrl_c(_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("method", ["then", "add_done_callback"])
def test_ctrl_c_in_a_callback_that_runs_at_once_reaches_the_program(method: str) -> None:
    """Once torch's C++, which ran the callback, logged and dropped it."""
    work = Work("all_reduce", [torch.ones(2)], scope=Numbers("a group").scope((1, 0)))
    work.finish()
    future = work.get_future()
    with pytest.raises(KeyboardInterrupt):
        getattr(future, method)(press_ctrl_c)


@pytest.mark.parametrize("done", [True, False], ids=["at once", "later"])
def test_a_future_whose_callback_ctrl_c_ended_is_done(done: bool) -> None:
    work = Work("all_reduce", [torch.ones(2)], scope=Numbers("a group").scope((1, 0)))
    if done:
        work.finish()
    future, errors = work.get_future(), []

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt("in a callback")

    def program() -> None:
        following = future.then(interrupted)
        if not done:
            work.finish()
        try:
            following.wait()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    thread.join(10)
    assert errors == ["KeyboardInterrupt('in a callback')"]


def test_a_callback_that_raises_at_once_does_not_end_the_program(caplog: pytest.LogCaptureFixture) -> None:
    work = Work("all_reduce", [torch.ones(2)], scope=Numbers("a group").scope((1, 0)))
    work.finish()
    work.get_future().add_done_callback(lambda _: 1 / 0)
    assert "ZeroDivisionError" in caplog.text


def test_a_wait_ends_even_if_its_notification_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a Ctrl-C that arrives in the function that torch calls; once the wait never ended."""
    future, values = InterruptibleFuture(), []

    def dropped(self: InterruptibleFuture, _: object) -> None:
        self.set_result(3)

    monkeypatch.setattr(torch.futures.Future, "add_done_callback", dropped)
    thread = threading.Thread(target=lambda: values.append(future.wait()), daemon=True)
    thread.start()
    thread.join(10)
    assert values == [3]


def test_a_timeout_of_another_type_is_named() -> None:
    work = Work("all_reduce", [])
    for timeout in ("1 s", [1]):
        with pytest.raises(dist.ArgumentTypeError, match="argument 'timeout' must be a timedelta, a number of seconds"):
            work.wait(timeout)  # type: ignore[arg-type]
    work.finish()
    assert work.wait(1) and work.wait(0.5) and work.wait(torch.tensor(1.0))  # type: ignore[arg-type]
