"""Timelines: what they count, their digests, and the trace that other programs read."""

from __future__ import annotations

import json

from torchdist_ref.simulation import Happening, Timeline

ENTRIES = [
    Happening(0.0, 0, "sent", (1, 400, 3e-05)),
    Happening(1e-05, 1, "sent", (0, 56, 4e-05)),
    Happening(3e-05, 1, "returned"),
]


def test_a_timeline_counts_bytes_by_rank() -> None:
    timeline = Timeline(ENTRIES)
    assert (timeline.sent_bytes(0), timeline.sent_bytes(1), timeline.sent_bytes(2)) == (400, 56, 0)
    assert len(timeline) == 3 and timeline[2].kind == "returned" and list(timeline) == ENTRIES


def test_digests_differ_with_any_fact() -> None:
    others = [
        ENTRIES[:2],
        [ENTRIES[1], ENTRIES[0], ENTRIES[2]],
        [Happening(0.0, 0, "sent", (1, 401, 3e-05)), *ENTRIES[1:]],
        [Happening(5e-324, 0, "sent", (1, 400, 3e-05)), *ENTRIES[1:]],
    ]
    digests = {Timeline(entries).digest() for entries in (ENTRIES, list(ENTRIES), *others)}
    assert len(digests) == 5


def test_the_trace_has_each_rank_and_message() -> None:
    events = json.loads(Timeline(ENTRIES).chrome_trace())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    sent = next(event for event in events if event["ph"] == "X")
    assert (sent["name"], sent["pid"], sent["ts"], round(sent["dur"], 6)) == ("400 B to rank 1", 0, 0.0, 30.0)
