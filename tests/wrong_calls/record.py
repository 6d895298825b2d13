"""Record of the table for the site: each kind with its calls, and the message that the first call raised.

What differs between runs (ports, processes, hosts, durations) is replaced, so that the record is the same in each run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.wrong_calls.execution import attempts
from tests.wrong_calls.table import Kind, load
from tests.wrong_calls.verdict import representative

RECORD = Path(__file__).parents[2] / "docs" / "reference" / "errors_index.json"
UNNAMED = ("object", "BaseException", "_Indexed")
VARYING = (
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"/tmp/\w+"), "/tmp/PATH"),
    (re.compile(r"0x[0-9a-f]+"), "0x…"),
    (re.compile(r"sport = :\d+"), "sport = :PORT"),
    (re.compile(r"\bpid \d+ on [\w.-]+"), "pid PID on HOST"),
    (re.compile(r"\d+\.\d+ (s|ms)\b"), r"… \1"),
)


def as_text() -> str:
    """Return the record as JSON."""
    return json.dumps([entry(kind) for kind in load()], indent=1, ensure_ascii=False) + "\n"


def entry(kind: Kind) -> dict[str, Any]:
    """Return the record of one kind."""
    (outcomes,) = attempts(_first(kind))
    shown = representative(kind, outcomes)
    assert shown is not None, f"{kind.id}: {outcomes}"
    return {
        "id": kind.id,
        "title": kind.title,
        "area": kind.area,
        "error": shown.kinds[0],
        "classes": list(dict.fromkeys(name for name in shown.kinds if name not in UNNAMED)),
        "culprit": kind.culprit,
        "cause": kind.cause,
        "cure": kind.cure,
        "page": kind.page,
        "world": kind.world,
        "searches": list(kind.searches),
        "calls": [row.call for row in kind.rows],
        "message": stable(shown.message),
    }


def stable(message: str) -> str:
    """Return a message without what differs between runs."""
    for pattern, replacement in VARYING:
        message = pattern.sub(replacement, message)
    return "\n".join(line.rstrip() for line in message.splitlines()[:12])


def without_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose message has no numbers: which rank is named may depend on which came first."""
    return {**record, "message": re.sub(r"\d+", "N", record["message"])}


def _first(kind: Kind) -> Kind:
    return Kind(**{**vars(kind), "rows": kind.rows[:1]})
