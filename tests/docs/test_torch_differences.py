"""Behavior of torch that the page on differences and the reference state, observed on torch's own Gloo and DDP.

`torch_sentences.toml` lists the sentences, each with the test that holds it.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
import torch.distributed.nn.functional

from tests.torch_versions import torch_has
from tests.torchs_world import start_torch
from torchdist_ref.testing import fill, run

NARROW = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2)
DDP = torch.nn.parallel.DistributedDataParallel
Facts = dict[str, Any]


def error(call: Callable[[], object]) -> str:
    """Return type and message of what a call raises; nothing if it returns."""
    try:
        call()
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def start(rank: int, world: int, path: str) -> None:
    warnings.simplefilter("ignore")
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=60))


def column(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix, and a view of its first column."""
    matrix = fill(rank + 1, (3, 2), torch.int64)
    return matrix, matrix[:, 0]


def views(rank: int) -> dict[str, bool]:
    """Return for each call on a column whether the elements between were written, on a rank that gets a result."""
    found = {}
    for name in ("all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter"):
        matrix, view = column(rank)
        parts = [fill(9, (3,), torch.int64)] * 3
        {
            "all_reduce": partial(c10d.all_reduce, view),
            "reduce": partial(c10d.reduce, view, 0),
            "broadcast": partial(c10d.broadcast, view, 1),
            "scatter": partial(c10d.scatter, view, parts if rank == 1 else None, 1),
            "reduce_scatter": partial(c10d.reduce_scatter, view, parts),
        }[name]()
        found[name] = not torch.equal(matrix[:, 1], column(rank)[0][:, 1])
    return found


def of_gloo(rank: int, path: str) -> Facts:
    """Ask torch's Gloo on three ranks; the last questions leave it unusable."""
    start(rank, 3, path)
    found: Facts = {"views": views(rank)}
    short = torch.zeros(5)
    if rank < 2:
        c10d.send(torch.ones(3), 1) if rank == 0 else c10d.recv(short, 0)
    found["short"] = short.tolist()
    output = torch.zeros(3, dtype=torch.int64)
    c10d.all_gather([output] * 3, torch.arange(3) + 10 * rank)
    found["same output"] = output.tolist()
    work = c10d.reduce_scatter(torch.zeros(1), [torch.ones(1)] * 3, async_op=True)
    work.wait()
    found["reduce_scatter"] = work.is_completed(), error(work.get_future)
    truth = torch.tensor([True])
    c10d.all_reduce(truth)
    found["bool"] = truth.view(torch.uint8).tolist()
    entries = torch.sparse_coo_tensor([[rank]], [1.0 + rank], (3,), check_invariants=True)
    c10d.all_reduce(entries)
    found["sparse"] = entries.to_dense().tolist()
    minima = [torch.tensor([float("nan") if rank == other else 1.0]) for other in range(3)]
    for minimum in minima:
        c10d.all_reduce(minimum, c10d.ReduceOp.MIN)
    found["nan"] = [minimum.item() for minimum in minima]
    parts = c10d.all_gather_into_tensor(torch.zeros(6), torch.zeros(2), async_op=True).get_future().wait()
    found["future"] = len(parts[0] if isinstance(parts[0], list) else parts)
    factor = torch.tensor([rank + 2.0], requires_grad=True)
    torch.distributed.nn.functional.all_reduce(factor, c10d.ReduceOp.PRODUCT).backward(torch.tensor([3.0]))
    found["product"] = factor.grad.item() if factor.grad is not None else None
    found |= {"graphs": gradients_of_plain_collectives(rank), "noticed": noticed(rank)}
    group = c10d.new_group([0, 1, 2])
    objects = [None] * 3
    c10d.all_gather_object(objects, RunsCode(), group)
    found["unpickled"] = objects == [os.getpid()] * 3
    c10d.destroy_process_group(group)
    found["destroyed"] = error(lambda: c10d.all_reduce(torch.ones(1), group=group)), error(lambda: group_rank(group))
    return found | refusals(rank)


