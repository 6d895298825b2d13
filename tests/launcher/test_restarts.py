"""Restarts on one host: how often, with which store and secret, and what is not restarted. No worker is started."""

from __future__ import annotations

import socket

import pytest

from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome, Exit
from torchdist_ref.launcher.restarts import run_with_restarts

FIRST = Exit(1, 1, 4711, 4, "")
FAILURE, SUCCESS = AttemptOutcome(4, (FIRST,), FIRST), AttemptOutcome(0, ())
SIGNAL = AttemptOutcome(143, (FIRST,), signal=15)


@pytest.mark.parametrize(
    ("outcomes", "restarts", "attempts"),
    [
        pytest.param([SUCCESS], 3, 1, id="success"),
        pytest.param([FAILURE, FAILURE, SUCCESS], 3, 3, id="success after failures"),
        pytest.param([FAILURE] * 3, 2, 3, id="no restart is left"),
        pytest.param([FAILURE], 0, 1, id="none is allowed"),
        pytest.param([SIGNAL], 3, 1, id="a signal ends the job"),
    ],
)
def test_all_ranks_are_restarted_while_one_fails(outcomes: list[AttemptOutcome], restarts: int, attempts: int) -> None:
    seen: list[Assignment] = []
    lines: list[str] = []

    def run(assignment: Assignment) -> AttemptOutcome:
        # The store of the attempt is there before its workers.
        socket.create_connection((assignment.master_addr, assignment.master_port), 10).close()
        seen.append(assignment)
        return outcomes[len(seen) - 1]

    assert run_with_restarts(run, 3, restarts, "127.0.0.1", 0, lines.append) is outcomes[-1]
    assert [each.restart_count for each in seen] == list(range(attempts))
    assert lines == [f"restarting all ranks ({number} of {restarts})" for number in range(1, attempts)]
    assert all(([*each.global_ranks], each.world_size) == ([0, 1, 2], 3) for each in seen)
    assert len({each.secret for each in seen}) == attempts
    for each in seen:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((each.master_addr, each.master_port), 10)
