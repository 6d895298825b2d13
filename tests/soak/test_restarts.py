"""The harness of restarts counts what ranks note; one job is restarted under each launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import restarted, restarts
from tests.soak.proofs import Limits


def test_each_end_meets_each_place_and_each_rank() -> None:
    for world in (2, 3, 4):
        plans = {(restarted.PLANS[n % 9], restarted.culprit(n, world)) for n in range(9 * world)}
        assert len({rank for _, rank in plans}) == world and len({plan for plan, _ in plans}) == 9


def test_notes_are_counted(tmp_path: Path) -> None:
    for attempt, rank in [(0, 0), (0, 1), (1, 1), (1, 0), (1, 0)]:
        restarted.note(tmp_path, "starts", attempt, rank)
    restarted.note(tmp_path, "failures", 0, 0, "kill")
    restarted.note(tmp_path, "survivors", 0, 1, "named", "RankDiedError", "rank 0 died\nat once")
    restarted.note(tmp_path, "stale", 1, 0, [0, 1])
    restarted.note(tmp_path, "lost", 1, 0, "not-named", "DistError", "gone")
    (tmp_path / "errors").write_text("torchdist_ref.launch: rank 0 (process 7) was killed\n")
    found = restarts.count(tmp_path, 2, 1)
    assert (found["restarts"], found["done"], found["repeated"], found["stale"]) == (1, False, 1, 1)
    assert (found["survivors"], found["survivors that name the culprit"], found["launcher named"]) == (1, 1, 1)
    assert len(found["lost"]) == 1 and "gone" in found["lost"][0]


def test_a_proof_goes_through_all_launchers_and_counts_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def run(launcher: str, backend: str, world: int, restarted: int, seconds: float) -> dict[str, object]:
        jobs.append((launcher, backend))
        job = dict.fromkeys(("survivors", "survivors that name the culprit", "stale", "repeated", "launcher named"), 1)
        return job | {"launcher": launcher, "backend": backend, "wanted": 9, "restarts": 8, "done": False}

    monkeypatch.setattr(restarts, "run", run)
    outcome = restarts.prove(Limits(135))
    assert len(set(jobs)) == len(jobs) == 15 and (outcome.done, outcome.failed) == (120, 60)
    assert outcome.counts["two agents, gloo"] == 8 and outcome.counts["survivors"] == 15


@pytest.mark.long
@pytest.mark.parametrize("launcher", restarts.LAUNCHERS)
@pytest.mark.parametrize("backend", restarts.BACKENDS)
def test_no_attempt_reads_from_an_earlier_one(launcher: str, backend: str) -> None:
    """Takes half a minute: each attempt starts processes that import torch."""
    found = restarts.run(launcher, backend, 2, 3, 110)
    assert found["done"] and found["restarts"] == 3 and not found["stale"] and not found["lost"], found
