"""Backend `nccl` without a GPU: error messages, backend names by device, and the calls of torch's object.

What only a device can show is in `test_on_gpu`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import torchdist_ref as dist
from tests.backends.nccl_stand_in import Event, OnStream, StandIn, TableStandIn, instead_of_nccl
from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.registry import default_name, names_by_device
from torchdist_ref.backends.torch_native import nccl
from torchdist_ref.calls import Barrier
from torchdist_ref.stores import PrefixStore
from torchdist_ref.testing import fill, run

ROOT = Path(__file__).parents[2]
ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}


def refusal(monkeypatch: pytest.MonkeyPatch, built: bool, backend: str = "nccl") -> str:
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="backend 'nccl' can't be used") as caught:
        dist.init_process_group(backend, store=dist.HashStore(), **ALONE)
    assert isinstance(caught.value, dist.UnsupportedError) and caught.value.definite and not dist.is_initialized()
    return str(caught.value)


def test_a_torch_without_nccl_names_the_remedy_and_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(monkeypatch, built=False)
    assert torch.__version__ in text and "built without NCCL" in text
    assert "CUDA build of torch" in text and "'ref'" in text and "'gloo'" in text


def test_a_missing_cuda_device_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    text = refusal(monkeypatch, built=True, backend="cpu:ref,cuda:nccl")
    assert "no CUDA device" in text and "CUDA_VISIBLE_DEVICES: 7" in text and "nvidia-smi" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smoke", "one of.*nccl.*got 'smoke'.*'smoke'"),
        ("cpu:smoke", "No backend is called 'smoke'"),
        ("cpu:ref,cpu:gloo", "one for each kind of device.*got 'cpu:ref,cpu:gloo'"),
        ("gloo,cuda:nccl", "one for each kind of device"),
        ("potato:gloo", "one for each kind of device"),
        ("cpu:0:gloo", "one for each kind of device"),
        ("", "No backend is called ''"),
    ],
)
def test_unknown_backend_names_are_refused_before_any_wait(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dist.init_process_group(name, init_method="tcp://192.0.2.1:1", **ALONE)


def test_names_of_other_backends_on_nccl_are_known_where_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nccl` itself is the entry of torch's table, if there is one: what the installed torch means by the name."""
    names = ("nccl2", "nccl-lazy", "nccl-legacy")
    instead_of_nccl(monkeypatch)
    assert not any(map(dist.is_backend_available, names))
    with pytest.raises(ValueError, match="No backend is called 'nccl2'"):
        dist.init_process_group("nccl2", store=dist.HashStore(), **ALONE)
    instead_of_nccl(monkeypatch, in_table=True)
    assert all(map(dist.is_backend_available, names))
    monkeypatch.setattr(nccl.Nccl, "device", "cpu")
    device = torch.device("cpu", 0)
    for name in ("nccl", *names):
        dist.init_process_group(name, store=dist.HashStore(), device_id=device, **ALONE)
        made: Any = dist.get_backend_impl()
        tensor = fill(1, (2,))
        dist.all_reduce(tensor)
        assert dist.get_backend() == name and dist.get_backend_config() == f"cuda:{name}"
        assert type(made) is TableStandIn and isinstance(made.options, StandIn.Options)
        assert made.bound == device or not hasattr(dist_options(), "process_group")
        assert torch.equal(tensor, fill(1, (2,))) and made.options._timeout.total_seconds() > 1
        dist.destroy_process_group()


def dist_options() -> Any:
    return c10d.distributed_c10d._DistributedBackendOptions()


def test_names_by_device() -> None:
    assert names_by_device("CPU:GLOO, cuda:NCCL") == {"cpu": "gloo", "cuda": "nccl"}
    assert names_by_device("Ref") == {"": "ref"}


def test_the_default_backend_includes_nccl_if_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_name(dist.HashStore(), 0, 1) == "ref"
    instead_of_nccl(monkeypatch)
    assert default_name(dist.HashStore(), 0, 1) == "cpu:ref,cuda:nccl"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_nccl(monkeypatch)


def on_nccl(rank: int, program: Any, size: int, path: str) -> Any:
    dist.init_process_group("nccl", store=dist.FileStore(path, size), rank=rank, world_size=size)
    try:
        # Gloo, which stands in, connects in its constructor: a rank that left meanwhile would end that of another.
        dist.barrier()
        return program(rank, size)
    finally:
        dist.destroy_process_group()


def ran(program: Any, tmp_path: Any, size: int = 2) -> list[Any]:
    return run(on_nccl, size, program, size, f"{tmp_path}.meet", init=False, ranks="processes")


