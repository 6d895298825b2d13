"""Every backend's calls show in torch's profilers under their names, from start to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.torch_versions import torch_has
from torchdist_ref.testing import run


def named(events: Any, backend: str) -> list[str]:
    return sorted(event.name for event in events if event.name.startswith(f"{backend}:"))


def calls(peer: int) -> None:
    tensor, got = torch.ones(4), torch.zeros(4)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait()
    dist.barrier()
    sending = dist.isend(tensor, peer)
    dist.recv(got, peer)
    assert sending is not None and sending.wait()


def watched(rank: int) -> list[list[str]]:
    backend, cpu = dist.get_backend(), [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as new:
        calls(1 - rank)
    with torch.autograd.profiler.profile(acc_events=True) as old:
        calls(1 - rank)
    return [named(new.events(), backend), named(old.function_events, backend)]


# Over a second: the profiler of torch takes that to start and to stop, on each rank.
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_both_profilers_show_the_calls(backend: str) -> None:
    names = ["all_reduce", "all_reduce", "barrier", "recv", "send"]
    wanted = [[f"{backend}:{name}" for name in names]] * 2
    assert run(watched, 2, backend=backend, ranks="processes") == [wanted] * 2


def late(rank: int) -> bool:
    """A call that nobody waits for ends with its range, not where it was started."""
    with torch.autograd.profiler.profile(acc_events=True) as seen:
        with torch.autograd.profiler.record_function("before the others came"):
            work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
        dist.barrier(dist.new_group())
        work = work or dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.get_future().wait()
    ends = {event.name: event.time_range.end for event in seen.function_events}
    return bool(rank or ends["ref:all_reduce"] > ends["before the others came"])


def test_a_range_ends_with_its_call() -> None:
    assert all(run(late, 2, ranks="processes"))


def stopped_at_once(rank: int) -> list[int]:
    """Rank 1's profiler stops as soon as it may; rank 0's while its last call is on its way."""
    seen, other = [], dist.new_group()
    for _ in range(20):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            assert work is not None and work.wait()
            late = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
        dist.barrier(other)
        late = late or dist.all_reduce(torch.ones(4), async_op=True)
        assert late is not None and late.wait()
        seen.append(len(named(profile.events(), "ref")))
    return seen


# Over a second: a range that outlives its profiler kills the process in about one of ten rounds, so there are twenty.
def test_a_profiler_may_stop_at_any_time() -> None:
    # Older profilers leave out a range that ends after they stop.
    on_rank_0 = 2 if torch_has("2.12") else 1
    assert run(stopped_at_once, 2, ranks="processes") == [[on_rank_0] * 20, [1] * 20]


def test_backend_fake_has_profiler_ranges_too() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=512)
    with torch.autograd.profiler.profile(acc_events=True) as seen:
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    assert named(seen.function_events, "fake") == ["fake:all_reduce"]
