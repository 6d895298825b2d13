"""Few combinations of parameters for CI, with every value or every pair of values; the others are marked `long`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

_Param = type(pytest.param())


def covering(*axes: Sequence[Any], together: int = 1) -> list[Any]:
    """Return all combinations of one value of each axis, as parameters of a test that takes as many arguments.

    Those not marked `long` have every value of every axis; with `together=2`, every two values of two axes.
    """
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen: set[tuple[int, ...]] = set()
    uses: Counter[tuple[int, int]] = Counter()
    missing = {part for row in rows for part in _parts(row, together)}
    while missing:
        # The most that is new, then the values used least.
        row = min(rows, key=lambda row: (-len(missing & _parts(row, together)), sum(uses[v] for v in enumerate(row))))
        chosen.add(row)
        uses.update(enumerate(row))
        missing -= _parts(row, together)
    return [_parameters([axis[i] for axis, i in zip(axes, row, strict=True)], row in chosen) for row in rows]


def _parts(row: tuple[int, ...], together: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), together))


def _parameters(values: list[Any], chosen: bool) -> Any:
    """Join the values and marks; a value may be several, or a `pytest.param`."""
    flat: list[Any] = []
    marks = [] if chosen else [pytest.mark.long]
    for value in values:
        if isinstance(value, _Param):
            flat, marks = [*flat, *value.values], [*marks, *value.marks]
        else:
            flat += value if isinstance(value, tuple) else [value]
    return pytest.param(*flat, marks=marks)
