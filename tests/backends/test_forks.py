"""A rank forks: the child answers questions as the rank, communicates with nobody, and harms no group."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

import torchdist_ref as dist
from tests.process_ends import answer_of_child
from torchdist_ref.debug.flight_recorder import LEFT
from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.testing import fill, run

LARGE = 300_000
# A child that hangs is killed by then, and its answer is empty.
HANGS = 20
REFUSED = "this process was forked from rank {rank}, so it can ask group "


def answer(ask: Callable[[], object]) -> str:
    """Return the answer of a forked child as text, or its error."""

    def asked() -> str:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS)
        return repr(ask())

    return answer_of_child(asked)


def answers(asked: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Return the answers of one forked child to several questions, by their names, and its errors."""

    def asked_in_turn() -> str:
        found = {}
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for name, ask in asked.items():
            signal.alarm(HANGS)
            try:
                found[name] = repr(ask())
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return json.dumps(found)

    text = answer_of_child(asked_in_turn)
    assert text, f"one of these hangs in a child: {', '.join(asked)}"
    return dict(json.loads(text))


def two_sum(rank: int, group: Any = None) -> bool:
    """Return whether a sum over two ranks is right."""
    tensor = fill(rank, (7,))
    dist.all_reduce(tensor, group=group)
    return torch.equal(tensor, fill(0, (7,)) + fill(1, (7,)))


# ---- memory and calls of the parent


def fork_and_go_on(rank: int) -> tuple[str, list[bool]]:
    tensor = dist.empty_registered(LARGE)
    tensor.copy_(fill(rank, (LARGE,)))
    held = [tensor]

    def let_go() -> str:
        held.clear()
        gc.collect()
        return ""

    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    said = answer(lambda: dist.all_reduce(torch.ones(3)))
    answer(let_go)
    work.wait()
    kept = torch.equal(tensor, fill(rank, (LARGE,)))
    dist.all_reduce(tensor)
    return said, [kept, torch.equal(tensor, fill(0, (LARGE,)) + fill(1, (LARGE,)))]


def test_a_call_of_a_child_is_refused_and_the_parents_memory_stays() -> None:
    for rank, (said, right) in enumerate(run(fork_and_go_on, 2, ranks="processes")):
        assert said == (
            f"DestroyedGroupError: all_reduce: {REFUSED.format(rank=rank)}'world' for ranks and sizes but cannot "
            "communicate in it: call all_reduce in the parent, or start this process by spawn and call "
            "init_process_group in it."
        )
        assert right == [True, True]


# ---- questions


def questions(rank: int) -> dict[str, Callable[[], object]]:
    """Return questions about groups and meshes, through both libraries."""
    pair = dist.new_group([1, 0], group_desc="pair", sort_ranks=False)
    assert isinstance(pair, dist.ProcessGroup)
    torchs = c10d.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    torchs_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))

    def of_mesh(grid: Any) -> Callable[[], object]:
        return lambda: (
            *(grid.get_rank(), grid.get_coordinate(), grid.get_local_rank("b"), grid.size(), grid["b"].size(0)),
            *(grid["b"].get_local_rank(), grid.get_group("b").size(), grid["b"].get_group().rank()),
        )

    def of_library(library: Any, group: Any) -> Callable[[], object]:
        return lambda: (
            *(library.is_initialized(), library.get_rank(), library.get_world_size(), library.get_backend()),
            *(library.get_rank(group), library.get_world_size(group), library.get_backend(group)),
            *(library.get_process_group_ranks(group), library.get_global_rank(group, 1)),
            *(library.get_group_rank(group, 0), library.group.WORLD is dist.group.WORLD is not None),
            *(library.get_backend_config(group), library.get_pg_count()),
        )

    return {
        "ours": of_library(dist, pair),
        "torch's": of_library(c10d, pair),
        "ours of torch's group": of_library(dist, torchs),
        "torch's of torch's group": of_library(c10d, torchs),
        "handle": lambda: (pair.rank(), pair.size(), pair.members, pair.group_name, pair.group_desc, repr(pair)),
        "mesh": of_mesh(mesh),
        "torch's mesh": of_mesh(torchs_mesh),
        "sampler": lambda: [*DistributedSampler(range(7), seed=3)],
        "grandchild": lambda: answer(lambda: (dist.get_rank(), c10d.get_rank())),
    }


def ask_twice(rank: int) -> dict[str, tuple[str, str]]:
    """Return what the rank and its child say to each question."""
    asked = questions(rank)
    said = answers(asked)
    return {name: (repr(ask()), said[name]) for name, ask in asked.items()}


