"""Conformance: every backend passes the backend contract, on threads and on processes."""

from __future__ import annotations

import pytest

from torchdist_ref.testing.backend_contract import check_backend


# Over a second with 3 and 4 ranks: each passes hundreds of messages, and ranks outnumber the cores.
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("backend", "ranks"), [("ref", "threads"), ("ref", "processes"), ("gloo", "processes")])
def test_backend_passes_the_contract(backend: str, ranks: str, world_size: int) -> None:
    check_backend(backend, world_size, ranks)
