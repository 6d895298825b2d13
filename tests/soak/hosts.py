"""Let every scenario of `tests.elastic.scenarios` happen many times to a job on three hosts.

The workers that remain must be back at work within two seconds, with the right ranks and restart count. A run is one
event and, where a host was lost, its return. Ten runs of a scenario happen to one job, unless one fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.elastic.scenarios import SCENARIOS, ThreeHosts, three_hosts
from tests.soak.proofs import Limits, Outcome
from torchdist_ref.testing import namespaces

RUNS_IN_A_ROW = 10


def prove(limits: Limits, names: Sequence[str] = tuple(SCENARIOS)) -> Outcome:
    """Run the scenarios one after another, each as often in a row as `RUNS_IN_A_ROW` says."""
    outcome, job, former = Outcome(), None, ""
    with namespaces.hosts(3) as hosts, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for seed, _ in limits.seeds():
            name = names[seed // RUNS_IN_A_ROW % len(names)]
            if job is None or name != former:
                stack.close()
                folder_of_job = Path(folder, str(seed))
                folder_of_job.mkdir()
                job, former = stack.enter_context(three_hosts(folder_of_job, hosts)), name
            job = _run(job, name, seed, outcome)
    return outcome


def _run(job: ThreeHosts, name: str, seed: int, outcome: Outcome) -> ThreeHosts | None:
    """Run a scenario once; return the job, or None if it cannot be used any more."""
    outcome.done += 1
    try:
        SCENARIOS[name](job)
        outcome.counts[name] += 1
        return job
    except AssertionError as error:
        outcome.fail("\n  ".join([f"seed {seed} ({name}): {error}", *job.agents.lines[-20:]]))
        return None
    finally:
        longest = f"{name}: longest milliseconds"
        outcome.counts[longest] = max(outcome.counts[longest], *(round(each * 1e3) for each in job.seconds))
