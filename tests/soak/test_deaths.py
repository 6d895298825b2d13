"""A rank dies inside a public function: a seeded share of the points that `nox -s soak` tries all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.soak import deaths
from torchdist_ref.stores import TCPStore

# The bound of 100 ms is held on a quiet machine; here a hang must not pass.
SOON, SHARE = 2.0, 0.01


@pytest.fixture(scope="module")
def server() -> Iterator[TCPStore]:
    deaths.warm_up()
    store = TCPStore("127.0.0.1", 0, is_master=True)
    yield store
    store.close()


_runs = itertools.count(1)


@pytest.mark.parametrize("transport", deaths.TRANSPORTS)
@pytest.mark.parametrize("function", deaths.FUNCTIONS)
def test_survivors_name_the_dead_rank(function: str, transport: str, server: TCPStore) -> None:
    victim = (len(function) + len(transport)) % 2
    case = deaths.Case(function, transport, victim, server=server, runs=_runs)
    wrong = deaths.check(case, SHARE, bound=SOON)
    assert not wrong, "\n".join(f"at point {each.point}: {each.error}" for each in wrong)
