"""torch.compile, torch.export, make_fx and modes of torch's dispatcher on our calls, beside torch's on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import torchdist_ref as dist
from tests.backends.inside_torch import kept
from torchdist_ref.testing import fill, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
Program = Callable[[Any, int, int], Any]
# Our functions on each of our backends, and torch's functions on `ref`.
OURS = [("ours", "ref"), ("ours", "gloo"), ("torch", "ref")]
IDS = ["-".join(entry) for entry in OURS]


def made(rank: int, world: int, path: str, entry: str, backend: str, program: Program) -> Any:
    """Return the result of a program with the functions of a library, on a default group of that library."""
    library: Any = dist if entry == "ours" else c10d
    store = library.FileStore(f"{path}.{entry}.{backend}", world)
    library.init_process_group(backend, store=store, rank=rank, world_size=world)
    kept.append(c10d.group.WORLD)
    try:
        torch._dynamo.reset()
        return program(library, rank, world)
    finally:
        library.destroy_process_group()


def beside(rank: int, world: int, path: str, entry: tuple[str, str], program: Program) -> tuple[Any, Any]:
    wanted = made(rank, world, path, "torch", "gloo", program)
    return made(rank, world, path, *entry, program), wanted


def compare(program: Program, entry: tuple[str, str], path: Path, world: int = 2) -> list[tuple[Any, Any]]:
    """Return the results on each rank, and those of torch's functions on Gloo."""
    return run(beside, world, world, str(path / "meet"), entry, program, init=False, ranks="processes", timeout=60)


