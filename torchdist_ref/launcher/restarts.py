"""Restarts of a job on one host: when a rank fails, all ranks start again while restarts are left.

A single restarted rank would meet the others in the middle of a collective. So all are stopped, and all start again
with an empty store. State that they have not saved is lost. For several hosts, `elastic.roster` decides about restarts.
"""

from __future__ import annotations

from collections.abc import Callable

from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome
from torchdist_ref.launcher.environment import job_store
from torchdist_ref.membership.trust import new_secret


def run_with_restarts(
    run: Callable[[Assignment], AttemptOutcome],
    ranks: int,
    max_restarts: int,
    host: str,
    port: int,
    log: Callable[[str], None],
) -> AttemptOutcome:
    """Run all ranks, again and again while one fails and restarts are left.

    Args:
        run: Function that runs one attempt, and returns when no worker is left.
        ranks: Number of ranks.
        max_restarts: Largest number of restarts.
        host: Address of this host that the ranks use.
        port: Port of the ranks' store; 0 selects a free one for each attempt.
        log: Function that receives a line about each restart.

    Returns:
        The outcome of the last attempt.
    """
    for restarts in range(max_restarts + 1):
        if restarts:
            log(f"restarting all ranks ({restarts} of {max_restarts})")
        with job_store(port, host) as chosen:
            assignment = Assignment(range(ranks), ranks, host, chosen, restart_count=restarts, secret=new_secret())
            outcome = run(assignment)
        # A signal to the launcher ends the job.
        if outcome.first_failure is None:
            break
    return outcome