def gradients_of_plain_collectives(rank: int) -> Facts:
    """Return the gradients of one call's inputs on this rank, by the call."""
    found: Facts = {}
    for name in ("reduce_scatter", "reduce_scatter_tensor", "all_to_all"):
        inputs = torch.ones(3, 1, requires_grad=True)
        outputs = [torch.zeros(1) for _ in range(3)]
        if name == "all_to_all":
            c10d.all_to_all(outputs, list(inputs.unbind()))
        elif name == "reduce_scatter":
            c10d.reduce_scatter(outputs[rank], list(inputs.unbind()))
        else:
            c10d.reduce_scatter_tensor(outputs[rank], inputs.reshape(3))
        outputs[rank].backward()
        found[name] = None if inputs.grad is None else inputs.grad.flatten().tolist()
    return found


def noticed(rank: int) -> dict[str, bool]:
    """Return for each call whether the version of its output, by which autograd notices changes, has moved."""
    mine, blocks = torch.ones(3), [torch.ones(3) for _ in range(3)]

    def from_the_rank_before(tensor: torch.Tensor) -> None:
        work = c10d.isend(torch.ones(3), (rank + 1) % 3)
        c10d.recv(tensor, (rank - 1) % 3)
        assert work is not None
        work.wait()

    calls: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = {
        "all_reduce": (torch.ones(3), c10d.all_reduce),
        "broadcast": (torch.ones(3), lambda t: c10d.broadcast(t, 0)),
        "reduce": (torch.ones(3), lambda t: c10d.reduce(t, 0)),
        "scatter": (torch.ones(3), lambda t: c10d.scatter(t, blocks if rank == 0 else None, 0)),
        "all_to_all_single": (torch.ones(3), lambda t: c10d.all_to_all_single(t, mine)),
        "recv": (torch.ones(3), from_the_rank_before),
        "all_gather": (torch.ones(3), lambda t: c10d.all_gather([t, blocks[1], blocks[2]], mine)),
        "reduce_scatter": (torch.ones(3), lambda t: c10d.reduce_scatter(t, blocks)),
        "all_to_all": (torch.ones(3), lambda t: c10d.all_to_all([t, *[torch.ones(3)] * 2], blocks)),
    }
    outputs = [torch.ones(3) for _ in range(3)]
    c10d.gather(mine, outputs if rank == 0 else None, 0)
    found = {"gather": outputs[0]._version > 0} if rank == 0 else {}
    for name, (output, call) in calls.items():
        call(output)
        found[name] = output._version > 0
    return found


def group_rank(group: Any) -> int:
    return c10d.get_rank(group)


class RunsCode:
    """Object whose unpickling calls a function: it arrives as the name of the receiver's process."""

    def __reduce__(self) -> Any:
        return os.getpid, ()


def refusals(rank: int) -> Facts:
    """Return the errors of calls that torch's Gloo rejects."""
    complex_ = [torch.zeros(1, dtype=torch.complex64) for _ in range(4)]
    narrow = {dtype: torch.zeros(1).to(dtype) for dtype in NARROW}
    found = {f"reduce {dtype}": error(partial(c10d.all_reduce, tensor)) for dtype, tensor in narrow.items()}
    found |= {f"send {dtype}": error(partial(c10d.broadcast, tensor, 0)) for dtype, tensor in narrow.items()}
    found["complex"] = error(lambda: c10d.gather(complex_[3], complex_[:3] if rank == 0 else None, 0))
    found["uneven"] = error(lambda: c10d.all_gather([torch.zeros(r + 1) for r in range(3)], torch.zeros(rank + 1)))
    found["stacked"] = error(lambda: c10d.all_gather_into_tensor(torch.zeros(3, 2), torch.zeros(2)))
    found["scalar"] = error(lambda: c10d.all_gather_into_tensor(torch.zeros(3), torch.tensor(1.0)))
    found["view"] = error(lambda: c10d.recv(column(rank)[1], 0)) if rank == 1 else ""
    premultiplied = c10d._make_nccl_premul_sum(0.5)
    found["premul"] = error(lambda: c10d.all_reduce(torch.ones(1), premultiplied))
    found["shrink"] = error(lambda: c10d.shrink_group([2])) if rank < 2 else ""
    found["self"] = error(lambda: c10d.isend(torch.zeros(1), rank))
    # No barrier: Gloo's waits for the Works before it, and raises the error of one that its thread has not yet let go.
    c10d.all_reduce(torch.ones(1))
    mean = error(lambda: c10d.all_reduce(torch.tensor([1]), c10d.ReduceOp.AVG))
    return found | {"mean": mean or error(c10d.barrier)}


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    if not torch_has("2.13"):
        pytest.skip("needs torch 2.13 to compare with: lists of blocks in Gloo's all_to_all")
    path = tmp_path_factory.mktemp("gloo") / "store"
    return run(of_gloo, 3, str(path), ranks="processes", init=False)


