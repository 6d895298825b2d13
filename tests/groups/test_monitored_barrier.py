"""monitored_barrier names all missing ranks on every survivor; and the debug level."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as theirs

import torchdist_ref as dist
from torchdist_ref.debug import levels
from torchdist_ref.testing import fill, run

SHORT = timedelta(seconds=0.2)


def stays_away(rank: int, absent: set[int]) -> tuple[str, list[float]]:
    text = ""
    if rank not in absent:
        with pytest.raises(dist.RankStalledError) as caught:
            dist.monitored_barrier(timeout=SHORT)
        text = str(caught.value)
    tensor = fill(rank, (3,))
    dist.all_reduce(tensor)
    return text, tensor.tolist()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("absent", [{0}, {2}, {1, 3}, {0, 1, 2}])
def test_every_waiting_rank_names_all_missing_ranks(absent: set[int], backend: str) -> None:
    found = run(stays_away, 4, absent, backend=backend)
    word = "Ranks" if len(absent) > 1 else "Rank"
    for rank, (text, total) in enumerate(found):
        names = ", ".join(map(str, sorted(absent)))
        expected = f"[Rank {rank}]: {word} {names} failed to pass monitoredBarrier in 200 ms (group 'world')."
        assert text.startswith(expected) if rank not in absent else text == ""
        assert total == sum(fill(r, (3,)) for r in range(4)).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_repeated_barriers_pass(world_size: int, ranks: str) -> None:
    def program(rank: int) -> None:
        for _ in range(3):
            dist.monitored_barrier(wait_all_ranks=rank % 2 == 0)

    run(program, world_size, ranks=ranks)


def test_no_rank_passes_before_all_have_arrived() -> None:
    came: list[int] = []

    def program(rank: int) -> int:
        came.append(rank)
        dist.monitored_barrier()
        return len(came)

    assert run(program, 4) == [4] * 4


def test_a_late_rank_raises_and_the_next_barrier_passes() -> None:
    gave_up = threading.Event()

    def program(rank: int) -> str:
        if rank == 1:
            assert gave_up.wait(10)
        with pytest.raises(dist.RankStalledError) as caught:
            dist.monitored_barrier(timeout=SHORT)
        gave_up.set()
        dist.monitored_barrier()
        return str(caught.value)

    first, late = run(program, 2)
    assert "[Rank 0]: Rank 1 failed" in first and "Check whether these ranks are alive" in first
    assert "[Rank 1]: Rank 1 failed" in late and "after the others had timed out" in late


def in_a_subgroup(rank: int) -> str:
    group = dist.new_group([1, 3])
    said = ""
    if rank in (0, 2):
        with pytest.warns(UserWarning, match="monitored_barrier on global rank"):
            dist.monitored_barrier(group)
    if rank == 1:
        with pytest.raises(dist.RankStalledError) as caught:
            dist.monitored_barrier(group, SHORT)
        said = str(caught.value)
    dist.barrier()
    return said


def test_missing_ranks_are_global_ranks() -> None:
    assert run(in_a_subgroup, 4, ranks="processes")[1].startswith("[Rank 1]: Rank 3 failed to pass")


def test_only_keys_of_the_last_barrier_remain_in_the_store() -> None:
    def program(rank: int) -> int:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        counts = []
        for _ in range(3):
            dist.monitored_barrier(group)
            dist.barrier(group)
            counts.append(len([key for key in group.store.list_keys() if "monitored/" in key]))
            dist.barrier(group)
        return counts[2] - counts[1]

    assert run(program, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("timeout", "kind", "words"),
    [(3, TypeError, "timedelta, got 3"), (timedelta(0), ValueError, "'timeout'.*more than zero")],
)
def test_misuse_raises_a_clear_error(timeout: Any, kind: type[Exception], words: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(kind, match=words):
            dist.monitored_barrier(timeout=timeout)

    run(program, 1)


@pytest.fixture
def level_as_before() -> Any:
    before = list(levels._level)
    yield
    levels._level[:] = before


@pytest.mark.parametrize(("said", "name"), [("detail", "DETAIL"), ("Info", "INFO"), ("OFF", "OFF"), (None, "OFF")])
def test_the_environment_sets_the_level(
    said: str | None, name: str, monkeypatch: pytest.MonkeyPatch, level_as_before: None
) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", said)
    levels._level.clear()
    assert dist.get_debug_level() == getattr(theirs.DebugLevel, name)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert dist.get_debug_level() == getattr(dist.DebugLevel, name), "asked once"
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.INFO


@pytest.mark.parametrize("said", ["", "LOUD", "1"])
def test_unknown_levels_are_refused_as_by_torch(
    said: str, monkeypatch: pytest.MonkeyPatch, level_as_before: None
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", said)
    dist.set_debug_level(dist.DebugLevel.INFO)
    for library in (dist, theirs):
        with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL"):
            library.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.INFO


def test_set_debug_level_requires_a_debug_level() -> None:
    with pytest.raises(TypeError, match=r"set_debug_level.*'level'.*'INFO'"):
        dist.set_debug_level("INFO")  # type: ignore[arg-type]
