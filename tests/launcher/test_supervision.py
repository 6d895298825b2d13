"""Decisions about workers: events and the present time go in, actions come out. No process is started."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from torchdist_ref.launcher.supervision import (
    CAUSE_SECONDS,
    DRAIN_SECONDS,
    DUMP_SECONDS,
    Act,
    Supervision,
    WorkerState,
)
from torchdist_ref.processes.failure_record import FailureRecord

GRACE = 30.0
BOOM = FailureRecord("ValueError: boom", 5_000)
LATER = FailureRecord("KeyError: 'later'", 7_000)


class Job:
    """Supervision of workers with ranks from 4 on, and the actions so far as texts."""

    def __init__(self, workers: int = 3, **settings: Any) -> None:
        self.decisions = Supervision(GRACE)
        states = [WorkerState(4 + index, 1000 + index**2, **settings) for index in range(workers)]
        self.workers = self.decisions.workers = states

    def end(self, now: float, ends: dict[int, int]) -> None:
        for index, status in ends.items():
            self.workers[index].status = status
        self.decisions.ended(now, [self.workers[index] for index in ends])

    def actions(self) -> list[str]:
        """Return the actions since the last call."""
        found, self.decisions.actions = self.decisions.actions, []
        return [_text(action.act, [one.rank for one in action.workers], action.signum, action.text) for action in found]


def _text(act: Act, ranks: Sequence[int], signum: int, text: str) -> str:
    if act is Act.SIGNAL:
        return f"{signal.Signals(signum).name} to {ranks}"
    return f"dump {ranks}" if act is Act.DUMP else text or act.name.lower()


def test_workers_that_succeed_end_the_attempt_with_0() -> None:
    job = Job()
    job.end(1.0, {0: 0, 2: 0})
    assert job.decisions.deadline is None
    job.end(2.5, {1: 0})
    assert (job.decisions.code, job.decisions.first_failure) == (None, None)
    assert job.decisions.deadline == 2.5 + DRAIN_SECONDS and job.actions() == []
    # Processes that the workers started hold their output open.
    job.decisions.tick(2.5 + DRAIN_SECONDS)
    assert job.actions() == ["close"] and job.decisions.deadline is None


@pytest.mark.parametrize(
    ("status", "how", "code"),
    [(7, "exited with code 7", 7), (-9, "was killed by SIGKILL", 137), (-40, "was killed by signal 40", 168)],
)
def test_a_failure_stops_the_others_and_then_kills_them(status: int, how: str, code: int) -> None:
    job = Job()
    job.end(10.0, {1: status})
    line = f"rank 5 (process 1001) {how}; stopping ranks 4, 6"
    assert job.actions() == ["forward", line, "SIGTERM to [4, 6]"]
    job.end(12.0, {0: 0})
    job.decisions.tick(10.0 + GRACE - 0.25)
    assert job.actions() == []
    job.decisions.tick(10.0 + GRACE)
    assert job.actions() == ["rank 6 did not stop within 30 s: killing", "SIGKILL to [6]"]
    job.end(41.0, {2: -9})
    assert (job.decisions.code, job.decisions.first_failure, job.actions()) == (code, job.workers[1], [])


KNOWN: dict[str, tuple[dict[int, int], dict[int, FailureRecord], set[int], int | None]] = {
    # Ends, records, workers that name another rank as the cause, and who is blamed at once; None to wait.
    "one exit": ({1: 3}, {}, set(), 1),
    "a death beside an exit": ({0: 1, 2: -11}, {}, set(), 2),
    "a death beside a record": ({0: 1, 2: -9}, {0: BOOM}, set(), 2),
    "two records": ({0: 1, 1: 1}, {0: LATER, 1: BOOM}, set(), 1),
    "a record beside an exit": ({0: 3, 1: 1}, {1: BOOM}, set(), 1),
    "a consequence beside its cause": ({0: 1, 1: 3}, {}, {0}, 1),
    "a consequence of a worker that runs": ({0: 1}, {}, {0}, None),
    "an exit before one that has recorded, and prints": ({0: 3}, {2: BOOM}, set(), None),
    "a death before one that has recorded, and prints": ({0: -9}, {2: BOOM}, set(), 0),
    "a consequence before one that has recorded": ({0: 1}, {2: BOOM}, {0}, None),
    "all are consequences": ({0: 1, 1: 1, 2: 1}, {}, {0, 1, 2}, 0),
}


@pytest.mark.parametrize("known", KNOWN)
def test_who_is_blamed_at_once(known: str) -> None:
    ends, records, consequences, blamed = KNOWN[known]
    job = Job()
    for index, record in records.items():
        job.workers[index].record = record
    for index in consequences:
        job.workers[index].is_consequence = True
    job.end(3.0, ends)
    first = job.decisions.first_failure
    assert first is (None if blamed is None else job.workers[blamed])
    assert (job.decisions.deadline == 3.0 + CAUSE_SECONDS) == (blamed is None)
    assert job.decisions.cause_is_elsewhere == (known == "all are consequences")


def test_the_cause_is_blamed_when_it_ends_after_its_consequences() -> None:
    job = Job()
    job.workers[0].is_consequence = True
    job.end(1.0, {0: 1})
    job.end(1.25, {2: 0})
    assert job.actions() == [] and job.decisions.deadline == 1.0 + CAUSE_SECONDS
    job.end(1.375, {1: 3})
    assert job.actions() == ["forward", "rank 5 (process 1001) exited with code 3"]
    assert job.decisions.code == 3 and not job.decisions.cause_is_elsewhere


def test_a_cause_that_does_not_end_is_blamed_by_its_record_and_not_stopped() -> None:
    job = Job()
    job.workers[1].record = BOOM
    job.end(1.0, {0: 1})
    job.decisions.tick(1.0 + CAUSE_SECONDS)
    line = "rank 5 (process 1001) failed with ValueError: boom; stopping rank 6"
    assert job.actions() == ["forward", line, "SIGTERM to [6]"]
    assert job.decisions.code == 1 and job.decisions.first_failure is job.workers[1]


def test_a_cause_on_another_host_leaves_the_consequence_to_blame() -> None:
    job = Job()
    job.workers[2].is_consequence = True
    job.end(1.0, {2: 6})
    job.decisions.tick(1.0 + CAUSE_SECONDS)
    assert job.actions() == [
        "forward",
        "rank 6 (process 1004) exited with code 6; stopping ranks 4, 5",
        "SIGTERM to [4, 5]",
    ]
    assert job.decisions.cause_is_elsewhere and job.decisions.code == 6


def test_survivors_have_time_to_dump_their_calls() -> None:
    job = Job(wants_dumps=True)
    job.workers[0].record = BOOM
    job.end(2.0, {1: 1})
    assert job.actions() == []
    job.decisions.tick(2.0 + CAUSE_SECONDS)
    assert job.actions()[2:] == ["dump [6]"]
    assert job.decisions.deadline == 2.0 + CAUSE_SECONDS + DUMP_SECONDS
    job.decisions.tick(2.0 + CAUSE_SECONDS + DUMP_SECONDS)
    # Rank 4, which has recorded the failure, still prints its traceback.
    assert job.actions() == ["SIGTERM to [6]"]
    assert job.decisions.deadline == 2.0 + CAUSE_SECONDS + DUMP_SECONDS + GRACE
    assert job.decisions.code == 1


def test_the_first_signal_is_forwarded_and_the_second_one_kills() -> None:
    job = Job()
    job.end(1.0, {1: 0})
    job.decisions.signalled(2.0, signal.SIGINT)
    assert job.actions() == ["got SIGINT: forwarding it to ranks 4, 6", "SIGINT to [4, 6]"]
    assert (job.decisions.signal, job.decisions.code) == (signal.SIGINT, 130)
    job.decisions.signalled(3.0, signal.SIGTERM)
    assert job.actions() == ["SIGKILL to [4, 6]"]
    job.end(3.5, {0: 3, 2: -9})
    assert (job.decisions.code, job.decisions.first_failure, job.decisions.signal) == (130, None, signal.SIGINT)


def test_a_request_to_stop_sends_the_callers_signal() -> None:
    job = Job()
    job.decisions.stop_signal = signal.SIGUSR1
    job.decisions.stop_requested(5.0)
    assert job.actions() == ["SIGUSR1 to [4, 5, 6]"] and job.decisions.deadline == 5.0 + GRACE
    job.end(5.5, {0: 40, 1: -9, 2: 0})
    assert job.decisions.stopped and (job.decisions.code, job.decisions.first_failure) == (128 + signal.SIGUSR1, None)


def test_a_request_to_stop_after_a_failure_shortens_the_grace_time() -> None:
    job = Job()
    job.end(5.0, {0: 3})
    job.decisions.grace = 2.0
    job.decisions.stop_requested(6.0)
    assert job.decisions.deadline == 8.0
    assert job.actions()[2:] == ["SIGTERM to [5, 6]"] and job.decisions.code == 3


def test_output_that_nobody_reads_ends_the_job_without_a_message() -> None:
    job = Job(2)
    job.decisions.output_closed(1.0)
    assert job.actions() == ["SIGTERM to [4, 5]"]
    assert (job.decisions.signal, job.decisions.code) == (signal.SIGPIPE, 141)
