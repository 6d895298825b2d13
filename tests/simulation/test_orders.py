"""Programs in which the order of events matters hold in each order that a seed gives, and fail with planted defects."""

from __future__ import annotations

import pytest

from tests.simulation.defects import DEFECTS, Defect, explored
from tests.simulation.orders import PROGRAMS
from torchdist_ref import simulation


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_hold_in_each_order(name: str) -> None:
    """The seeds that show a defect are among them."""
    seeds = sorted({*range(4), *(defect.seed for defect in DEFECTS if defect.program == name)})
    assert simulation.explore(PROGRAMS[name], 3, seeds=seeds) is None


IN_CI = "calls in callbacks of joined calls are numbered as the program's"
PARAMETERS = [
    pytest.param(each, id=each.fault, marks=[] if each.fault == IN_CI else [pytest.mark.long]) for each in DEFECTS
]


@pytest.mark.parametrize("defect", PARAMETERS)
def test_a_seed_shows_a_mended_defect_that_is_planted_again(defect: Defect) -> None:
    """Each needs a new interpreter with torch, three seconds; CI has one. `nox -s nightly` searches for the seeds."""
    found = explored(defect, defect.seed, 1)
    assert found.startswith(f"seed {defect.seed}, "), found


def test_half_of_the_defects_are_not_seen_in_the_plain_order() -> None:
    assert len(DEFECTS) >= 10 and sum(defect.seed > 0 for defect in DEFECTS) >= 5
    assert all(defect.seed < 1000 and defect.program in PROGRAMS for defect in DEFECTS)
