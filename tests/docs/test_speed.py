"""The tables of the page on speed say what the reports say, and have every operation that is measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import speed

from torchdist_ref.benchmark.operations import OPERATIONS


def report(ref: list[float], **others: list[float]) -> dict[str, Any]:
    entries = [
        {"world": 2, "op": "all_gather", "size_bytes": 8, "backend": name, "samples_seconds": found}
        for name, found in {"ref": ref, **others}.items()
    ]
    settings = {"namespaces": False}
    return {"date": "2026-11-22T07:00:00", "machine": {}, "versions": {}, "settings": settings, "results": entries}


def test_rounds_of_several_reports_are_one_and_ratios_are_of_the_same_round() -> None:
    kept = speed.condense(
        [
            ("mpich", report([1e-6, 2e-6, 4e-6], gloo=[9e-6, 8e-6, 4e-6], mpi4py=[2e-6, 2e-6, 2e-6], limit=[1e-6] * 3)),
            ("openmpi", report([8e-6], gloo=[8e-6], mpi4py=[2e-6], limit=[2e-6])),
        ]
    )
    assert kept["date"] == "2026-11-22"
    assert kept["cells"] == [
        {
            "namespaces": False,
            "world": 2,
            "op": "all_gather",
            "bytes": 8,
            "seconds": 3e-6,
            "gloo": 2.5,
            "mpich": 1.0,
            "openmpi": 0.25,
            "limit": 3.0,
        }
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [(3.44e-6, "3.4"), (16.6e-6, "17"), (3120e-6, "3,100"), (0.5e-6, "0.5"), (0.99e-6, "0.99")]
)
def test_times_have_two_digits(value: float, shown: str) -> None:
    assert speed.figure({"seconds": value}, "seconds") == shown


def test_what_is_kept_has_every_operation() -> None:
    cells = json.loads(speed.RECORDED.read_text(encoding="utf-8"))["cells"]
    for apart in (False, True):
        assert {cell["op"] for cell in cells if cell["namespaces"] == apart} >= set(OPERATIONS) - {"barrier"}
    assert all(
        {"gloo", "limit", "mpich", "openmpi"} <= cell.keys()
        for cell in cells
        if 0 < cell["bytes"] < 1 << 26 and not cell["namespaces"]
    )
