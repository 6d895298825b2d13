"""Keep-alives of agents in time that is an argument: who is lost, when, and after how many looks."""

from __future__ import annotations

from math import inf

import pytest

from torchdist_ref.elastic.keep_alives import LATE_SECONDS, Finding, KeepAlives
from torchdist_ref.elastic.session import KEEP_ALIVE_SECONDS, SILENCE_SECONDS


@pytest.mark.parametrize("beats", [[0, 1, 2, 3, 3, 3, 3, 3], [0, 1, 2, 3, 1, 2, 3, 0]], ids=["silent", "replayed"])
def test_keep_alives_that_are_written_again_do_not_hide_that_an_agent_is_silent(beats: list[int]) -> None:
    now, found, keep_alives = 100.0, list[Finding](), KeepAlives(SILENCE_SECONDS)
    for beat in beats:
        found.append(keep_alives.look("agent", beat, False, now))
        now += KEEP_ALIVE_SECONDS
    assert found == [Finding.BEAT] * 4 + [Finding.WAITING] * 3 + [Finding.SILENT]
    assert keep_alives.silence("agent", now - KEEP_ALIVE_SECONDS) == pytest.approx(4 * KEEP_ALIVE_SECONDS)


def test_a_connection_that_ends_counts_only_when_the_agent_is_late_too() -> None:
    keep_alives = KeepAlives(SILENCE_SECONDS)
    keep_alives.look("agent", 7, False, 100.0)
    assert keep_alives.look("agent", 7, True, 100.0 + 0.9 * LATE_SECONDS) is Finding.WAITING
    assert keep_alives.look("agent", 8, True, 100.0 + 1.1 * LATE_SECONDS) is Finding.BEAT
    assert keep_alives.look("agent", 8, True, 100.0 + 2.2 * LATE_SECONDS) is Finding.DISCONNECTED


def test_a_new_agent_is_looked_at_right_away_and_then_when_it_is_late() -> None:
    """Another program may have deleted what it wrote: it is not looked at again and again until it writes."""
    keep_alives = KeepAlives(SILENCE_SECONDS)
    assert keep_alives.next_look([]) == inf and keep_alives.next_look(["agent"]) == -inf
    assert keep_alives.look("agent", -1, True, 100.0) is Finding.WAITING
    assert keep_alives.next_look(["agent"]) == 100.0 + LATE_SECONDS
    assert keep_alives.look("agent", -1, False, 100.0 + SILENCE_SECONDS) is Finding.SILENT


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("begin", [100.0 + 0.013 * step for step in range(24)])
def test_a_lost_agent_is_noticed_in_time_by_two_looks_a_second(begin: float, gone: bool) -> None:
    for death in (109.801, 109.95, 110.099):
        lost, looks = looks_until_lost(begin, death, gone)
        assert 0.14 < lost - death < (0.91 if gone else 1.46)
        assert looks <= (death - begin) / 0.45 + 4


def looks_until_lost(now: float, death: float, gone: bool) -> tuple[float, int]:
    """Return when the death of an agent that kept alive until then is noticed, and the number of looks so far."""
    keep_alives, looks = KeepAlives(SILENCE_SECONDS), 0
    while True:
        now = max(now, keep_alives.next_look(["agent"]))
        looks += 1
        beat = int(min(now, death) / KEEP_ALIVE_SECONDS)
        if keep_alives.look("agent", beat, gone and now > death, now) in (Finding.DISCONNECTED, Finding.SILENT):
            return now, looks


def test_a_look_at_the_due_time_is_not_due_again() -> None:
    """Rounding once made a coordinator on virtual time, which looks exactly then, look without an end."""
    for step in range(200):
        keep_alives, begin = KeepAlives(SILENCE_SECONDS), 0.1 + 0.7 * step
        keep_alives.look("agent", 1, False, begin)
        due = keep_alives.next_look(["agent"])
        keep_alives.look("agent", 1, False, due)
        assert keep_alives.next_look(["agent"]) == begin + SILENCE_SECONDS > due
        assert keep_alives.look("agent", 1, False, begin + SILENCE_SECONDS) is Finding.SILENT
