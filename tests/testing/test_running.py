"""`testing.run`: results of the ranks, and errors when one of them fails, dies or hangs.

A fixture of tests/conftest.py checks that no test leaves a process, thread or file behind.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref.groups as dist
from tests.process_ends import all_ended
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, GroupAbortedError, MismatchError, RankDiedError
from torchdist_ref.ranks.outcomes import Outcome, RankProgram, RunLimits, values_or_error
from torchdist_ref.testing import RankError, RankTimeoutError, RemoteError, fill, run
from torchdist_ref.testing.process_ranks import ProcessRanks
from torchdist_ref.testing.running import ThreadRanks, supervise
from torchdist_ref.timeouts import Clock

both = pytest.mark.parametrize("ranks", ["threads", "processes"])


@both
def test_results_in_rank_order(ranks: str) -> None:
    local = [7]
    assert run(lambda rank, a, b: (rank**2, a, b, local), 3, "x", None, ranks=ranks, init=False) == [
        (rank**2, "x", None, local) for rank in range(3)
    ]


@both
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_each_rank_has_an_initialized_group(ranks: str, backend: str) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        tensor = fill(rank, (5,), torch.int64)
        dist.all_reduce(tensor)
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), tensor.tolist()

    total = sum(fill(rank, (5,), torch.int64) for rank in range(3))
    assert isinstance(total, torch.Tensor)
    assert run(program, 3, backend=backend, ranks=ranks) == [(rank, 3, backend, total.tolist()) for rank in range(3)]
    assert not dist.is_initialized()


@both
def test_without_init_there_is_no_group(ranks: str) -> None:
    assert run(lambda rank: dist.is_initialized(), 2, ranks=ranks, init=False) == [False, False]


@both
def test_tensors_as_results(ranks: str) -> None:
    for rank, tensor in enumerate(run(lambda rank: fill(rank, (300, 300)), 2, ranks=ranks, init=False)):
        assert torch.equal(tensor, fill(rank, (300, 300)))


def test_processes_have_their_own_memory_and_one_thread() -> None:
    seen: list[int] = []

    def program(rank: int) -> tuple[int, int, int]:
        seen.append(rank)
        return os.getpid(), torch.get_num_threads(), len(seen)

    results = run(program, 2, ranks="processes", init=False)
    assert len({pid for pid, _, _ in results} | {os.getpid()}) == 3
    assert [rest for _, *rest in results] == [[1, 1], [1, 1]]
    assert seen == []


def supervised(fn: Callable[[int], Any], world_size: int, ranks: str = "threads", **limits: Any) -> list[Any]:
    """Run a function as `run` does with ``init=False``; ranks of a busy machine have long to end after a failure."""
    return supervise(runner(fn, world_size, ranks, **limits))


def runner(
    fn: Callable[[int], Any],
    world_size: int,
    ranks: str = "threads",
    init: bool = False,
    timeout: float = 60.0,
    **limits: Any,
) -> ThreadRanks | ProcessRanks:
    kind = ThreadRanks if ranks == "threads" else ProcessRanks
    return kind(RankProgram(fn, (), world_size, "ref", timeout, init), RunLimits(**({"grace": 30.0} | limits)))


@both
def test_a_failure_reports_its_rank_and_cause(ranks: str) -> None:
    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("boom")
        dist.barrier()

    words = r"^rank 1 of 3 failed with ValueError: boom\n  rank 0 failed.*\n  rank 2"
    with pytest.raises(RankError, match=words) as caught:
        supervise(runner(program, 3, ranks, init=True))
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    # The others were notified: their own time-out has another error.
    assert all(isinstance(caught.value.outcomes[rank].error, GroupAbortedError | RankDiedError) for rank in (0, 2))


def test_a_failure_in_a_process_includes_its_traceback() -> None:
    def program(rank: int) -> None:
        raise KeyError("lost")

    with pytest.raises(RankError) as caught:
        run(program, 1, ranks="processes", init=False)
    assert caught.value.__cause__ is not None
    [note] = caught.value.__cause__.__notes__
    assert "On rank 0:\nTraceback (most recent call last):\n" in note
    assert 'raise KeyError("lost")' in note and "process_ranks.py" not in note and "outcomes.py" not in note


def test_the_cause_is_reported_before_failures_that_follow_from_it() -> None:
    first = threading.Event()

    def program(rank: int) -> None:
        if rank == 0:
            first.wait()
            raise GroupAbortedError("rank 1 gave up")
        try:
            raise ValueError("the cause")
        finally:
            first.set()

    with pytest.raises(RankError, match="rank 1 of 2 failed with ValueError: the cause"):
        supervised(program, 2)


def test_the_signal_of_a_killed_rank_is_reported() -> None:
    def program(rank: int) -> int:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    words = r"^rank 2 of 3 was killed by SIGKILL\n  ranks 0, 1 returned\nSee: rank-died$"
    with pytest.raises(RankError, match=words) as caught:
        supervised(program, 3, "processes")
    assert caught.value.rank == 2 and caught.value.__cause__ is None


def test_a_crash_includes_its_stack() -> None:
    def crash(rank: int) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankError, match=r"killed by SIGSEGV, at:\n(.*\n)*.*test_running.py.* in crash"):
        run(crash, 1, ranks="processes", init=False)


def test_an_exit_without_a_result_is_reported() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 exited with code 5"):
        run(lambda rank: os._exit(5), 1, ranks="processes", init=False)


class Gate(Clock):
    """Clock that shows 0 at first, and then a time beyond every deadline: as soon as the ranks are ready."""

    def __init__(self, *ready: Callable[[], object]) -> None:
        self._ready = iter(ready)
        self._begun = False

    def now(self) -> float:
        if not self._begun:
            self._begun = True
            return 0.0
        for wait in self._ready:
            assert wait()
        return 1e9


class Arrivals(queue.SimpleQueue[Outcome]):
    """Queue of outcomes that announces the first one."""

    def __init__(self) -> None:
        self.some = threading.Event()

    def put(self, outcome: Outcome, block: bool = True, timeout: float | None = None) -> None:
        super().put(outcome)
        self.some.set()


def timed_out(ranks: str, fn: Callable[[int], Any], world_size: int, ready: Callable[[], object], **limits: Any) -> Any:
    """Run a function whose time is over once `ready` has returned and a rank has ended; return the error."""
    arrivals = Arrivals()
    clock = Gate(ready, lambda: arrivals.some.wait(30))
    run = runner(fn, world_size, ranks, clock=clock, **limits)
    run.outcomes = arrivals
    with pytest.raises(RankTimeoutError) as caught:
        supervise(run)
    return caught.value


def test_timeout_reports_hanging_processes_and_their_stacks() -> None:
    reader, writer = os.pipe()

    def wait_for_ever(rank: int) -> int:
        os.write(writer, b".")
        while rank != 0:
            signal.pause()
        return rank

    def ready() -> bool:
        return all(select.select([reader], [], [], 30)[0] and os.read(reader, 1) for _ in range(3))

    error = timed_out("processes", wait_for_ever, 3, ready, dump=30.0)
    os.close(reader)
    os.close(writer)
    assert str(error).startswith("ranks 1, 2 of 3 did not finish within 60 s\n  rank 0 returned\n")
    # Once if both have come to the same line, else twice.
    assert str(error).count("in wait_for_ever") in (1, 2)
    assert isinstance(error, TimeoutError) and error.rank == 1


def test_timeout_reports_hanging_threads_and_their_stacks() -> None:
    begun, gate = threading.Event(), threading.Event()

    def wait_for_ever(rank: int) -> int:
        return rank if rank == 0 else begun.set() or gate.wait()

    error = timed_out("threads", wait_for_ever, 2, lambda: begun.wait(30), join=0.1)
    assert re.match(r"rank 1 of 2 did not finish within 60 s\n(.*\n)*.*gate.wait\(\)", str(error))
    gate.set()


def test_ranks_of_which_the_same_is_to_be_said_share_an_entry() -> None:
    ended = {rank: Outcome(rank, rank * rank) for rank in (1, 4, 5)}
    with pytest.raises(RankTimeoutError) as caught:
        values_or_error(ended, {6: "in b", 3: "in a", 0: "in a", 2: "in b", 7: "in c"}, 8, 60.0)
    said = (
        "ranks 0, 2, 3, 6, 7 of 8 did not finish within 60 s",
        "  ranks 0, 3 were still running, at:\n    in a",
        "  ranks 1, 4, 5 returned",
        "  ranks 2, 6 were still running, at:\n    in b",
        "  rank 7 was still running, at:\n    in c",
    )
    assert str(caught.value).startswith("\n".join(said))


STUCK = """
import time, torch
import torchdist_ref as dist
from torchdist_ref.testing import RankError, run