def collectives(rank: int, size: int) -> list[torch.Tensor]:
    """Every operation once, on strided tensors too."""
    total, column = fill(rank, (4, 3)), fill(rank, (4, 3)).t()[1]
    dist.all_reduce(total)
    dist.all_reduce(column, dist.ReduceOp.MAX)
    gathered, scattered = [torch.zeros(3) for _ in range(size)], torch.zeros(3)
    dist.all_gather(gathered, fill(rank, (3,)))
    dist.reduce_scatter(scattered, [fill(rank + 10 * block, (3,)) for block in range(size)])
    mine = torch.zeros(2)
    dist.scatter(mine, [fill(7 * r, (2,)) for r in range(size)] if rank == 0 else None, src=0)
    at_root = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    dist.gather(fill(rank, (2,)), at_root, dst=1)
    reduced, sent = fill(rank, (2,)), fill(rank, (5,))
    dist.reduce(reduced, dst=0)
    dist.broadcast(sent, src=1)
    dist.barrier()
    return [total, column, *gathered, scattered, mine, *(at_root or []), reduced if rank == 0 else mine, sent]


@pytest.fixture
def stand_in_of_table(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_nccl(monkeypatch, in_table=True)


@pytest.mark.parametrize("which", ["stand_in", "stand_in_of_table"])
def test_calls_give_the_expected_values(which: str, request: pytest.FixtureRequest, tmp_path: Any) -> None:
    request.getfixturevalue(which)
    for rank, got in enumerate(ran(collectives, tmp_path)):
        first, second = fill(0, (4, 3)), fill(1, (4, 3))
        wanted = [first + second, torch.maximum(first.t()[1], second.t()[1]), fill(0, (3,)), fill(1, (3,))]
        wanted += [fill(10 * rank, (3,)) + fill(1 + 10 * rank, (3,)), fill(7 * rank, (2,))]
        wanted += [fill(0, (2,)), fill(1, (2,))] if rank == 1 else []
        wanted += [fill(0, (2,)) + fill(1, (2,)) if rank == 0 else fill(7, (2,)), fill(1, (5,))]
        for result, value in zip(got, wanted, strict=True):
            assert torch.equal(result, value)


def orders(rank: int, size: int) -> tuple[list[str], list[str], list[float]]:
    """A strided output is brought back once, by who waits first; whoever waits later comes after that."""
    base = fill(rank, (3, 2))
    work = dist.all_reduce(base.t()[0], async_op=True)
    assert work is not None and work.wait()
    first = list(Event.log)
    base.t()[0].add_(100)
    assert work.wait() and work.is_completed() and work.get_future().wait()[0] is work.result()[0]
    return first, list(Event.log), base.t()[0].tolist()


def test_a_later_stream_waits_for_the_copies_of_the_first(stand_in: None, tmp_path: Any) -> None:
    wanted = (fill(0, (3, 2)).t()[0] + fill(1, (3, 2)).t()[0] + 100).tolist()
    for first, later, values in ran(orders, tmp_path):
        assert first == ["record"] and later[1:] == ["wait"] * 4 and values == wanted


def test_a_call_is_complete_when_its_event_has_passed(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was complete as soon as it was on its stream, for callers and in the flight recorder."""
    start = StandIn.__getattr__

    def on_stream(self: StandIn, *arguments: Any) -> OnStream:
        return OnStream(start(self, "allreduce")(*arguments))

    monkeypatch.setattr(StandIn, "allreduce", on_stream, raising=False)
    monkeypatch.setattr(OnStream, "passed", False)
    dist.init_process_group("nccl", store=dist.HashStore(), **ALONE)
    try:
        recorder = dist.group.WORLD.recorder  # type: ignore[union-attr]
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        assert all(work is not None and work.wait() and not work.is_completed() for work in works)
        assert [event.state for event in recorder.events()] == ["started", "started"] and len(recorder) == 0
        OnStream.passed = True
        assert [event.state for event in recorder.events()] == ["completed", "completed"] and len(recorder) == 2
        assert all(work is not None and work.is_completed() and work.is_success() for work in works)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("current", "local", "used", "wanted"),
    [(0, "3", None, 3), (0, None, None, 1), (2, "3", None, 2), (0, "3", "cpu:2", 2), (3, None, "cpu:1", 1)],
    ids=["launched", "without a launcher", "set by the program", "used before", "used, on a thread with another"],
)
def test_a_barrier_runs_on_the_device_that_the_group_uses(
    stand_in: None, monkeypatch: pytest.MonkeyPatch, current: int, local: str | None, used: str | None, wanted: int
) -> None:
    """Every rank took the current device of the calling thread: the first one on a thread that had set none."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    given = Membership(PrefixStore("one", dist.HashStore()), 0, (5,), "one", 5.0)
    backend = nccl.Nccl(given)
    try:
        if used is not None:
            # A tensor of the CPU has no number of a device; that of a stand-in for one does.
            monkeypatch.setattr(backend, "used", torch.device(used))
        backend.submit(Barrier(), [], [], True)
        assert StandIn.barriers == [torch.device("cpu", wanted)]
    finally:
        backend.close()


def test_a_barrier_follows_the_tensors_of_earlier_calls(stand_in: None) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), **ALONE)
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()
    assert StandIn.barriers == [torch.device("cpu")]