def test_gloo_treats_views_as_contiguous_memory(gloo: list[Facts]) -> None:
    # The root of `reduce`; the ranks of `broadcast` and `scatter` that are not the root.
    assert gloo[0]["views"] == dict.fromkeys(gloo[0]["views"], True)
    assert "contiguous" in gloo[1]["view"]


def test_gloo_reports_no_mismatch_of_sizes_or_outputs(gloo: list[Facts]) -> None:
    assert gloo[1]["short"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [found["same output"] for found in gloo] == [[20, 21, 22]] * 3


def test_gloos_results_that_ours_do_not_have(gloo: list[Facts]) -> None:
    for rank, found in enumerate(gloo):
        assert found["bool"] == [3] and found["sparse"] == [1.0, 2.0, 3.0]
        assert found["future"] == 3
        assert found["reduce_scatter"][0] is False and "not implemented" in found["reduce_scatter"][1]
        # The right derivative of a product is that of the other factors, times the sum of what was passed: 9 * others.
        assert found["product"] == 27.0 != 9.0 * 24 / (rank + 2)
    lost = [value == value for found in gloo for value in found["nan"]]
    assert any(lost) and not all(lost)


def test_gloos_outputs_have_the_graph_of_one_rank(gloo: list[Facts]) -> None:
    for rank, found in enumerate(gloo):
        own = [float(other == rank) for other in range(3)]
        assert found["graphs"] == {"reduce_scatter": own, "reduce_scatter_tensor": own, "all_to_all": None}


def test_autograd_notices_some_collectives_of_gloo(gloo: list[Facts]) -> None:
    gathering = ("gather", "all_gather", "reduce_scatter", "all_to_all")
    for found in gloo:
        assert found["noticed"] == {name: name in gathering for name in found["noticed"]}


def test_gloo_rejects_what_the_pages_say(gloo: list[Facts]) -> None:
    for found in gloo:
        for dtype in NARROW:
            assert "Invalid scalar type" in found[f"reduce {dtype}"] and "Invalid scalar type" in found[f"send {dtype}"]
        for name, words in {
            "complex": "Invalid scalar type",
            "uneven": "invalid tensor size",
            "stacked": "invalid tensor size",
            "scalar": "invalid tensor size",
            "premul": "PREMUL_SUM with Gloo",
            "self": "CONNECTED",
            "mean": "",
        }.items():
            assert found[name] and words in found[name], name
    assert "does not support shrinking" in gloo[0]["shrink"]


def test_torchs_object_collectives_run_code_of_the_sender(gloo: list[Facts]) -> None:
    assert [found["unpickled"] for found in gloo] == [True] * 3


def test_a_destroyed_group_of_torch_works_in_part(gloo: list[Facts]) -> None:
    for found in gloo:
        works, lookup = found["destroyed"]
        assert works == "" and "is not registered" in lookup


class Complex(torch.nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().sum()


class TwoTypes(torch.nn.Module):
    """Layers of two dtypes, whose gradients need two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(self.first(x).double()))


def trained(model: torch.nn.Module, inputs: torch.Tensor, state: Any, hook: Any, steps: int = 1, **options: Any) -> Any:
    """Train torch's DDP with a hook, and return its module."""
    ddp = DDP(model, **options)
    ddp.register_comm_hook(state, hook)
    for _ in range(steps):
        ddp(inputs).sum().backward()
    return ddp.module


def averaged(value: Callable[[Any], torch.Tensor]) -> Any:
    """Return a hook that returns a function of the bucket, which is not averaged."""

    def hook(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(value(bucket))
        return future

    # torch checks annotations, which are texts in this file.
    hook.__annotations__.clear()
    return hook


def of_ddp(rank: int, path: str) -> Facts:
    """Ask torch's DDP, and a Gloo group whose time-out ends the test."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    start(rank, 2, path)
    found: Facts = {}
    numbers: list[tuple[int, bool]] = []
    hook = averaged(lambda bucket: numbers.append((bucket.index(), bucket.is_last())) or bucket.buffer())
    trained(TwoTypes(), torch.ones(1, 3), None, hook, static_graph=True)
    found["static graph"] = numbers
    shapes: list[Any] = []
    hook = averaged(lambda bucket: shapes.extend(bucket.gradients()) or bucket.buffer())
    trained(Complex(), torch.ones(4), None, hook)
    found["complex"] = [(str(gradient.dtype), tuple(gradient.shape)) for gradient in shapes]
    strided = averaged(lambda bucket: torch.arange(8.0)[::2])
    model = trained(torch.nn.Linear(4, 1, bias=False), torch.ones(1, 4), None, strided)
    found["strided"] = model.weight.grad.tolist()
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    table = torch.nn.Embedding(4, 1, sparse=True)
    model = trained(table, torch.tensor([rank, 3]), state, powerSGD_hook.powerSGD_hook, steps=4)
    found["sparse"] = model.weight.grad.to_dense().flatten().tolist()
    table = torch.nn.Embedding(4, 1, sparse=True)
    half = default_hooks.fp16_compress_hook
    found["sparse half"] = error(lambda: trained(table, torch.tensor([rank, 3]), None, half))
    group = c10d.new_group()
    tensor = torch.ones(2)
    work = c10d.isend(tensor, 1, group=group) if rank == 0 else c10d.irecv(tensor, 0, group=group)
    assert work is not None and work.wait()
    found["second wait"] = (
        error(lambda: work.wait(timedelta(seconds=0.2))),
        error(lambda: c10d.all_reduce(tensor, group=group)),
    )
    return found


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    path = tmp_path_factory.mktemp("ddp") / "store"
    return run(of_ddp, 2, str(path), ranks="processes", init=False)


def test_a_second_wait_for_a_message_breaks_gloos_connection(ddp: list[Facts]) -> None:
    for found in ddp:
        assert "Timed out waiting 200ms" in found["second wait"][0] and found["second wait"][1]


def test_buckets_of_torchs_ddp_are_as_the_page_says(ddp: list[Facts]) -> None:
    for found in ddp:
        assert len(found["static graph"]) > 1 and set(found["static graph"]) == {(0, False)}
        assert found["complex"] == [("torch.float32", (4,))]
        assert found["strided"] != [[0.0, 2.0, 4.0, 6.0]]
        assert "not implemented for 'Half'" in found["sparse half"]
    assert ddp[0]["sparse"] != ddp[1]["sparse"]


def test_names_that_torch_removed_are_not_there() -> None:
    for name in ("broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter"):
        assert not hasattr(c10d, f"{name}_multigpu")
    assert not [found for found in pkgutil.iter_modules(c10d.__path__) if found.name == "pipeline"]
    with pytest.raises(AttributeError):
        c10d.Backend.TCP  # noqa: B018
    assert "reduce_op" in str(inspect.getsource(c10d.distributed_c10d._reduce_op))


def test_documentation_and_strings_of_torch_that_the_pages_cite() -> None:
    assert "deadlock" in (c10d.new_group.__doc__ or "")
    assert inspect.signature(c10d.breakpoint).parameters["timeout_s"].default == 3600
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    assert b"TORCH_GLOO_LAZY_INIT" in library and b"monitoredBarrier" in library
