"""Wrong calls get an exception within a second that names the operation, the argument and the fault."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import torchdist_ref as dist
from tests.torch_versions import needs_torch
from tests.wrong_calls.execution import Attempt, attempts
from tests.wrong_calls.record import RECORD, without_numbers
from tests.wrong_calls.table import Kind, load
from tests.wrong_calls.verdict import faults

KINDS = load()
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the variables away by which a launcher tells a process its rank."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_the_table_has_three_hundred_calls_and_none_twice() -> None:
    calls = [(kind.world, row.call) for kind in KINDS for row in kind.rows]
    assert len(calls) >= 300
    assert len(set(calls)) == len(calls)
    assert len({kind.id for kind in KINDS}) == len(KINDS)
    assert all(row.phrases for kind in KINDS for row in kind.rows)


def marks(kind: Kind) -> list[pytest.MarkDecorator]:
    calls_it = any("ReduceOp.PREMUL_SUM(" in row.call for row in kind.rows)
    return [needs_torch("2.13", "ReduceOp.PREMUL_SUM(factor)")] if calls_it else []


@pytest.mark.parametrize(
    ("kind", "backend"),
    [pytest.param(kind, backend, marks=marks(kind)) for kind in KINDS for backend in kind.backends],
    ids=lambda v: getattr(v, "id", v),
)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_call_raises_an_error_that_names_the_fault(kind: Kind, backend: str) -> None:
    wrong = [
        f"{row.call}: {fault}"
        for row, outcomes in zip(kind.rows, attempts(kind, backend), strict=True)
        for fault in faults(kind, row, outcomes)
    ]
    assert not wrong, "\n".join(wrong)
    assert not dist.is_initialized()


def test_the_error_index_of_the_site_shows_what_is_raised(python_with_torch: str, tmp_path: Path) -> None:
    """Recorded in a process of its own, which takes seconds: backends that other tests register are in messages."""
    path = tmp_path / "record.json"
    subprocess.run([python_with_torch, "-m", "tests.wrong_calls", str(path)], cwd=ROOT, check=True, timeout=300)
    found, recorded = (
        {each["id"]: without_numbers(each) for each in json.loads(file.read_text(encoding="utf-8"))}
        for file in (path, RECORD)
    )
    assert list(found) == list(recorded) == [kind.id for kind in KINDS]
    for name, entry in found.items():
        assert entry == recorded[name], "The table or a message has changed: run python -m tests.wrong_calls"


def test_the_verdict_notices_a_silent_call_and_a_message_without_the_fault() -> None:
    kind = KINDS[0]
    row = kind.rows[0]
    silent, other = Attempt((), "", 0.0), Attempt((kind.error,), "something is wrong", 0.0, f"See: {kind.id}")
    slow = Attempt((kind.error,), " ".join(row.phrases), 10.0, f"See: {kind.id}")
    lost = Attempt((kind.error,), " ".join(row.phrases), 0.0, "See: elsewhere")
    assert faults(kind, row, [silent]) == ["rank 0 raised nothing", f"no rank raised {kind.error}"]
    assert all("the message lacks" in fault for fault in faults(kind, row, [other]))
    assert faults(kind, row, [slow]) == ["rank 0 waited for the time-out: 10.0 s"]
    assert len(faults(kind, row, [lost])) == 1 and "'See: elsewhere'" in faults(kind, row, [lost])[0]
