"""The rules of a job on several hosts, with a clock that the tests move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchdist_ref.elastic.roster import CAUSE_SECONDS, SETTLE_SECONDS, Decision, HostInfo, Progress, Roster, Rules

RULES = Rules("job", 2, 3, max_restarts=1, join_seconds=60.0, last_call_seconds=5.0)


def info(number: int, **settings: object) -> HostInfo:
    described = HostInfo(f"key-{number}", f"host-{number}", f"10.0.0.{number}", 7000 + number, 1 + number)
    return replace(described, **settings)  # type: ignore[arg-type]


def decide(roster: Roster, now: float) -> list[Decision]:
    roster.tick(now)
    found, roster.decisions = roster.decisions, []
    return found


def kinds(decisions: list[Decision]) -> list[str]:
    return [decision.kind for decision in decisions]


def running(count: int = 3, **settings: object) -> Roster:
    """Return a roster whose job runs on this many hosts."""
    rules = replace(RULES, max_hosts=max(3, count), **settings)  # type: ignore[arg-type]
    roster = Roster(rules, 0.0, "key-0")
    for number in range(count):
        roster.join(info(number), rules)
    assert kinds(decide(roster, 5.0))[-1] == "start"
    return roster


def all_ready(roster: Roster) -> None:
    for key in roster.seats:
        roster.ready(key, roster.progress.attempt)


def ranks(decision: Decision) -> list[str]:
    return [host["host"] for host in decision.content["hosts"]]


def test_the_largest_number_starts_at_once_and_fewer_after_the_last_call() -> None:
    roster = Roster(RULES, 0.0, "key-0")
    roster.join(info(1), RULES)
    roster.join(info(0), RULES)
    assert kinds(decide(roster, 4.9)) == ["accept", "accept"]
    [start] = decide(roster, 5.0)
    # The coordinator's host is first, since the workers' store is there.
    assert ranks(start) == ["host-0", "host-1"] and start.content["attempt"] == 1

    roster = Roster(RULES, 0.0)
    for number in (2, 0, 1):
        roster.join(info(number), RULES)
    assert ranks(decide(roster, 0.0)[-1]) == ["host-2", "host-0", "host-1"]


def test_given_node_ranks_decide_the_order() -> None:
    roster = Roster(RULES, 0.0, "key-1")
    for number, rank in ((1, 2), (2, 0), (0, 1)):
        roster.join(info(number, node_rank=rank), RULES)
    assert ranks(decide(roster, 0.0)[-1]) == ["host-2", "host-0", "host-1"]


def test_one_failure_is_one_restart_however_many_hosts_report_it() -> None:
    roster = running()
    failure = {"code": 1, "text": "rank 4 failed", "time": 2.0}
    roster.fail("key-2", 1, failure | {"code": 137, "text": "rank 1 was killed"})
    roster.fail("key-1", 1, failure)
    roster.fail("key-0", 1, failure | {"time": 1.0})
    assert decide(roster, 5.0) == []
    [stop] = decide(roster, 5.0 + SETTLE_SECONDS)
    # A signal is the cause of the others' errors, even if they are reported first.
    assert stop.kind == "stop" and stop.content["text"] == "rank 1 was killed; restarting all workers (1 of 1)"
    roster.fail("key-0", 1, failure)
    all_ready(roster)
    [start] = decide(roster, 6.0)
    assert (start.content["attempt"], start.content["restarts"]) == (2, 1)
    roster.fail("key-0", 1, failure)
    assert decide(roster, 7.0) == []
    roster.fail("key-0", 2, failure)
    roster.fail("key-1", 2, failure | {"time": 1.0, "text": "the first"})
    decide(roster, 7.0)
    [end] = decide(roster, 8.0)
    assert (end.kind, end.content["code"], end.content["text"]) == ("end", 1, "the first")


def test_a_failure_that_follows_from_another_waits_for_that_one() -> None:
    following = {"code": 1, "text": "rank 4 lost rank 1", "time": 1.0, "cause_is_elsewhere": True}
    for late, first in ((CAUSE_SECONDS - 0.1, "rank 1 raised"), (CAUSE_SECONDS, "rank 4 lost rank 1")):
        roster = running()
        roster.fail("key-2", 1, following)
        assert decide(roster, 5.0) == [] == decide(roster, 5.0 + SETTLE_SECONDS)
        stops = decide(roster, 5.0 + late)
        roster.fail("key-1", 1, {"code": 1, "text": "rank 1 raised", "time": 2.0})
        stops += decide(roster, 5.0 + late) + decide(roster, 5.0 + late + SETTLE_SECONDS)
        assert [stop.content["text"] for stop in stops] == [f"{first}; restarting all workers (1 of 1)"]


def test_no_attempt_starts_before_the_workers_of_the_last_one_have_ended() -> None:
    roster = running()
    roster.lose("key-1", "has ended")
    assert kinds(decide(roster, 6.0)) == ["stop"]
    roster.ready("key-0", 1)
    assert decide(roster, 6.5) == []
    roster.ready("key-2", 1)
    [start] = decide(roster, 6.6)
    assert ranks(start) == ["host-0", "host-2"] and start.content["restarts"] == 0


def test_hosts_that_join_together_cause_one_restart_and_the_rest_are_spares() -> None:
    rules = replace(RULES, max_hosts=4)
    roster = Roster(rules, 0.0, "key-0")
    roster.join(info(0), rules)
    roster.join(info(1), rules)
    decide(roster, 5.0)
    for number in (2, 3, 4):
        roster.join(info(number), rules)
    assert kinds(decide(roster, 5.0)) == ["accept", "accept", "accept", "note"]
    assert kinds(decide(roster, 6.0)) == ["stop"]
    all_ready(roster)
    assert ranks(decide(roster, 6.0)[0]) == ["host-0", "host-1", "host-2", "host-3"]
    # The spare takes the place of a host that ends.
    roster.lose("key-1", "has ended")
    decide(roster, 7.0)
    all_ready(roster)
    assert ranks(decide(roster, 7.0)[0]) == ["host-0", "host-2", "host-3", "host-4"]


def test_the_job_ends_when_all_hosts_have_finished() -> None:
    roster = running(2)
    roster.finish("key-1", 1)
    assert decide(roster, 6.0) == []
    roster.finish("key-0", 1)
    [end] = decide(roster, 6.0)
    assert (end.kind, end.content["code"]) == ("end", 0)


def test_a_host_that_has_finished_runs_again_if_another_one_fails() -> None:
    roster = running(2)
    roster.finish("key-1", 1)
    roster.fail("key-0", 1, {"code": 3, "text": "rank 0 failed", "time": 1.0})
    decide(roster, 5.0)
    assert kinds(decide(roster, 6.0)) == ["stop"]
    all_ready(roster)
    assert ranks(decide(roster, 6.0)[0]) == ["host-0", "host-1"]
    roster.finish("key-0", 2)
    assert decide(roster, 7.0) == []


def test_missing_hosts_are_named_every_ten_seconds_and_end_the_job_at_the_time_out() -> None:
    rules = replace(RULES, min_hosts=3)
    roster = Roster(rules, 0.0)
    roster.join(info(0, node_rank=0), rules)
    roster.join(info(1, node_rank=2), rules)
    assert kinds(decide(roster, 9.9)) == ["accept", "accept"]
    [note] = decide(roster, 10.0)
    assert note.content["text"].startswith(
        "2 of 3 hosts (--nnodes) have joined (host-0, host-1), node rank 1 did not join yet; waiting for 50 s more."
    )
    assert decide(roster, 19.9) == [] and kinds(decide(roster, 20.0)) == ["note"]
    [end] = decide(roster, 60.0)
    assert end.content["code"] == 2 and "node rank 1 did not join within 60 s" in end.content["text"]
    assert "--rdzv-endpoint" in end.content["text"]


def test_a_host_that_is_lost_while_no_worker_runs_is_named_at_once_and_at_the_time_out() -> None:
    """Once the others read of it in a restart after ten seconds, and before the first start never."""
    rules = replace(RULES, min_hosts=3)
    meeting, restart = Roster(rules, 0.0, "key-0"), running(2, max_restarts=1)
    meeting.join(info(0), rules)
    meeting.join(info(1), rules)
    restart.fail("key-0", 1, {"code": 1, "text": "rank 0 failed", "time": 1.0})
    assert kinds(decide(restart, 6.0)) == ["stop"] and kinds(decide(meeting, 1.0)) == ["accept", "accept"]
    all_ready(restart)
    for roster in (meeting, restart):
        roster.lose("key-1", "has ended")
        [note, *_] = decide(roster, 7.0)
        assert (note.kind, note.content["text"]) == ("note", "host-1 has ended")
        end = decide(roster, 66.0)[-1]
        assert "have joined (host-0; lost: host-1)" in end.content["text"] and not end.content["alone"]


def test_a_host_that_comes_again_is_not_lost() -> None:
    roster = Roster(RULES, 0.0, "key-0")
    roster.join(info(0), RULES)
    roster.join(info(1), RULES)
    roster.lose("key-1", "has ended")
    roster.join(info(1, key="another"), RULES)
    roster.lose("another", "has ended")
    roster.join(info(1, key="a third"), RULES)
    roster.lose("key-0", "has left")
    assert "have joined (host-1; lost: host-0)" in decide(roster, 60.0)[-1].content["text"]


def test_a_host_that_leaves_ends_the_job_if_too_few_remain_and_one_that_dies_is_waited_for() -> None:
    roster = running(3)
    roster.leave("key-1", "SIGTERM")
    assert kinds(decide(roster, 6.0)) == ["stop"]
    all_ready(roster)
    assert kinds(decide(roster, 6.0)) == ["start"]
    dying = running(2)
    dying.lose("key-1", "has ended")
    assert kinds(decide(dying, 6.0)) == ["stop"]
    all_ready(dying)
    assert "lost: host-1" in decide(dying, 16.0)[0].content["text"]
    dying.join(info(7), dying.rules)
    assert kinds(decide(dying, 17.0)) == ["accept", "start"]
    roster.leave("key-2", "SIGINT")
    [end] = decide(roster, 7.0)
    assert (end.kind, end.content["code"]) == ("end", 1)
    assert end.content["text"] == "host-2 has left (SIGINT), and 1 of 2 hosts (--nnodes) are too few"


@pytest.mark.parametrize(
    ("described", "rules", "text"),
    [
        (info(1, node_rank=0), RULES, "--node-rank 0 of host-1 is already used by host-0"),
        (info(1, node_rank=3), RULES, "--node-rank 3 of host-1 is not below --nnodes 3"),
        (info(1), replace(RULES, max_hosts=4), "the larger number of --nnodes is 4 on host-1 and 3 on the others"),
        (info(1), replace(RULES, run_id="other"), "--rdzv-id is other on host-1 and job on the others"),
    ],
)
def test_a_host_with_other_settings_is_refused(described: HostInfo, rules: Rules, text: str) -> None:
    roster = Roster(RULES, 0.0)
    roster.join(info(0, node_rank=0), RULES)
    roster.join(described, rules)
    refused = decide(roster, 0.0)[-1]
    assert (refused.kind, refused.key) == ("reject", "key-1") and text in refused.content["text"]
    assert list(roster.seats) == ["key-0"]


def succession(roster: Roster, gone: set[str], joined: list[int]) -> Roster:
    """Return the roster of the next coordinator, which these hosts have joined."""
    next_one = Roster(roster.rules, 100.0, f"key-{joined[0]}", roster.progress, frozenset(gone), grace=0.9)
    for number in joined:
        next_one.join(info(number), roster.rules)
    return next_one


def test_the_next_coordinator_goes_on_as_soon_as_all_survivors_are_there() -> None:
    roster = running(3)
    next_one = succession(roster, {"key-0"}, [1])
    assert kinds(decide(next_one, 100.1)) == ["accept"]
    next_one.join(info(2), roster.rules)
    start = decide(next_one, 100.2)[-1]
    assert (start.kind, start.content["attempt"], ranks(start)) == ("start", 2, ["host-1", "host-2"])


def test_of_two_parts_that_do_not_reach_each_other_one_goes_on() -> None:
    # Five hosts; the coordinator and one other are cut off from three.
    roster = running(5)
    for key in ("key-2", "key-3", "key-4"):
        roster.lose(key, "is silent", certain=False)
    assert roster.deposed
    larger = succession(running(5), set(), [2, 3, 4])
    # One more host may still come, until the grace period is over.
    assert kinds(decide(larger, 100.8)) == ["accept"] * 3
    assert kinds(decide(larger, 100.9)) == ["start"]
    # Four hosts: of equal parts, the coordinator's goes on.
    roster = running(4)
    for key in ("key-2", "key-3"):
        roster.lose(key, "is silent", certain=False)
    assert not roster.deposed
    other = succession(running(4), set(), [2, 3])
    assert kinds(decide(other, 100.9)) == ["accept"] * 2
    assert other.deposed


def test_hosts_that_have_certainly_ended_do_not_count_in_a_majority() -> None:
    roster = running(5, min_hosts=1)
    for number in (1, 2, 3):
        roster.lose(f"key-{number}", "has ended")
    roster.lose("key-4", "is silent", certain=False)
    assert not roster.deposed
    rules, progress = replace(RULES, min_hosts=1), Progress(1, 0, (info(0), info(1)), "key-0")
    alone = Roster(rules, 100.0, "key-1", progress, frozenset({"key-0"}), 0.9)
    alone.join(info(1), alone.rules)
    assert kinds(decide(alone, 100.0)) == ["accept", "start"]


def test_enough_hosts_may_wait_longer_than_the_time_to_join_and_the_coordinator_sleeps() -> None:
    slow = replace(RULES, join_seconds=10.0, last_call_seconds=100.0)
    waits_for_hosts = Roster(slow, 0.0, "key-0")
    waits_for_hosts.join(info(0), slow)
    waits_for_hosts.join(info(1), slow)
    waits_for_workers = running(2, join_seconds=10.0)
    waits_for_workers.join(info(2), waits_for_workers.rules)
    decide(waits_for_workers, 5.0 + SETTLE_SECONDS)
    assert not waits_for_workers.running
    for roster in (waits_for_hosts, waits_for_workers):
        for now in (11.0, 25.0, 60.0):
            assert "end" not in kinds(decide(roster, now))
            assert roster.next_time() > now


def test_nothing_is_due_when_the_job_has_ended() -> None:
    """The time of a report once stayed due, so that a coordinator spun until the last agent had left."""
    roster = running()
    for key in [*roster.seats]:
        roster.finish(key, 1)
    assert kinds(decide(roster, 100.0)) == ["end"] and roster.next_time() == float("inf")
