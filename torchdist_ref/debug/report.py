"""Table and Chrome trace of the dumps of a job.

Do not add conclusions here: they belong to `verdict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from torchdist_ref.debug.dumps import Dumps, Event, GroupCalls, RankDump
from torchdist_ref.debug.verdict import MAX_NAMED, number_text, place

COLUMNS = ("rank", "group", "last completed", "not completed", "state", "where")


def rows_of(dumps: Dumps) -> list[tuple[str, ...]]:
    """Return the state of each rank and group in `COLUMNS`: its last completed call, and the first that is not."""
    of_ranks = [(dump, group) for dump in dumps.ranks.values() for group in dump.groups]
    # Calls through the store are listed where one of them has not completed: each job has an initialization.
    open_groups = {group.name for _, group in of_ranks if any(event.state != "completed" for event in group.events)}
    listed = [each for each in of_ranks if each[1].name in open_groups or not each[1].is_in_store]
    rows = [_row(dump, group) for dump, group in listed]
    rows += [(str(rank), "", "", "", "no dump", "") for rank in dumps.missing[:MAX_NAMED]]
    if (more := len(dumps.missing) - MAX_NAMED) > 0:
        rows.append((f"{more} others", "", "", "", "no dump", ""))
    return rows


def table(dumps: Dumps) -> str:
    """Return the rows as a table for a terminal."""
    rows = [COLUMNS, *rows_of(dumps)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _row(dump: RankDump, group: GroupCalls) -> tuple[str, ...]:
    completed = [event for event in group.events if event.state == "completed"]
    pending = next((event for event in group.events if event.state != "completed"), None)
    last = _words(completed[-1]) if completed else ""
    if pending is None:
        return str(dump.rank), group.name, last, "", "", place(dump)
    state = f"failed: {pending.error_type}" if pending.error_type else pending.state
    return str(dump.rank), group.name, last, _words(pending), state, place(dump, pending)


def _words(event: Event) -> str:
    return event.text if event.is_message else f"{number_text(event.number)} {event.text}"


def chrome_trace(dumps: Dumps) -> dict[str, Any]:
    """Return the calls in the Trace Event Format, which Perfetto and chrome://tracing open.

    Each rank is a process. Each group has as many threads as it has calls at the same time. Calls that have not ended
    last until the dump. Times are in microseconds since the first call of any rank, by the clocks of the hosts.
    """
    begins = [e.start_ns for dump in dumps.ranks.values() for g in dump.groups for e in g.events if e.start_ns]
    origin = min(begins, default=0)
    events = [event for dump in dumps.ranks.values() for event in _trace_of(dump, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _trace_of(dump: RankDump, origin: int) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", dump.rank, 0, f"rank {dump.rank}")
    # Viewers take thread 0 of every process for the idle one of the system, and mix up its names.
    thread = 1
    for group in dump.groups:
        lanes, free, busy = 0, list[int](), list[tuple[int, int]]()
        for event in sorted((e for e in group.events if e.start_ns), key=lambda e: e.start_ns):
            end = max(event.start_ns, event.end_ns or (event.start_ns if event.state == "completed" else dump.time_ns))
            # Heaps, since a dump may have many calls at the same time: `busy` is ordered by the ends of calls.
            while busy and busy[0][0] <= event.start_ns:
                heappush(free, heappop(busy)[1])
            if not free:
                heappush(free, lanes)
                lanes += 1
                yield _metadata("thread_name", dump.rank, thread + free[0], group.name)
            lane = heappop(free)
            heappush(busy, (end, lane))
            yield {
                "name": event.op,
                "cat": group.name,
                "ph": "X",
                "pid": dump.rank,
                "tid": thread + lane,
                "ts": (event.start_ns - origin) / 1000,
                "dur": (end - event.start_ns) / 1000,
                "args": {
                    "number": number_text(event.number),
                    "call": event.text,
                    "state": event.state,
                    "bytes": event.nbytes,
                    "error": event.error,
                },
            }
        thread += lanes


def _metadata(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": {"name": value}}
