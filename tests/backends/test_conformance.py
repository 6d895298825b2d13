"""Conformance: every backend passes the backend contract, on threads and on processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.backends.base import BackendWrapper, Membership
from torchdist_ref.backends.operands import flat_operands
from torchdist_ref.backends.ref import Ref
from torchdist_ref.calls import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Call, Recv, Reduce
from torchdist_ref.recorder import Recorder
from torchdist_ref.testing import RankError, run
from torchdist_ref.testing.backend_contract import CLAUSES, check_backend
from torchdist_ref.work import Done, Work

CASES = [("ref", "threads", 1), ("ref", "threads", 3), ("ref", "processes", 4), ("gloo", "processes", 3)]
OTHERS = [
    *(("ref", "threads", n) for n in (2, 4)),
    *(("ref", "processes", n) for n in (1, 2, 3)),
    *(("gloo", "processes", n) for n in (1, 2, 4)),
]


# Over a second with 3 and 4 ranks: each passes hundreds of messages, and ranks outnumber the cores.
@pytest.mark.parametrize(
    ("backend", "ranks", "world_size"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)]
)
def test_backend_passes_the_contract(backend: str, ranks: str, world_size: int) -> None:
    check_backend(backend, world_size, ranks)


class WithoutAllToAll(BackendWrapper):
    """Backend `ref`, but for one call."""

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        if isinstance(call, AllToAll):
            raise NotImplementedError("no all_to_all yet")
        return self.wrapped.submit(call, inputs, outputs, wait)


def test_an_error_of_any_type_names_the_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "PARTIAL", "partial", raising=False)
    dist.Backend.register_backend("partial", lambda m, _: WithoutAllToAll(Ref(m)), extended_api=True)
    with pytest.raises(RankError, match=r"scatters failed on rank \d of 2: NotImplementedError: no all_to_all yet"):
        check_backend("partial", 2)


class Wrong(BackendWrapper):
    """Backend `ref` with one fault, which users would notice."""

    def __init__(self, fault: str, membership: Membership) -> None:
        super().__init__(Ref(membership))
        self.name, self.fault = "wrong", fault
        if fault == "records nothing":
            self.recorder = Recorder()

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        plain = torch.float32, torch.int64
        nothing = {
            "barrier does nothing": isinstance(call, Barrier),
            "asynchronous gathers do nothing": isinstance(call, AllGather) and not wait,
            "uneven exchanges do nothing": isinstance(call, AllToAll) and call.uneven,
            "other dtypes are not moved": isinstance(call, Broadcast) and outputs[0].dtype not in plain,
            "columns are not received": isinstance(call, Recv) and not outputs[0].is_contiguous(),
        }
        if nothing.get(self.fault, False):
            return Done(call.op, flat_operands(outputs))
        if self.fault == "every reduction is a sum" and isinstance(call, Reduce):
            call = replace(call, reduction="sum")
        work = self.wrapped.submit(call, inputs, outputs, wait)
        if self.fault == "an exchange destroys its inputs" and isinstance(call, AllToAll) and wait:
            for tensor in inputs:
                tensor.detach().zero_()
        if self.fault == "returns nothing" and wait:
            work.wait()
            return None  # type: ignore[return-value]
        if self.fault == "no NaN" and isinstance(call, AllReduce):
            torch.nan_to_num_(outputs[0].detach())
        return work


@pytest.mark.parametrize(
    ("fault", "clause"),
    [
        ("barrier does nothing", "waits_in_barriers"),
        ("asynchronous gathers do nothing", "completes_every_async_call"),
        ("uneven exchanges do nothing", "exchanges_uneven_blocks"),
        ("other dtypes are not moved", "moves_every_dtype"),
        ("columns are not received", "respects_strides"),
        ("every reduction is a sum", "reduces_to_any_root"),
        ("an exchange destroys its inputs", "exchanges_uneven_blocks"),
        ("an exchange destroys its inputs", "moves_every_dtype"),
        ("no NaN", "moves_every_dtype"),
        ("records nothing", "separates_groups"),
        ("returns nothing", "returns_a_work"),
    ],
)
def test_a_wrong_backend_is_refused(fault: str, clause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clause alone: that the contract runs all clauses, and names the one that fails, is shown above."""
    [check] = [each for each in CLAUSES if each.__name__ == clause]
    monkeypatch.setattr(dist.Backend, "WRONG", "wrong", raising=False)
    dist.Backend.register_backend("wrong", lambda m, _: Wrong(fault, m), extended_api=True)
    run(check, 2, 2)
    with pytest.raises(RankError, match="AssertionError"):
        run(check, 2, 2, backend="wrong")
