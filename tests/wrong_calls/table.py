"""The table of wrong calls: `*.toml` beside this module, one file for each area, as values.

A file lists kinds of errors. A kind has the id that the error index of the site uses, its cause and cure, and rows: a
call, and regular expressions that its message must match. Do not add the execution of calls here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
AREAS = ("initialization", "groups", "tensors", "ranks", "objects", "agreement", "failures", "stores", "training")
WORLDS = ("alone", "threads", "processes")


@dataclass(frozen=True)
class Row:
    """One wrong call.

    Attributes:
        call: Python source.
        phrases: Regular expressions that the message must match: the operation, the argument, the fault.
    """

    call: str
    phrases: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of error: an entry of the error index.

    Attributes:
        id: Stable name.
        title: Heading of the entry.
        area: File of the table.
        error: Name of the exception class, or ``"warning"``.
        culprit: Rank or place that the message names.
        cause: Cause of the error.
        cure: Change that avoids it.
        rows: Wrong calls.
        world: ``"alone"``: one process without a group. ``"threads"`` or ``"processes"``: two ranks of these.
        backends: Backends that the rows run on.
        partly: Whether some ranks return instead of raising.
        others: Further exception classes that rows may raise.
        searches: Texts of other libraries' errors that lead to this entry.
        page: Page with more about it.
    """

    id: str
    title: str
    area: str
    error: str
    culprit: str
    cause: str
    cure: str
    rows: tuple[Row, ...]
    world: str = "threads"
    backends: tuple[str, ...] = ("ref",)
    partly: bool = False
    others: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    page: str = ""


def load() -> list[Kind]:
    """Return all kinds, in the order of the areas."""
    return [kind for area in AREAS for kind in _of_area(area)]


def _of_area(area: str) -> list[Kind]:
    found = tomllib.loads((FOLDER / f"{area}.toml").read_text(encoding="utf-8"))
    return [_kind(area, **entry) for entry in found["kind"]]


def _kind(area: str, rows: Sequence[Sequence[str]], **fields: Any) -> Kind:
    for name in ("backends", "others", "searches"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return Kind(area=area, rows=tuple(Row(call.strip(), tuple(phrases)) for call, *phrases in rows), **fields)