UNDESTROYED = """
import atexit
# The function that is registered first runs last.
atexit.register(lambda: print("threads ended:", StandIn.ended))
import pytest, torch, torchdist_ref as dist
from tests.backends.nccl_stand_in import StandIn, instead_of_nccl
instead_of_nccl(pytest.MonkeyPatch())
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
"""


def test_threads_in_cpp_end_before_the_interpreter_does() -> None:
    """Its watchdog calls our store, and a thread that enters Python during finalization aborts the process."""
    done = subprocess.run([sys.executable, "-c", UNDESTROYED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "threads ended: ['shutdown']\n"), done.stderr


def uneven(rank: int, size: int) -> list[float]:
    given, taken = [1 + rank + to for to in range(size)], [1 + source + rank for source in range(size)]
    output = torch.zeros(sum(taken))
    dist.all_to_all_single(output, fill(rank, (sum(given),)), taken, given)
    return output.tolist()


def swapped(rank: int, size: int) -> tuple[bool, list[float]]:
    peer, got = 1 - rank, torch.zeros(3)
    ops = [dist.P2POp(dist.isend, fill(rank, (3,)), peer), dist.P2POp(dist.irecv, got, peer)]
    works = dist.batch_isend_irecv(ops)
    return all(work.wait() for work in works), got.tolist()


def early(rank: int, size: int) -> tuple[bool, bool]:
    got = torch.zeros(3)
    with dist.group.WORLD.backend.coalescing():  # type: ignore[union-attr]
        works = [dist.isend(fill(rank, (3,)), 1 - rank), dist.irecv(got, 1 - rank)]
        before = any(work.is_completed() for work in works if work)
    return before, all(work.wait() and work.is_completed() for work in works if work)


def test_messages_of_a_batch_are_coalesced(stand_in: None, tmp_path: Any) -> None:
    assert ran(swapped, tmp_path / "a") == [(True, fill(1, (3,)).tolist()), (True, fill(0, (3,)).tolist())]
    assert ran(early, tmp_path / "b") == [(False, True)] * 2
    first, second = fill(0, (3,)).tolist(), fill(1, (5,)).tolist()
    assert ran(uneven, tmp_path / "c") == [[first[0], *second[:2]], [*first[1:], *second[2:]]]


def refused(rank: int, size: int) -> list[str]:
    texts = []
    for attempt in (
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.BOR),
        lambda: dist.send(torch.ones(2), 1 - rank, tag=3),
        lambda: dist.recv(torch.ones(2)),
    ):
        with pytest.raises(dist.UnsupportedError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def test_unsupported_operations_of_nccl_name_a_backend_that_supports_them(stand_in: None, tmp_path: Any) -> None:
    words = ["is on meta.*cpu:gloo,cuda:nccl", "'bor'.*'ref' or 'gloo'", "no tag 3", "no receive from any rank"]
    for texts in ran(refused, tmp_path):
        for text, word in zip(texts, words, strict=True):
            with pytest.raises(AssertionError, match=word):
                raise AssertionError(text)


def many(rank: int, size: int) -> list[Any]:
    tensors, objects = [fill(rank, (3,))], [None] * size
    dist.all_reduce_multigpu(tensors)
    evens = dist.new_group([1])
    return [tensors[0].tolist(), dist.get_backend(), dist.get_rank(evens), len(StandIn.made), objects]


def test_lists_of_one_and_groups(stand_in: None, tmp_path: Any) -> None:
    total = (fill(0, (3,)) + fill(1, (3,))).tolist()
    assert [got[:4] for got in ran(many, tmp_path)] == [[total, "nccl", -1, 1], [total, "nccl", 0, 2]]


def test_options_and_the_device_reach_torchs_object(stand_in: None) -> None:
    chosen = StandIn.Options()
    chosen.is_high_priority_stream = True
    where: Any = {"store": dist.HashStore(), **ALONE}
    dist.init_process_group("nccl", pg_options=chosen, device_id=torch.device("cpu:0"), **where)
    dist.destroy_process_group()
    made = StandIn.made[0]
    assert made.options is chosen and made.connected == torch.device("cpu:0")
    assert (chosen._timeout, chosen.global_ranks_in_group) == (dist.default_pg_timeout, [0])
    with pytest.raises(TypeError, match=r"'pg_options'.*ProcessGroupNCCL.Options.*'fast'"):
        dist.init_process_group("nccl", pg_options="fast", **where)
    with pytest.raises(ValueError, match=r"'device_id'.*with its number.*'cpu'"):
        dist.init_process_group("nccl", device_id="cpu", **where)
    assert nccl.Nccl.device == "cpu"
