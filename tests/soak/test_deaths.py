"""A rank dies inside a public function: a seeded share of the points that `nox -s soak` tries all."""

from __future__ import annotations

import os

import pytest

from tests.covering import covering
from tests.soak import deaths

pytestmark = pytest.mark.deaths
# The bound of 100 ms is held on a quiet machine; here no time-out must pass for a death that was noticed.
SOON, SHARE = 6.0, float(os.environ.get("TORCHDIST_REF_DEATHS_SHARE", "0.01"))


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    deaths.warm_up()


@pytest.mark.parametrize(("function", "transport"), covering(list(deaths.FUNCTIONS), deaths.TRANSPORTS))
def test_survivors_name_the_dead_rank(function: str, transport: str) -> None:
    """CI has each function on one transport."""
    victim = (len(function) + len(transport)) % 2
    case = deaths.Case(function, transport, victim)
    wrong = deaths.check(case, SHARE, bound=SOON).wrong
    assert not wrong, "\n".join(f"at point {each.point}: {each.error} {each.seconds:.1f} s" for each in wrong)
