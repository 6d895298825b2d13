"""The page on torch's sub-packages has a row for each, and shows what the tests see."""

from __future__ import annotations

import pytest

from tests.drop_in import packages
from tests.torch_versions import needs_torch

AGAIN = "run `python -m tests.drop_in.packages`"


@needs_torch("2.13", "its sub-packages")
def test_each_sub_package_has_a_row() -> None:
    assert set(packages.packages()) <= set(packages.ROWS)
    assert "2.13" not in packages.torch.__version__ or set(packages.packages()) == set(packages.ROWS)


def test_the_page_shows_the_record() -> None:
    assert packages.PAGE.read_text(encoding="utf-8") == packages.page(), AGAIN


def test_the_record_has_exactly_the_tests_that_see_something(request: pytest.FixtureRequest) -> None:
    found = []
    for path in packages.files():
        module = pytest.Module.from_parent(request.session, path=path)
        items = [item for item in request.session.genitems(module) if "proof" in getattr(item, "fixturenames", ())]
        assert items, path
        found += [f"{path.relative_to(packages.ROOT)}::{item.nodeid.partition('::')[2]}" for item in items]
    assert sorted(found) == sorted(packages.record()["tests"]), AGAIN


def test_a_test_that_sees_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(packages.VARIABLE, raising=False)
    test, row = next(iter(packages.record()["tests"].items()))
    packages.publish(test, row["packages"], row["backends"], row["ranks"], row["equal_to"])
    for changed in ({"backends": ["mpi"]}, {"ranks": 9}, {"packages": ["rpc"]}, {"equal_to": "nothing"}):
        seen = {**row, **changed}
        with pytest.raises(AssertionError, match=r"tests\.drop_in\.packages"):
            packages.publish(test, seen["packages"], seen["backends"], seen["ranks"], seen["equal_to"])
