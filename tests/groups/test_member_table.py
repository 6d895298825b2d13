"""Names below the top level match torch 2.15's or have a reason; the page is written from the same table."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.groups import member_table as table
from tests.groups.surface_table import without
from tests.torch_versions import needs_torch

ROWS = sorted(table.known())


def test_every_name_matches_torch_or_has_a_reason() -> None:
    silent = {
        name for name, (state, why) in table.rows().items() if state in ("absent", "other parameters") and not why
    }
    assert not silent - table.newer()


def test_every_reason_is_needed() -> None:
    rows = table.rows()
    for reasons, state in ((table.ABSENT, "absent"), (table.DIFFERENT, "other parameters")):
        names = [name for name in rows if rows[name][0] == state]
        useless = [pattern for pattern in reasons if not any(re.fullmatch(pattern, name) for name in names)]
        assert not useless


def test_most_names_are_present() -> None:
    newer = table.newer()
    counts = Counter(state for name, (state, _) in table.rows().items() if name not in newer)
    assert sum(counts.values()) + len(newer) == len(ROWS) > 500
    assert counts["as torch's"] > 100 and counts["absent"] < 20


def test_the_page_shows_the_table() -> None:
    again = "run `python -m tests.groups.member_table`"
    shown, written = (listed(text) for text in (table.PAGE.read_text(encoding="utf-8"), table.page()))
    newer = set(table.newer())
    assert {name for name, *_ in shown} == set(ROWS)
    assert [row for row in shown if row[0] not in newer] == [row for row in written if row[0] not in newer], again


def listed(page: str) -> list[tuple[str, ...]]:
    """Return name, state and reason of each name of the page's first table, by name."""
    first = page.partition("\n## ")[0]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in first.splitlines() if line[:3] == "| `"]
    return sorted(
        (f"{owner}.{name}".removeprefix("torch.distributed."), *rest)
        for owner, names, *rest in cells
        for name in names.split()
    )


@needs_torch("2.13", "the signatures of torch 2.15, which later ones extend")
def test_the_kept_signatures_are_the_installed_torchs_or_extend_them() -> None:
    found, kept = table.installed(), table.known()
    # Some Pythons show no signature where others do.
    shown = {name: have for name, have in found.items() if have and kept[name] is not None}
    assert not {name: more for name, have in shown.items() if (more := without(have, kept[name]))}
    if torch.__version__.startswith(table.VERSION):
        # CUDA builds show more; what is kept must be as it is kept.
        signatures = {name: known for name, known in kept.items() if known is not None}
        assert {name: found[name] for name in signatures} == signatures


def test_an_unknown_name_is_absent() -> None:
    with pytest.raises(AttributeError):
        table.find("ProcessGroup.no_such_method", "torchdist_ref", table.OURS)
    assert table.find("Work.wait", "torchdist_ref", table.OURS).__name__ == "wait"
