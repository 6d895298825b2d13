"""Every function has the meaning of torch's: random cases against formulas, on ranks that are reused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.meaning.cases import CALLS, DTYPES, GROUPS, LAYOUTS, SHAPES, UNEVEN, WAYS, Case, ops_for
from tests.meaning.ranks import Pool

# Four ranks on three backends take as long as the other worlds together.
WORLDS = (1, 2, 3, pytest.param(4, marks=pytest.mark.long))
RULES = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any valid case."""
    call = draw(st.sampled_from(CALLS))
    dtype = draw(st.sampled_from(DTYPES))
    return Case(
        call=call,
        dtype=dtype,
        shape=draw(st.sampled_from(SHAPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        op=draw(st.sampled_from(ops_for(call, dtype))),
        group=draw(st.sampled_from(GROUPS)),
        way=draw(st.sampled_from(WAYS)),
        root=draw(st.integers(0, 3)),
        uneven=call in UNEVEN and draw(st.booleans()),
        seed=draw(st.integers(0, 40)),
    )


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world {world}")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param) as ranks:
        ranks.check(Case("barrier"))
        yield ranks


@settings(max_examples=30, **RULES)
@given(case=cases())
def test_any_case(pool: Pool, case: Case) -> None:
    """Over a second: 30 cases, each on three backends, with up to four ranks; `long` has thousands."""
    pool.check(case)


@pytest.mark.parametrize("call", CALLS)
def test_every_function_with_every_reduction_and_layout(pool: Pool, call: str) -> None:
    for number, layout in enumerate(LAYOUTS):
        for op in ops_for(call, "float32"):
            pool.check(Case(call, "float32", (2, 3, 2, 2), layout, op, way="wait", root=number, seed=number))


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(max_examples=2000, **{**RULES, "derandomize": False})
@given(case=cases())
@example(case=Case("all_reduce"))
def test_thousands_of_cases(pool: Pool, case: Case) -> None:
    pool.check(case)