def collectives(library: Any, rank: int, world: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return a function for each collective that torch's compiler reads."""

    def all_reduce(x: Tensor) -> Tensor:
        library.all_reduce(y := x * 2, op=library.ReduceOp.MAX)
        return y + 1

    def all_reduce_in_group(x: Tensor) -> Tensor:
        library.all_reduce(y := x * 2, group=library.group.WORLD)
        return y + 1

    def all_gather_into_tensor(x: Tensor) -> Tensor:
        library.all_gather_into_tensor(out := x.new_empty(world * len(x), 3), x * 2)
        return out + 1

    def all_gather_single(x: Tensor) -> Tensor:
        library.all_gather_single(out := x.new_empty(world * len(x), 3), x * 2)
        return out + 1

    def all_gather(x: Tensor) -> Tensor:
        library.all_gather(outs := [torch.empty_like(x) for _ in range(world)], x * 2)
        return torch.cat(outs) + 1

    def reduce_scatter_tensor(x: Tensor) -> Tensor:
        library.reduce_scatter_tensor(out := x.new_empty(len(x) // world, 3), x * 2)
        return out + 1

    def reduce_scatter_single(x: Tensor) -> Tensor:
        library.reduce_scatter_single(out := x.new_empty(len(x) // world, 3), x * 2, op=library.ReduceOp.MIN)
        return out + 1

    def all_to_all_single(x: Tensor) -> Tensor:
        library.all_to_all_single(out := torch.empty_like(x), x * 2)
        return out + 1

    return {name: value for name, value in locals().items() if callable(value)}


def queries(library: Any, rank: int, world: int) -> dict[str, Callable[[Tensor], Tensor]]:
    group, mesh = library.group.WORLD, library.init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    return {
        "get_rank": lambda x: x * (library.get_rank() + 2),
        "get_rank of a group": lambda x: x * (library.get_rank(group) + 2),
        "get_world_size": lambda x: x * library.get_world_size() + library.get_world_size(group=group),
        "is_initialized": lambda x: x * 2 if library.is_initialized() and library.is_available() else x,
        "ranks": lambda x: x * len(library.get_process_group_ranks(group)),
        "global rank": lambda x: x + library.get_global_rank(group, 1) + library.get_group_rank(group, 1),
        "backend": lambda x: x * 3 if library.get_backend() in ("ref", "gloo") else x,
        "methods": lambda x: x * group.size() + group.rank(),
        "mesh": lambda x: x * mesh.size() + mesh.get_group("all").size(),
    }


def breaks(library: Any, rank: int, world: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return a function for each call at which torch's graph breaks, too."""

    def broadcast(x: Tensor) -> Tensor:
        library.broadcast(y := x * 2, 1)
        return y + 1

    def reduce(x: Tensor) -> Tensor:
        library.reduce(y := x * 2, 0)
        return y + 1 if library.get_rank() == 0 else x

    def gather(x: Tensor) -> Tensor:
        outs = [torch.empty_like(x) for _ in range(world)] if library.get_rank() == 1 else None
        library.gather(x * 2, outs, 1)
        return torch.cat(outs) if outs else x

    def scatter(x: Tensor) -> Tensor:
        library.scatter(y := torch.empty_like(x), [x, x * 3] if library.get_rank() == 0 else None, 0)
        return y + 1

    def reduce_scatter(x: Tensor) -> Tensor:
        library.reduce_scatter(out := torch.empty_like(x), [x * (to + 2) for to in range(world)])
        return out + 1

    def all_to_all(x: Tensor) -> Tensor:
        library.all_to_all(outs := [torch.empty_like(x) for _ in range(world)], [x * (to + 2) for to in range(world)])
        return torch.cat(outs)

    def barrier(x: Tensor) -> Tensor:
        library.barrier()
        return x * 2

    def without_waiting(x: Tensor) -> Tensor:
        library.all_reduce(y := x * 2, async_op=True).wait()
        return y + 1

    def coalesced(x: Tensor) -> Tensor:
        library.all_reduce_coalesced([y := x * 2])
        return y + 1

    def messages(x: Tensor) -> Tensor:
        y, other = x * 2, 1 - library.get_rank()
        sending, receiving = library.isend(y, other), library.irecv(z := torch.empty_like(x), other)
        sending.wait(), receiving.wait()
        return z + 1

    def batch(x: Tensor) -> Tensor:
        other, z = 1 - library.get_rank(), torch.empty_like(x)
        operations = library.P2POp(library.isend, x * 2, other), library.P2POp(library.irecv, z, other)
        for work in library.batch_isend_irecv([*operations]):
            work.wait()
        return z + 1

    return {name: value for name, value in locals().items() if callable(value)}


def compiled(functions: dict[str, Callable[[Tensor], Tensor]], rank: int, whole: bool) -> dict[str, Tensor]:
    """Return the results of compiled functions; those of torch's functions on Gloo, the oracle, are not compiled."""
    results = {}
    for name, function in functions.items():
        if type(c10d.group.WORLD) is not c10d.ProcessGroup:
            torch._dynamo.reset()
            function = torch.compile(function, backend="aot_eager", fullgraph=whole)
        results[name] = function(fill(rank, (4, 3), torch.float32))
    return results


def in_two_graphs(library: Any, rank: int, world: int) -> dict[str, Any]:
    """Return the results of a compiled function that calls all collectives, and of one that calls all queries."""
    kinds = [[*collectives(library, rank, world).values()], [*queries(library, rank, world).values()]]
    together: dict[str, Any] = {
        str(len(kind)): lambda x, kind=kind: [function(x) for function in kind] for kind in kinds
    }
    return compiled(together, rank, whole=True)


def in_one_graph(library: Any, rank: int, world: int) -> dict[str, Tensor]:
    functions = collectives(library, rank, world) | queries(library, rank, world)
    return compiled(functions, rank, whole=True)


def in_several_graphs(library: Any, rank: int, world: int) -> dict[str, Tensor]:
    return compiled(breaks(library, rank, world), rank, whole=False)


def at_some_breaks(library: Any, rank: int, world: int) -> dict[str, Tensor]:
    functions = breaks(library, rank, world)
    return compiled({name: functions[name] for name in ("broadcast", "coalesced", "messages")}, rank, whole=False)


# Over a second: two groups, on two backends; the compiler is slow to start.
@pytest.mark.parametrize(
    ("program", "world", "entry"),
    [
        (in_two_graphs, 2, OURS[0]),
        *(pytest.param(in_one_graph, world, entry, marks=pytest.mark.long) for world in (2, 4) for entry in OURS),
    ],
)
def test_compiled_functions_give_the_values_of_torchs(program: Program, world: int, entry: Any, tmp_path: Path) -> None:
    for ours, theirs in compare(program, entry, tmp_path, world):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("entry", "program"),
    [(OURS[0], at_some_breaks), *(pytest.param(entry, in_several_graphs, marks=pytest.mark.long) for entry in OURS)],
)
def test_graphs_break_at_the_calls_where_torchs_break(entry: Any, program: Program, tmp_path: Path) -> None:
    for ours, theirs in compare(program, entry, tmp_path):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_compiler_reads_no_method_of_a_call() -> None:
    """A call that another thread completed in between failed the compiler's check of what it had read."""
    work = dist.Work("all_reduce")
    work.finish()

    def program(tensor: Tensor, awaited: dist.Work) -> Tensor:
        doubled = tensor * 2
        return doubled + 1 if awaited.wait() else doubled

    found = torch._dynamo.explain(program)(torch.arange(3), work)
    assert (found.graph_count, found.graph_break_count) == (2, 1)


class Seen(TorchDispatchMode):
    """Mode that keeps the names of operators of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            assert c10d.ProcessGroup.unbox(group) is c10d.group.WORLD
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def seen_operators(library: Any, rank: int, world: int) -> dict[str, tuple[list[str], Tensor]]:
    found = {}
    for name, function in (collectives(library, rank, world) | breaks(library, rank, world)).items():
        with Seen() as seen:
            result = function(fill(rank, (4, 3), torch.float32))
        # Ours reduces the tensors of a coalesced call one by one.
        names = [each.replace("_coalesced", "") for each in seen.names]
        # Which operators send and which receive depends on the rank.
        found[name] = sorted(names), result
    return found


def check_pairs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise unless both have the same pairs of names and a tensor."""
    assert {name: names for name, (names, _) in ours.items()} == {name: names for name, (names, _) in theirs.items()}
    for name, (names, tensor) in ours.items():
        assert names, name
        torch.testing.assert_close(tensor, theirs[name][1], rtol=0, atol=0)


@pytest.mark.parametrize("entry", OURS, ids=IDS)
def test_a_mode_sees_the_operators_of_torchs_functions(entry: Any, tmp_path: Path) -> None:
    for ours, theirs in compare(seen_operators, entry, tmp_path):
        check_pairs(ours, theirs)


def modules(library: Any, rank: int, world: int) -> list[dict[str, int]]:
    """Return the counts of the communication of torch's DDP and FSDP2."""
    counts = []
    for wrap in (DistributedDataParallel, fully_shard):
        with CommDebugMode() as seen:
            model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
            model(fill(rank, (4, 3), torch.float32)).square().sum().backward()
        counts.append({str(operator): count for operator, count in seen.get_comm_counts().items()})
    return counts


@pytest.mark.parametrize("entry", OURS, ids=IDS)
def test_comm_debug_mode_counts_the_calls_of_torchs_modules(entry: Any, tmp_path: Path) -> None:
    for ours, theirs in compare(modules, entry, tmp_path):
        assert ours == theirs
        assert [sum(counts.values()) for counts in theirs] > [0, 0]


def on_one_rank(library: Any, rank: int, world: int) -> list[Any]:
    """Return what a mode on rank 0 alone sees, and the results: the other rank makes the same call without it."""
    tensor, objects = fill(rank, (4, 3)), [None] * world
    seen = Seen()
    with seen if rank == 0 else nullcontext():
        library.all_to_all_single(out := torch.empty_like(tensor), tensor)
        library.all_gather_object(objects, {"rank": rank})
        library.all_reduce(tensor, library.ReduceOp.PREMUL_SUM(0.5))
    return [len(seen.names), out, objects, tensor]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_one_rank_alone_may_have_a_mode(backend: str) -> None:
    def program(rank: int) -> list[Any]:
        return on_one_rank(dist, rank, 2)

    (seen, out, objects, total), (unseen, other, _, same) = run(program, 2, backend=backend)
    data = [fill(rank, (4, 3)) for rank in range(2)]
    assert (seen > 3, unseen, objects) == (True, 0, [{"rank": 0}, {"rank": 1}])
    torch.testing.assert_close((out, other), tuple(torch.cat([x[2 * r : 2 * r + 2] for x in data]) for r in range(2)))
    torch.testing.assert_close((total, same), ((data[0] + data[1]) / 2,) * 2)


def test_torchs_kernels_are_back_after_each_call_under_a_mode() -> None:
    """Once each later call of every group of torch's own ran in Python, and one whose store is in Python hung."""

    def program(rank: int) -> list[Any]:
        names = [f"c10d::{name}" for name in ("allreduce_", "broadcast_", "send", "recv_")]
        before, tensor = [torch._C._dispatch_dump(name) for name in names], fill(rank, (4,))
        with Seen() as seen:
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 1)
            dist.recv(tensor, 0) if rank else dist.send(tensor, 1)
        dist.barrier()
        return [before == [torch._C._dispatch_dump(name) for name in names], len(seen.names), tensor]

    total = fill(0, (4,)) + fill(1, (4,))
    for unchanged, seen, tensor in run(program, 2, ranks="processes"):
        assert unchanged and seen == 3
        torch.testing.assert_close(tensor, total)


def recorded(library: Any, rank: int, world: int) -> dict[str, Any]:
    """Return the operators that make_fx records, and the results of the recorded functions on other data."""
    found = {}
    for name, function in collectives(library, rank, world).items():
        graph = make_fx(function)(fill(rank, (4, 3), torch.float32))
        names = [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]
        # A graph of torch's functions does not wait.
        again = graph if library is dist else function
        found[name] = names, again(fill(rank + 5, (4, 3), torch.float32))
    return found


@pytest.mark.parametrize("entry", OURS[:2], ids=IDS[:2])
def test_make_fx_records_the_operators_of_torchs_functions(entry: Any, tmp_path: Path) -> None:
    for ours, theirs in compare(recorded, entry, tmp_path):
        check_pairs(ours, theirs)


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def exported(library: Any, rank: int, world: int) -> dict[str, Any]:
    """Return the operators of exported programs, and their results on other data."""
    found = {}
    for name, function in collectives(library, rank, world).items():
        program = torch.export.export(Module(function), (fill(rank, (4, 3), torch.float32),))
        names = [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]
        found[name] = names, program.module()(fill(rank + 5, (4, 3), torch.float32))
    return found


def test_exported_programs_are_those_of_torchs_functions(tmp_path: Path) -> None:
    for ours, theirs in compare(exported, OURS[0], tmp_path):
        check_pairs(ours, theirs)


def test_export_refuses_other_collectives_in_one_sentence() -> None:
    functions: dict[str, Callable[[Tensor], Any]] = {
        "broadcast": lambda x: dist.broadcast(x, 0),
        "gather": lambda x: dist.gather(x, [x.clone()]),
        "barrier": lambda x: dist.barrier(),
    }

    def program(rank: int) -> list[str]:
        found = []
        for function in functions.values():
            with pytest.raises(dist.UnsupportedError, match=r"torch\.export has no functional form") as refused:
                torch.export.export(Module(function), (torch.ones(4, 3),))
            found.append(str(refused.value).split(":")[0])
        return found

    # Of ranks that are threads, one may export at a time.
    assert run(program, 1) == [[*functions]]


# Python 3.14 and torch warn of `torch.jit`.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_jit_trace_refuses_collectives(backend: str) -> None:
    """torch's functions raise a RuntimeError with this phrase."""

    def program(rank: int) -> Tensor:
        with pytest.raises(RuntimeError, match="all_reduce: Tried to trace"):
            torch.jit.trace(lambda x: (dist.all_reduce(x), x + 1)[1], torch.ones(2))
        dist.all_reduce(total := fill(rank, (3,)))
        return total

    torch.testing.assert_close(run(program, 2, backend=backend), [fill(0, (3,)) + fill(1, (3,))] * 2)


def functional_operators(library: Any, rank: int, world: int) -> list[Tensor]:
    """Return the results of the operators that call methods in C++ which a group in Python cannot have."""
    operators, name = torch.ops._c10d_functional, c10d.group.WORLD.group_name
    tensor = fill(rank, (4, 3), torch.float32)
    out = torch.zeros(world * 4, 3)
    gathered = operators.all_gather_into_tensor_out(tensor, world, name, out=out)
    received = torch.zeros(4, 3)
    results = operators.batch_p2p_ops(["isend", "irecv"], [1 - rank] * 2, [7, 7], [tensor, received], name)
    waited = [operators.wait_tensor(each) for each in (gathered, *results)]
    return [*waited, out, received]


@pytest.mark.parametrize("entry", OURS, ids=IDS)
def test_operators_that_need_methods_in_cpp(entry: Any, tmp_path: Path) -> None:
    for rank, (ours, theirs) in enumerate(compare(functional_operators, entry, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours[-1], fill(1 - rank, (4, 3), torch.float32))


def test_modes_leave_groups_on_torchs_own_backend_alone(tmp_path: Path) -> None:
    def program(library: Any, rank: int, world: int) -> list[Any]:
        group, tensor = c10d.new_group(backend="gloo"), fill(rank, (3,))
        kept.append(group)
        with CommDebugMode() as seen:
            library.all_reduce(torch.ones(1))
            c10d.all_reduce(tensor, group=group)
        c10d.all_reduce(again := tensor.clone(), group=group)
        return [seen.get_total_counts(), tensor, again]

    total = fill(0, (3,)) + fill(1, (3,))
    path = str(tmp_path / "meet")
    results = run(made, 2, 2, path, "torch", "ref", program, init=False, ranks="processes")
    torch.testing.assert_close(results, [[2, total, total * 2]] * 2)


def test_monitored_barrier_of_a_group_that_torch_made(tmp_path: Path) -> None:
    def program(library: Any, rank: int, world: int) -> str:
        group = c10d.group.WORLD
        group.monitored_barrier()
        if rank == 1:
            return ""
        with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier") as missing:
            group.monitored_barrier()
        return str(missing.value)

    path = str(tmp_path / "meet")
    first, _ = run(made, 2, 2, path, "torch", "ref", program, init=False, ranks="processes")
    assert "rank 1 destroyed the group" in first


def test_wrapped_tensors_reach_a_mode_once() -> None:
    def program(rank: int) -> Any:
        with Seen() as seen, torch._subclasses.FakeTensorMode():
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            work = dist.all_gather_into_tensor(torch.ones(6), tensor, async_op=True)
            work.wait()
        return seen.names, type(tensor).__name__, work.is_completed()

    assert run(program, 2) == [(["allreduce_", "_allgather_base_"], "FakeTensor", True)] * 2
