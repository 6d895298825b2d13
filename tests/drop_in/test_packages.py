"""The page on torch's sub-packages has a row for each, and names tests that exist."""

from __future__ import annotations

import re

from tests.drop_in import packages


def test_each_sub_package_has_a_row() -> None:
    assert set(packages.packages()) <= set(packages.ROWS)


def test_the_page_shows_the_table() -> None:
    again = "run `python -m tests.drop_in.packages`"
    assert packages.PAGE.read_text(encoding="utf-8") == packages.page(), again


def test_the_tests_exist() -> None:
    for _, _, tests in packages.ROWS.values():
        for each in tests:
            path, _, name = each.partition("::")
            text = (packages.ROOT / "tests" / path).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(" if name != "*" else r"^def test_", text, re.MULTILINE), each