def program(rank):
    if rank == 3:
        time.sleep(4)
    else:
        dist.all_reduce(torch.ones(3))

try:
    run(program, 96, timeout=2)
except RankError as error:
    print(type(error).__name__, "rank 3" in str(error) or "still running" in str(error))
"""


@pytest.mark.long
def test_the_interpreter_ends_cleanly_after_many_threads_were_given_up() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["RankTimeoutError", "True"], "")


def test_timeout_aborts_the_group_of_hanging_threads() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def program(rank: int) -> None:
        try:
            if rank == 0:
                begun.set()
                dist.recv(torch.zeros(1), src=1)
            else:
                stopped.wait()
        finally:
            stopped.set()

    with pytest.raises(RankError):
        supervise(runner(program, 2, init=True, clock=Gate(lambda: begun.wait(30))))
    # Long before the receive's own time-out.
    assert stopped.wait(20)


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(
        RankError, match="rank 0 of 1 failed with RemoteError: the function returned a function that"
    ) as caught:
        run(lambda rank: lambda: rank, 1, ranks="processes", init=False)
    assert entries(caught.value) == ["object-cannot-be-pickled"] * 2


def entries(error: BaseException) -> list[str]:
    """Return the entries of the error index that an error and its cause lead to."""
    notes = [getattr(each, "__notes__", [""]) for each in (error, error.__cause__)]
    assert all(sum(text.startswith("See: ") for text in texts) == 1 for texts in notes), notes
    return [texts[-1].removeprefix("See: ") for texts in notes]


def test_an_exception_that_cannot_be_pickled_becomes_text() -> None:
    def program(rank: int) -> None:
        class Private(Exception):
            pass

        raise Private("hidden")

    with pytest.raises(RankError, match="RemoteError: Private: hidden") as caught:
        run(program, 1, ranks="processes", init=False)
    assert isinstance(caught.value.__cause__, RemoteError)
    assert entries(caught.value) == ["function-raised"] * 2


def test_an_error_of_ours_that_cannot_be_pickled_leads_to_its_entry() -> None:
    def program(rank: int) -> None:
        error = MismatchError("all_reduce: ranks differ")
        error.call = lambda: rank  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RankError, match="RemoteError: MismatchError: all_reduce: ranks differ") as caught:
        run(program, 1, ranks="processes", init=False)
    assert entries(caught.value) == ["calls-differ"] * 2


def test_output_of_processes_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        print("python", rank)
        subprocess.run(["echo", f"child {rank}"], check=True)
        print("error", rank, file=sys.stderr)

    run(program, 2, ranks="processes", init=False)
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {word} {rank}" for rank in (0, 1) for word in ("python", "child", "error")
    ]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parent = os.getpid()

    def program(rank: int) -> None:
        if rank == 0:
            os.kill(parent, signal.SIGINT)
        while True:
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        run(program, 3, ranks="processes", init=False)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_a_rank_started_are_killed() -> None:
    def program(rank: int) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    [pid] = run(program, 1, ranks="processes", init=False)
    assert all_ended([pid])


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RankError("rank 3 failed", 3)))
    assert (str(error), error.rank) == ("rank 3 failed", 3)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"fn": 3}, ArgumentTypeError, "argument 'fn' must be callable, got 3"),
        ({"timeout": "x"}, ArgumentTypeError, "argument 'timeout' must be a number of seconds, got 'x'"),
        ({"world_size": 0}, ArgumentError, "argument 'world_size' must be a number of ranks, at least 1, got 0"),
        ({"world_size": "2"}, ArgumentError, "argument 'world_size' must be a number of ranks"),
        (
            {"ranks": "fibres"},
            ArgumentError,
            "argument 'ranks' must be 'threads', 'processes' or 'simulated', got 'fibres'",
        ),
        ({"timeout": 0}, ArgumentError, "argument 'timeout' must be a positive number of seconds, got 0"),
    ],
)
def test_wrong_arguments_are_reported(wrong: dict[str, Any], kind: type[Exception], words: str) -> None:
    right: dict[str, Any] = {"fn": int, "world_size": 1}
    with pytest.raises(kind, match=words):
        run(**(right | wrong))


class Garbage:
    """Part of a cycle, which only the collector ends; says so on a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.me, self.descriptor = self, descriptor

    def __del__(self) -> None:
        os.write(self.descriptor, b"collected")


class Large:
    """Result whose pickling creates as many objects as start a collection."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (str(len([[] for _ in range(10 * gc.get_threshold()[0])])),)


def leave_garbage(rank: int, descriptor: int) -> Large:
    gc.collect()
    Garbage(descriptor)
    return Large()


def test_garbage_of_a_rank_that_has_ended_is_not_collected() -> None:
    reader, writer = os.pipe()
    run(leave_garbage, 1, writer, ranks="processes", init=False)
    os.close(writer)
    assert os.read(reader, 100) == b""
    os.close(reader)
