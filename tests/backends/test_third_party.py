"""Third-party backends that are registered with torch, in Python and in C++, under our `init_process_group`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as c10d

import torchdist_ref as dist
from torchdist_ref.testing import fill, run


class Borrowing(c10d.ProcessGroup):
    """A process group in Python, as torch documents them, that has Gloo do some of the work."""

    seen: ClassVar[list[str]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "borrowing"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self.seen.append("allreduce")
        return self._gloo.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        self.seen.append("broadcast")
        return Futureless(self._gloo.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self.seen.append("allgather")
        return self._gloo.allgather(outputs, inputs, opts)


class Futureless(c10d.Work):
    """A work that can be waited for and nothing else."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self._theirs = theirs

    def wait(self, timeout: Any = None) -> bool:
        return bool(self._theirs.wait())


@pytest.fixture
def registered() -> Iterator[list[Any]]:
    """Both forms of torch's registration, and what the longer one was called with; forgotten afterwards."""
    given: list[Any] = []

    def extended(facts: Any, options: Any) -> Borrowing:
        given.append((facts.group_rank, facts.group_size, facts.global_ranks_in_group, facts.group_id, options))
        return Borrowing(facts.store, facts.group_rank, facts.group_size, facts.timeout)

    c10d.Backend.register_backend("borrowing", Borrowing, devices=["cpu"])
    c10d.Backend.register_backend("borrowing_more", extended, extended_api=True, devices=["cpu"])
    yield given
    forget("borrowing", "borrowing_more")


def forget(*names: str) -> None:
    for name in names:
        for table in (c10d.Backend._plugins, c10d.Backend.backend_capability, c10d.Backend.backend_type_map):
            table.pop(name, None)
            table.pop(name.upper(), None)
        c10d.Backend.backend_list.remove(name)
        delattr(c10d.Backend, name.upper())


def values(rank: int, size: int) -> list[torch.Tensor]:
    total, column, sent = fill(rank, (4, 3)), fill(rank, (4, 3)).t()[1], fill(rank, (5,))
    everybody = [torch.zeros(2) for _ in range(size)]
    dist.all_reduce(total)
    work = dist.all_reduce(column, dist.ReduceOp.MAX, async_op=True)
    assert work is not None and work.get_future().wait() == [column]
    dist.all_gather(everybody, fill(rank, (2,)))
    sending = dist.broadcast(sent, src=1, async_op=True)
    assert sending is not None and sending.get_future().wait()[0] is sent and sending.is_completed()
    return [total, column, *everybody, sent]


def on_theirs(rank: int, backend: str, path: str, size: int) -> Any:
    dist.init_process_group(backend, store=dist.FileStore(path, size), rank=rank, world_size=size, pg_options="fast")
    try:
        got = values(rank, size)
        with pytest.raises(dist.DistBackendError, match=rf"barrier.*on rank {rank} .*failed in backend '{backend}'"):
            dist.barrier()
        events = [(event.call.op, event.state) for event in dist.group.WORLD.recorder]  # type: ignore[union-attr]
        completed = [(op, "completed") for op in ("all_reduce", "all_reduce", "all_gather", "broadcast")]
        assert events == [*completed, ("barrier", "failed")]
        return got, list(Borrowing.seen), dist.get_backend()
    finally:
        dist.destroy_process_group()


def expected() -> list[torch.Tensor]:
    first, second = fill(0, (4, 3)), fill(1, (4, 3))
    largest = torch.maximum(first.t()[1], second.t()[1])
    return [first + second, largest, fill(0, (2,)), fill(1, (2,)), fill(1, (5,))]


@pytest.mark.parametrize("backend", ["borrowing", "borrowing_more"])
def test_a_python_backend_of_torchs_works_on_our_groups(registered: Any, backend: str, tmp_path: Any) -> None:
    assert dist.is_backend_available(backend) and dist.is_backend_available(f"cpu:{backend}")
    for got, seen, name in run(on_theirs, 2, backend, f"{tmp_path}.meet", 2, init=False, ranks="processes"):
        assert all(torch.equal(result, wanted) for result, wanted in zip(got, expected(), strict=True))
        assert seen == ["allreduce", "allreduce", "allgather", "broadcast"] and name == backend