@pytest.mark.parametrize(("backend", "ranks"), [("ref", "processes"), ("gloo", "processes"), ("ref", "threads")])
def test_a_child_answers_as_its_parent(backend: str, ranks: Any) -> None:
    asked = run(ask_twice, 2, backend=backend, ranks=ranks)
    for found in asked:
        for name, (parent, child) in found.items():
            assert (name, child.replace('"', "'")) == (name, parent.replace('"', "'"))
    assert asked[0]["ours"][1].startswith(f"(True, 0, 2, '{backend}', 1, 2, '{backend}', [1, 0], 0, 1, True")
    assert asked[1]["mesh"][1] == "(1, (0, 1), 1, 2, 2, 1, 2, 1)"


def test_a_child_of_the_fake_backend_answers() -> None:
    def program(rank: int) -> str:
        dist.init_process_group("fake", store=dist.HashStore(), rank=5, world_size=8)
        return answer(lambda: (dist.get_rank(), c10d.get_world_size(), dist.get_process_group_ranks(None)[-1]))

    assert run(program, 1, init=False) == ["(5, 8, 7)"]


class Shards(IterableDataset[int]):
    """Twelve items, of which each worker of each rank reads its share, if it is told that there are ranks."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __iter__(self) -> Iterator[int]:
        ranks, rank, worker = 1, 0, get_worker_info()
        if self.library is None:
            # As webdataset asks.
            world = c10d.group.WORLD
            if world is not None:
                rank, ranks = c10d.get_rank(group=world), c10d.get_world_size(group=world)
        elif self.library.is_initialized():
            rank, ranks = self.library.get_rank(), self.library.get_world_size()
        assert worker is not None
        return iter(range(12)[rank::ranks][worker.id :: worker.num_workers])


def read(rank: int) -> list[list[int]]:
    found = []
    for library in (dist, c10d, None):
        loader = DataLoader(Shards(library), num_workers=2, multiprocessing_context="fork")
        found.append([int(item) for batch in loader for item in batch])
        assert two_sum(rank)
    return found


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_workers_of_a_data_loader_read_each_item_once(backend: str) -> None:
    for shares in zip(*run(read, 2, backend=backend, ranks="processes"), strict=True):
        assert [len(share) for share in shares] == [6, 6]
        assert sorted([*shares[0], *shares[1]]) == [*range(12)]


def load(rank: int) -> float:
    total = 0.0
    for (batch,) in DataLoader(TensorDataset(torch.arange(24.0)), batch_size=8, num_workers=2):
        part = batch.sum() * (rank + 1)
        dist.all_reduce(part)
        total += part.item()
    return total


def test_workers_of_a_data_loader_may_be_forked_between_calls() -> None:
    assert run(load, 2, ranks="processes") == [3 * 276.0] * 2


# ---- communication


def coalesced(tensor: torch.Tensor) -> None:
    with dist._coalescing_manager():  # noqa: SLF001 - torch's name
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)


def calls(rank: int, group: Any, torchs: Any) -> dict[str, Callable[[], object]]:
    """Return calls that would communicate, by the operation that their error names."""
    one, several, other = torch.ones(2), [torch.ones(2), torch.ones(2)], 1 - rank
    objects: list[Any] = [None, None]
    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_reduce async": lambda: dist.all_reduce(one, async_op=True),
        "all_reduce subgroup": lambda: dist.all_reduce(one, group=group),
        "all_reduce of torch": lambda: c10d.all_reduce(one),
        "all_reduce ours on torch's group": lambda: dist.all_reduce(one, group=torchs),
        "all_reduce functional": lambda: functional.all_reduce(one, "sum", group) + 0,
        "all_reduce coalesced": lambda: coalesced(one),
        "reduce": lambda: dist.reduce(one, 0),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather(several, one),
        "gather": lambda: dist.gather(one, several if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(one, several if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, several),
        "all_to_all": lambda: dist.all_to_all(several, [one, one]),
        "barrier": dist.barrier,
        "barrier of torch": c10d.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "monitored_barrier of the handle": group.monitored_barrier,
        "send": lambda: dist.send(one, other),
        "recv": lambda: dist.recv(one, other),
        "recv any": lambda: dist.recv(one),
        "send batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one, other)]),
        "all_gather_object": lambda: dist.all_gather_object(objects, 1),
        "gather_object": lambda: dist.gather_object(1, objects if rank == 0 else None),
        "broadcast_object_list": lambda: dist.broadcast_object_list(objects, 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], objects, 0),
        "send_object_list": lambda: dist.send_object_list(objects, other),
        "recv_object_list": lambda: dist.recv_object_list(objects, other),
        "new_group": lambda: dist.new_group([rank]),
        "new_group local": lambda: dist.new_group([0, 1], use_local_synchronization=True),
        "new_group of torch": lambda: c10d.new_group([rank]),
        "split_group": lambda: dist.split_group(group, [[0], [1]]),
        "new_subgroups": lambda: dist.new_subgroups(1),
        "shrink_group": lambda: dist.shrink_group([other]),
        "new_group of a mesh": lambda: dist.init_device_mesh("cpu", (2, 1)),
        "new_group of a mesh of torch": lambda: init_device_mesh("cpu", (2, 1)),
        "all_gather DDP": lambda: DistributedDataParallel(torch.nn.Linear(1, 1)),
        "store.get": lambda: group.store.get("key"),
        "store.set": lambda: c10d.distributed_c10d._get_default_store().set("key", ""),
    }


def refused(rank: int) -> dict[str, str]:
    group, torchs = dist.new_group([0, 1], group_desc="pair"), c10d.new_group([0, 1])
    made = calls(rank, group, torchs)
    # One rank's child is enough.
    said = answers(made) if rank == 0 else {}
    assert two_sum(rank) and two_sum(rank, group) and two_sum(rank, torchs)
    return said


@pytest.mark.parametrize(("backend", "ranks"), [("ref", "processes"), ("gloo", "threads")])
def test_each_kind_of_communication_is_refused_in_a_child(backend: str, ranks: Any) -> None:
    said = run(refused, 2, backend=backend, ranks=ranks)[0]
    assert len(said) == 39
    for name, text in said.items():
        # Where torch makes the group, the store of the default group refuses.
        operation = (
            "store.set" if backend == "gloo" and "of torch" in name and "new" in name else name.partition(" ")[0]
        )
        assert text.startswith(f"DestroyedGroupError: {operation}: {REFUSED.format(rank=0)}"), (name, text)
        assert f"call {operation} in the parent" in text, (name, text)


def wait_in_child(rank: int) -> list[str]:
    tensor = torch.zeros(3)
    work = dist.irecv(tensor, 1 - rank)
    assert work is not None
    future, ended = work.get_future(), dist.all_reduce(torch.ones(1), async_op=True)
    assert ended is not None
    ended.wait()
    said = [answer(work.wait), answer(future.wait), answer(work.is_completed), answer(ended.wait)]
    # The other rank has asked too: once a message arrived before that.
    dist.barrier()
    dist.send(fill(rank, (3,)), 1 - rank)
    work.wait()
    assert torch.equal(tensor, fill(1 - rank, (3,)))
    return said


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_wait_for_a_call_that_the_parent_has_made_is_refused(backend: str) -> None:
    for waits, future, completed, ended in run(wait_in_child, 2, backend=backend, ranks="processes"):
        assert "GroupAbortedError: recv: this call was made before this process was forked" in waits
        assert "wait for it in the parent" in future and (completed, ended) == ("False", "True")


# ---- a group of the child's own


def again(forget: Callable[[], object]) -> object:
    """Forget the parent's groups, and make one of the child's own."""
    with pytest.raises(ValueError, match=r"process group twice!.* destroy_process_group first"):
        dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    forget()
    found = [dist.is_initialized(), c10d.is_initialized()]
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    tensor = fill(4, (3,))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [*found, torch.equal(tensor, fill(4, (3,)))]


def forget_parts(group: Any) -> object:
    """Destroy one group in a child: the others still answer."""
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="destroyed"):
        dist.get_rank(group)
    return dist.get_rank(), dist.is_initialized()


def start_anew(rank: int) -> list[str]:
    group = dist.new_group([0, 1])
    found = [answer(partial(again, forget)) for forget in (dist.destroy_process_group, c10d.destroy_process_group)]
    found.append(answer(lambda: forget_parts(group)))
    assert two_sum(rank) and two_sum(rank, group)
    return found


@pytest.mark.parametrize(("backend", "ranks"), [("ref", "threads"), ("gloo", "processes")])
def test_a_child_forgets_its_parents_groups_and_makes_its_own(backend: str, ranks: Any) -> None:
    for rank, found in enumerate(run(start_anew, 2, backend=backend, ranks=ranks)):
        assert found == ["[False, False, True]"] * 2 + [f"({rank}, True)"]


def test_process_ranks_may_be_started_by_a_rank() -> None:
    assert run(lambda rank: run(two_sum, 2, ranks="processes"), 1) == [[True, True]]


# ---- ends of the child

# Forks two ranks for each backend, so that torch is loaded once. Each rank forks a child for each end, which ends as a
# program does.
OUTLIVE = """
import json, os, signal, sys, torch
import torchdist_ref as dist
from torchdist_ref.debug.flight_recorder import listener
from torchdist_ref.testing import fill

