"""Conformance: every backend passes the backend contract, on threads and on processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.backends import registry
from torchdist_ref.backends.base import BackendWrapper
from torchdist_ref.backends.ref import Ref
from torchdist_ref.calls import AllToAll, Call
from torchdist_ref.testing import RankError
from torchdist_ref.testing.backend_contract import check_backend
from torchdist_ref.work import Work


# Over a second with 3 and 4 ranks: each passes hundreds of messages, and ranks outnumber the cores.
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("backend", "ranks"), [("ref", "threads"), ("ref", "processes"), ("gloo", "processes")])
def test_backend_passes_the_contract(backend: str, ranks: str, world_size: int) -> None:
    check_backend(backend, world_size, ranks)


class WithoutAllToAll(BackendWrapper):
    """Backend `ref`, but for one call."""

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        if isinstance(call, AllToAll):
            raise NotImplementedError("no all_to_all yet")
        return self.wrapped.submit(call, inputs, outputs, wait)


def test_an_error_of_any_type_names_the_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(dist.Backend, "PARTIAL", "partial", raising=False)
    dist.Backend.register_backend("partial", lambda m, _: WithoutAllToAll(Ref(m)), extended_api=True)
    with pytest.raises(RankError, match=r"scatters failed on rank \d of 2: NotImplementedError: no all_to_all yet"):
        check_backend("partial", 2)