def test_the_extended_api_gets_the_groups_options(registered: list[Any]) -> None:
    dist.init_process_group(
        "borrowing_more", store=dist.HashStore(), rank=0, world_size=1, group_name="all of us", pg_options="fast"
    )
    dist.new_group([0])
    dist.destroy_process_group()
    assert registered == [(0, 1, [0], "all of us", "fast"), (0, 1, [0], "group 1", None)]


def test_a_backend_that_fails_to_connect_is_named(registered: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no cable")

    c10d.Backend.register_backend("broken", broken, devices=["cpu"])
    with pytest.raises(dist.DistBackendError, match=r"backend 'broken' could not connect on rank 0.*no cable"):
        dist.init_process_group("broken", store=dist.HashStore(), rank=0, world_size=1)
    forget("broken")
    with pytest.raises(ValueError, match="No backend is called 'broken'"):
        dist.init_process_group("broken", store=dist.HashStore(), rank=0, world_size=1)


SOURCE = r"""
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <pybind11/chrono.h>

// Sums through the store: each rank writes its numbers there and reads everybody's.
struct Done : c10d::Work {
  bool wait(std::chrono::milliseconds) override { return true; }
  bool isCompleted() override { return true; }
};

struct ThroughStore : c10d::Backend {
  ThroughStore(c10::intrusive_ptr<c10d::Store> store, int rank, int size) : Backend(rank, size), store_(store) {}

  const std::string getBackendName() const override { return "through_store"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    auto& tensor = tensors.at(0);
    auto* bytes = static_cast<uint8_t*>(tensor.data_ptr());
    auto prefix = "call" + std::to_string(calls_++) + "/";
    store_->set(prefix + std::to_string(getRank()), std::vector<uint8_t>(bytes, bytes + tensor.nbytes()));
    auto total = at::zeros_like(tensor);
    for (int rank = 0; rank < getSize(); ++rank) {
      auto theirs = store_->get(prefix + std::to_string(rank));
      total += at::from_blob(theirs.data(), tensor.sizes(), tensor.options());
    }
    tensor.copy_(total);
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int calls_ = 0;
};

c10::intrusive_ptr<c10d::Backend> create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::chrono::milliseconds&) {
  return c10::make_intrusive<ThroughStore>(store, rank, size);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("create", &create); }
"""


def summed(rank: int, path: str, size: int) -> Any:
    dist.init_process_group("through_store", store=dist.FileStore(path, size), rank=rank, world_size=size)
    tensor, column = fill(rank, (3, 2)), fill(rank, (4, 3)).t()[1]
    dist.all_reduce(tensor)
    work = dist.all_reduce(column, async_op=True)
    assert work is not None
    work.get_future().wait()
    with pytest.raises(dist.DistBackendError, match=r"barrier.*backend 'through_store'"):
        dist.barrier()
    dist.destroy_process_group()
    return tensor, column


# Minutes on two busy cores: a C++ compiler reads torch's headers.
@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_cpp_backend_of_torchs_works_on_our_groups(tmp_path: Any) -> None:
    from torch.utils import cpp_extension

    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("there is no C++ compiler here, or no ninja")
    built = cpp_extension.load_inline("through_store", SOURCE, build_directory=str(tmp_path), extra_cflags=["-O0"])
    c10d.Backend.register_backend("through_store", built.create, devices=["cpu"])
    results = run(summed, 2, f"{tmp_path}.meet", 2, init=False, ranks="processes")
    forget("through_store")
    for tensor, column in results:
        assert torch.equal(tensor, fill(0, (3, 2)) + fill(1, (3, 2)))
        assert torch.equal(column, fill(0, (4, 3)).t()[1] + fill(1, (4, 3)).t()[1])