folder, ends = sys.argv[1], sys.argv[2:]

def right(rank, group=None):
    tensor = fill(rank, (7,))
    dist.all_reduce(tensor, group=group)
    return torch.equal(tensor, fill(0, (7,)) + fill(1, (7,)))

def outlive(rank, backend):
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{backend}/error{rank}"
    os.environ["TORCHDIST_REF_FLIGHT_RECORDER_DIR"] = f"{folder}/{backend}/dumps{rank}"
    store = dist.FileStore(f"{folder}/{backend}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    group, found = dist.new_group([0, 1]), []
    for end in ends:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            # A file of its own: lines that two processes write to one pipe mix.
            os.dup2(os.open(f"{folder}.{backend}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
            exec(end)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        made = dist.new_group([0, 1])
        found.append([code, right(rank), right(rank, group), right(rank, made)])
    answers = listener._thread is not None
    dist.destroy_process_group()
    os.write(1, (json.dumps([backend, rank, found, answers]) + chr(10)).encode())
    sys.exit()

for backend in ("ref", "gloo"):
    os.mkdir(f"{folder}/{backend}")
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[rank]:
            outlive(rank, backend)
    for pid in ranks:
        os.waitpid(pid, 0)
"""
ENDS = {
    "os._exit(0)": 0,
    "sys.exit()": 0,
    "raise ZeroDivisionError('in the child')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "dist.destroy_process_group(); sys.exit()": 0,
}


def test_no_end_of_a_child_reaches_the_parents_groups(python_with_torch: str, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    command = [python_with_torch, "-c", OUTLIVE, str(folder), *ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = sorted(map(json.loads, done.stdout.splitlines()))
    expected = [[code, True, True, True] for code in ENDS.values()]
    assert lines == [[name, rank, expected, True] for name in ("gloo", "ref") for rank in (0, 1)], done.stderr
    # No record of a failure. On gloo, a rank that leaves dumps its calls. The store's last user has removed its file.
    left = {path.name: json.loads(path.read_text())["reason"] for path in folder.rglob("*") if path.is_file()}
    assert left == dict.fromkeys(("rank0.json", "rank1.json"), LEFT) and not [*folder.glob("ref/*")]
    errors = [path.read_text() for path in tmp_path.glob("folder.*")]
    assert [text.count("ZeroDivisionError: in the child") for text in errors] == [1] * 4


# ---- groups that torch makes


def fork_in_a_group_of_torchs(rank: int, path: str) -> tuple[list[str], list[str], list[float]]:
    """Return what a forked child answers, what its calls raise, and the parents' next sum."""
    timeout = timedelta(seconds=5)
    c10d.init_process_group("ref", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timeout)
    tensor, group = torch.full((2,), 10.0 * (rank + 1)), c10d.new_group([0, 1])
    asked: list[Callable[[], object]] = [
        lambda: (c10d.is_initialized(), c10d.get_rank(), c10d.get_world_size(group), c10d.get_backend()),
        lambda: [*DistributedSampler(range(6), shuffle=False)],
    ]
    calls: list[Callable[[], object]] = [
        lambda: c10d.all_reduce(torch.ones(2)),
        lambda: c10d.all_reduce(torch.ones(2), async_op=True, group=group),
        lambda: c10d.send(torch.ones(2), 1 - rank),
        lambda: c10d.new_group([0, 1]),
        c10d.destroy_process_group,
    ]
    answers, said = [*map(answer, asked)], [*map(answer, calls)]
    c10d.all_reduce(tensor, group=group)
    c10d.destroy_process_group()
    return answers, said, tensor.tolist()


def test_a_child_of_a_group_of_torchs(tmp_path: Path) -> None:
    found = run(fork_in_a_group_of_torchs, 2, str(tmp_path / "store"), init=False, ranks="processes")
    for rank, (answers, said, total) in enumerate(found):
        assert answers == [f"(True, {rank}, 2, 'ref')", f"[{rank}, {rank + 2}, {rank + 4}]"]
        assert [text.partition(":")[0] for text in said] == ["DestroyedGroupError"] * 4 + ["None"], said
        assert REFUSED.format(rank=rank) in said[0] and "group 'undefined'" not in said[1]
        assert total == [30.0, 30.0]
