"""Programs in which the order of events matters hold in each order that a seed gives."""

from __future__ import annotations

import pytest

from tests.simulation.orders import PROGRAMS
from torchdist_ref import simulation


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_hold_in_each_order(name: str) -> None:
    assert simulation.explore(PROGRAMS[name], 3, seeds=range(4)) is None
