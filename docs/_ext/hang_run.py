"""Examination of a hang on the page "Why does my job hang?": the verdict on dumps and logs, and what the page draws.

This module runs in the browser, by Pyodide, beside `torchdist_ref.debug`, unchanged. Do not add here: conclusions,
which belong to `verdict` and `job_log`, or imports of anything else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchdist_ref.debug.dumps import MAX_FILE_BYTES, Dumps, read_directory
from torchdist_ref.debug.job_log import JobLog, errors_of, find_verdict_in_log, merged, read_log
from torchdist_ref.debug.report import COLUMNS, chrome_trace, rows_of
from torchdist_ref.debug.verdict import Verdict, find_verdict

LOG_COLUMNS = ("line of the log", "rank", "error", "where")
NOT_READ = "None of these files is a dump, or a log with an error of a rank."
# Ranks, and last calls of each, that are drawn; rows of a table that are shown.
MAX_RANKS, MAX_CALLS, MAX_ROWS = 32, 10, 500


def examine(folder: str, log: str) -> str:
    """Return as JSON the verdict on the files of a folder or on a pasted log, with a table and a timeline.

    Files that are not dumps are read as logs. The verdict is that on the dumps if there is one, because they show more.
    """
    dumps = read_directory(folder)
    logs = {name: read_log(text) for name in dumps.skipped if (text := _text(Path(folder, name)))}
    logs = {name: one for name, one in logs.items() if find_verdict_in_log(one).kind != "nothing"}
    skipped = {name: reason for name, reason in dumps.skipped.items() if name not in logs}
    if dumps.ranks:
        verdict = find_verdict(dumps)
        found = _answer(verdict, COLUMNS, rows_of(dumps)) | {"timeline": timeline(dumps, verdict)}
    else:
        whole = merged([*logs.values(), read_log(log)])
        found = _answer(find_verdict_in_log(whole), LOG_COLUMNS, errors_of(whole))
        if not logs and not log.strip() and skipped:
            found["sentence"] = NOT_READ
        found["entries"] = entries(whole)
    return json.dumps(found | {"skipped": list(skipped.items())[:MAX_ROWS]})


def _answer(verdict: Verdict, columns: tuple[str, ...], rows: Any) -> dict[str, Any]:
    return {
        "kind": verdict.kind,
        "ranks": verdict.ranks,
        "sentence": verdict.sentence,
        "columns": columns,
        "rows": list(rows)[:MAX_ROWS],
        "timeline": None,
        "entries": [],
    }


def _text(path: Path) -> str:
    """Return the text of a file; empty if it is larger than a dump may be, or not text."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return ""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in text else text


def entries(log: JobLog) -> list[str]:
    """Return the ids of the entries of the error index that explain a log's errors."""
    return list(dict.fromkeys(error.entry for error in log.errors if error.entry))


def timeline(dumps: Dumps, verdict: Verdict) -> dict[str, Any]:
    """Return the last calls of the ranks as bars, in columns of equal width: one between each two times.

    A hang has calls of microseconds and one of half an hour: on an axis of equal seconds nothing could be seen.
    """
    ranks = sorted(dumps.ranks, key=lambda rank: (rank not in verdict.ranks, rank))[:MAX_RANKS]
    of_rank: dict[int, list[dict[str, Any]]] = {rank: [] for rank in sorted(ranks)}
    for event in chrome_trace(dumps)["traceEvents"]:
        if event["ph"] == "X" and event["pid"] in of_rank:
            of_rank[event["pid"]].append(event)
    kept = {rank: sorted(events, key=lambda e: e["ts"])[-MAX_CALLS:] for rank, events in of_rank.items()}
    times = sorted({at for events in kept.values() for e in events for at in (e["ts"], e["ts"] + e["dur"])})
    column = {at: index for index, at in enumerate(times)}
    rows = []
    for rank, events in kept.items():
        lanes = {lane: row for row, lane in enumerate(dict.fromkeys(e["tid"] for e in events))}
        bars, last = list[dict[str, Any]](), dict[int, dict[str, Any]]()
        for event in events:
            start, end = column[event["ts"]], column[event["ts"] + event["dur"]]
            details = event["args"]
            lane = lanes[event["tid"]]
            # A bar without an end must not cover the next one in its lane.
            if lane in last:
                last[lane]["end"] = max(last[lane]["start"] + 1, min(last[lane]["end"], start))
            last[lane] = {
                "lane": lane,
                "start": start,
                # Torch's recorder does not note when a call of Gloo has completed.
                "end": max(end, start + 1),
                "name": event["name"],
                "state": details["state"],
                "title": f"rank {rank}, {event['cat']}: {details['call']}, {details['state']}",
            }
            bars.append(last[lane])
        rows.append({"rank": rank, "lanes": max(1, len(lanes)), "named": rank in verdict.ranks, "bars": bars})
    first = times[0] if times else 0
    return {"rows": rows, "times": [(at - first) / 1e6 for at in times], "omitted": len(dumps.ranks) - len(ranks)}
