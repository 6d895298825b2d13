"""Debug levels: DETAIL compares the calls of foreign backends as `ref` always does; INFO logs groups."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.outcomes import failing
from tests.waits import begin_together
from torchdist_ref.backends.detail_level import CheckedBackend
from torchdist_ref.debug import call_sites
from torchdist_ref.groups.world import current
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.testing.backend_contract import check_backend


@pytest.fixture(autouse=True)
def detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


# Over a second: the whole contract of a backend, with a store between every two calls.
def test_a_checked_backend_conforms() -> None:
    check_backend("gloo", 2)


def tensors(rank: int, sizes: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    return fill(rank, (sizes[min(rank, 1)],))


DISAGREE: dict[str, Callable[[int], Any]] = {
    "sizes": lambda rank: dist.all_reduce(tensors(rank)),
    "dtypes": lambda rank: dist.all_reduce(tensors(rank, (3, 3)).to(torch.float64 if rank else torch.float32)),
    "reductions": lambda rank: dist.all_reduce(tensors(rank, (3, 3)), dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN),
    "roots": lambda rank: dist.broadcast(tensors(rank, (3, 3)), rank),
    "operations": lambda rank: dist.barrier() if rank else dist.all_reduce(tensors(rank)),
    "an asynchronous one": lambda rank: dist.all_reduce(tensors(rank), async_op=True),
    "sizes that are scattered": lambda rank: dist.scatter(tensors(rank), None if rank else [torch.ones(3)] * 2, 0),
}


def test_split_sizes_of_all_to_all_are_compared_by_pair() -> None:
    def program(rank: int) -> str:
        give, take = ([1, 3], [1, 1]) if rank == 0 else ([1, 1], [2, 1])
        output = torch.full((sum(take),), -1.0)
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_to_all_single(output, fill(rank, (sum(give),)), take, give)
        assert output.eq(-1).all()
        take = [2, 1] if rank == 0 else [3, 1]
        output = torch.zeros(sum(take))
        dist.all_to_all_single(output, fill(rank, (5 if rank == 0 else 2,)), take, [2, 3] if rank == 0 else [1, 1])
        wanted = [*fill(0, (5,))[:2], *fill(1, (2,))[:1]] if rank == 0 else [*fill(0, (5,))[2:], *fill(1, (2,))[1:]]
        assert output.tolist() == torch.stack(wanted).tolist()
        return str(caught.value)

    for text in run(program, 2, backend="gloo"):
        assert "rank 0 sends 3 elements to rank 1, which expects 2" in text


@pytest.mark.parametrize("name", DISAGREE)
def test_mismatched_calls_raise_on_all_ranks(name: str) -> None:
    def program(rank: int) -> tuple[str, list[float]]:
        with pytest.raises(dist.MismatchError) as caught:
            DISAGREE[name](rank)
        tensor = fill(rank, (5,))
        dist.all_reduce(tensor)
        return str(caught.value), tensor.tolist()

    for rank, (text, total) in enumerate(run(program, 2, backend="gloo")):
        assert (
            f"on rank {rank})" in text and "rank 0: " in text and "rank 1: " in text and "Nothing was written" in text
        )
        assert total == (fill(0, (5,)) + fill(1, (5,))).tolist()


def test_a_mismatch_shows_both_calls() -> None:
    def program(rank: int) -> str:
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(torch.ones(2, 3 + rank))
        return str(caught.value).partition("calls. ")[2].partition(". Nothing")[0]

    call = "all_reduce(reduction=sum) of float32"
    assert run(program, 2, backend="gloo") == [f"rank 0: {call} [2, 3]; rank 1: {call} [2, 4]"] * 2


def test_a_rank_without_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    short = timedelta(seconds=0.3)
    begin_together(monkeypatch, "checked", short, 2)

    def program(rank: int) -> str:
        # The group is made with the default time-out.
        group, text = dist.new_group(), ""
        dist.set_timeout(short, group)
        if rank != 2:
            with pytest.raises(dist.RankStalledError) as caught:
                dist.all_reduce(tensors(rank, (3, 3)), group=group)
            text = str(caught.value)
        # No rank leaves before.
        dist.barrier()
        return text

    for rank, text in enumerate(run(program, 3, backend="gloo")[:2]):
        assert f"on rank {rank}): ranks [2] made no call in 0.3 s" in text


def test_completed_calls_leave_no_keys_in_the_store() -> None:
    def program(rank: int) -> int:
        for _ in range(5):
            dist.barrier()
        world = dist.group.WORLD
        assert world is not None
        dist.monitored_barrier()
        return sum("checked/" in key for key in world.store.list_keys())

    assert max(run(program, 3, backend="gloo")) <= 3


def test_only_foreign_backends_are_wrapped_and_every_group_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: int) -> list[bool]:
        split = dist.split_group(split_ranks=[[0, 1]], backend="gloo")
        groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo"), split]
        return [isinstance(group.backend, CheckedBackend) for group in groups]  # type: ignore[union-attr]

    with caplog.at_level(logging.INFO, "torchdist_ref.debug"):
        assert run(program, 2) == [[False, False, True, True]] * 2
    told = [record.message for record in caplog.records if "rank 0 of members (0, 1)" in record.message]
    assert len(told) == 4 and sum(" on gloo" in text for text in told) == 2


def test_point_to_point_messages_still_work() -> None:
    def program(rank: int) -> float:
        tensor = fill(rank, (1,))
        if rank:
            dist.send(tensor, 0)
        else:
            assert dist.recv(tensor, 1) == 1
        return tensor.item()

    assert run(program, 2, backend="gloo") == [fill(1, (1,)).item()] * 2


def ends_before_its_call(rank: int, how: str) -> tuple[str, str]:
    store = current().store
    assert store is not None
    dist.barrier()
    store.set(f"passed/{rank}", "")
    if rank == 1:
        store.wait(["passed/0", "passed/2"])
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.group.WORLD.backend.abort("its program ended with ValueError: no data")
        return "", ""
    return failing(lambda: dist.all_reduce(torch.ones(2)))


@pytest.mark.parametrize("how", ["killed", "aborts"])
def test_a_rank_that_ends_before_its_call_is_named_at_once(how: str) -> None:
    """Once the watch over the creation of the group waited, which knew of nothing later."""
    if how == "killed":
        with pytest.raises(RankError) as caught:
            run(ends_before_its_call, 3, how, backend="gloo", ranks="processes", timeout=20)
        outcomes = [caught.value.outcomes[rank].value for rank in (0, 2)]
    else:
        outcomes = run(ends_before_its_call, 3, how, backend="gloo", ranks="processes", timeout=20)[::2]
    for kind, text in outcomes:
        assert text.startswith("call 1, all_reduce on rank ")
        assert kind == ("RankDiedError" if how == "killed" else "GroupAbortedError")
        assert ("rank 1 died (pid " if how == "killed" else "rank 1 failed: its program ended with ValueError") in text


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_write_that_autograd_does_not_notice_is_warned_of_once(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_sites, "warned_of", {})

    def program(rank: int) -> None:
        for tensor in (fill(rank, (3,)), fill(rank, (3,)).requires_grad_(), fill(rank, (3,)).requires_grad_() * 2):
            dist.all_reduce(tensor)
        dist.all_reduce(fill(rank, (3,)).requires_grad_().detach())

    with caplog.at_level(logging.WARNING, "torchdist_ref.debug"):
        run(program, 1, backend=backend)
    told = [record.message for record in caplog.records if "requires a gradient" in record.message]
    assert len(told) == 1 and told[0].startswith("all_reduce wrote a tensor that requires a gradient")
