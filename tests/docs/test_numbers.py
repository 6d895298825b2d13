"""Pages hold no measured number in their own text: figures come from recorded runs, with date and machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs import pages

UNITS = "µs|us|ms|s|seconds?|minutes?|hours?|%|per cent|times|Mbit/s|Gbit/s|[GM]B/s|microseconds|milliseconds"
COUNTED = "passed|failed|skipped|tests|pages|names|nodes|lines of code"
LITERAL = re.compile(rf"(?<![\w.`/-])\d[\d,.]*\s?(?:{UNITS}|{COUNTED})(?![\w/])")
# Constants of the interface and texts of errors, which other tests hold: page and text.
CONSTANTS = {
    ("explanation/stores_and_rendezvous.md", "5 s"),
    ("explanation/agents.md", "0.3 seconds"),
    ("how-to/benchmark.md", "95 %"),
    ("how-to/benchmark.md", "1 times"),
    ("explanation/one_group.md", "5 seconds"),
    ("how-to/my_job_hangs.md", "30 minutes"),
    ("how-to/notebook.md", "30 seconds"),
    ("how-to/several_hosts.md", "10 seconds"),
    ("how-to/several_hosts.md", "15 minutes"),
    ("how-to/several_hosts.md", "30 seconds"),
    ("how-to/simulate_ranks.md", "8 seconds"),
    ("how-to/simulate_ranks.md", "30 minutes"),
    ("reference/distributed/initialization.rst", "30 minutes"),
}
PAGES = [
    path
    for path in sorted([*pages.DOCS.rglob("*.md"), *pages.DOCS.rglob("*.rst")])
    if not {"_build", "source", "_generated"} & set(path.relative_to(pages.DOCS).parts)
]
USED = re.compile(r"\{measured\} ?(?:`([\w.]+)`|(\w+))|:measured:`([\w.]+)`|\.\. measured:: (\w+)")


def literals(path: Path) -> list[str]:
    """Return the timings and counts in the prose of a page, without code, roles and formulas."""
    text = path.read_text(encoding="utf-8")
    fences = r"(?ms)^(:::|```).*?^\1$" if path.suffix == ".md" else r"(?m)^\s*(>>>|\.\.\.).*(\n.+)*"
    text = re.sub(fences, "", text)
    text = re.sub(r"`[^`\n]*`|\$[^$\n]*\$", "", text)
    return [" ".join(found[0].split()) for found in LITERAL.finditer(text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(pages.DOCS)))
def test_no_measured_number_is_typed_by_hand(path: Path) -> None:
    name, found = str(path.relative_to(pages.DOCS)), literals(path)
    allowed = [text for page, text in CONSTANTS if page == name]
    assert sorted(found) == sorted(allowed), "record it in docs/measured.json, and use the role `measured`"


def test_the_lint_finds_timings_and_counts(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It takes 3.5 µs, 12 ms or 5 %; 4,228 passed. `7 ms` and $8 s$ are code, 4 bytes a size.\n")
    assert literals(page) == ["3.5 µs", "12 ms", "5 %", "4,228 passed"]


def test_every_recorded_figure_has_an_origin_and_is_shown() -> None:
    record = json.loads((pages.DOCS / "measured.json").read_text(encoding="utf-8"))
    shown = {"".join(found) for path in PAGES for found in USED.findall(path.read_text(encoding="utf-8"))}
    recorded = set()
    for name, entry in record["entries"].items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]) and entry["how"], name
        assert entry["machine"] in record["machines"]
        assert all(len(row) == len(entry["header"]) for row in entry["rows"])
        recorded |= {f"{name}.{key}" for key in entry["values"]} | ({name} if entry["rows"] else set())
    assert recorded == shown
