"""CI's share of a product of parameters has what it promises, and the rest is not lost."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering


@pytest.mark.parametrize(("together", "at_most"), [(1, 4), (2, 13), (3, 36)])
def test_every_combination_of_so_many_values_is_chosen_and_nothing_is_lost(together: int, at_most: int) -> None:
    axes = ("ab", "cde", "fg", "hij")
    rows = covering(*axes, together=together)
    assert [row.values for row in rows] == list(itertools.product(*axes))
    chosen = [row.values for row in rows if not row.marks]
    assert len(chosen) <= at_most
    for some in itertools.combinations(range(4), together):
        wanted = set(itertools.product(*(axes[i] for i in some)))
        assert {tuple(row[i] for i in some) for row in chosen} == wanted


def test_values_that_are_several_arguments_and_marks_are_kept() -> None:
    rows = covering([("ref", 2)], [pytest.param(1, marks=pytest.mark.gpu), 2])
    assert [(row.values, [mark.name for mark in row.marks]) for row in rows] == [
        (("ref", 2, 1), ["gpu"]),
        (("ref", 2, 2), []),
    ]
