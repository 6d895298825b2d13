"""Modes of the caller change no result of the library: a table of modes, and in each of them every function.

Results are compared with the formulas of `tests.meaning`, and those of training with the same program without the mode.
Most modes of torch are of a thread, so each rank enters them itself. There are three ranks: with two, no rank combines
two sources into a third tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchdist_ref.algorithms.model_averaging.utils import average_parameters

import torchdist_ref as dist
from tests.backends.inside_torch import compared
from tests.meaning.cases import MOVING, OBJECTS, REDUCING, UNEVEN, Case
from tests.meaning.compare import common, same, wait_for
from tests.meaning.formulas import meaning
from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torchdist_ref.algorithms.join import Join
from torchdist_ref.nn import functional as differentiable
from torchdist_ref.optim import ZeroRedundancyOptimizer
from torchdist_ref.testing import fill, run
from torchdist_ref.torch_internals.torch_modes import outside_modes

WORLD = 3
CASES = [Case(call, shape=(3, 2), root=1) for call in (*REDUCING, *MOVING, *OBJECTS)]
CASES += [Case(call, shape=(3, 2), way="wait") for call in (*REDUCING, *MOVING)]
CASES += [Case(call, shape=(3, 2), root=1, uneven=True) for call in UNEVEN]
CASES += [Case("all_reduce", op=op, dtype=dtype) for op, dtype in (("MAX", "uint64"), ("AVG", "bfloat16"))]
CASES += [Case("all_reduce", op="PREMUL_SUM"), Case("reduce_scatter", op="PRODUCT", shape=(40, 50))]
CASES += [Case("all_reduce", shape=(300_000,)), Case("all_to_all", dtype="complex64")]

# ---- the modes


class Passing(TorchDispatchMode):
    """Mode that sees every operation and runs it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    """Mode that falsifies additions in Python, as a mode that quantizes or injects faults does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.mul_(2) if func in (torch.add, Tensor.add_) else result


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Mode = Callable[[], AbstractContextManager[Any]]
OF_THREADS: dict[str, Mode] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "with torch.device": lambda: torch.device("meta"),
    "default device": default_device,
    "dispatch mode": Passing,
    "function mode": Doubling,
}
OF_THE_PROCESS: dict[str, Mode] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
}


def in_grad(call: Callable[[], Any]) -> None:
    """Call a function in three transforms of torch.func, one inside the other."""

    def loss(x: Tensor) -> Tensor:
        torch.func.vmap(lambda y: (call(), y)[1])(torch.zeros(1))
        return x.sum()

    torch.func.grad(loss)(torch.zeros(2))


# ---- every function


def right(case: Case, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Make a call in a mode and compare its outputs with the formula."""
    part, arguments = meaning(case, dist.get_rank(), [*range(WORLD)]), common(case, None)
    part.outputs = [tensor.clone() for tensor in part.outputs]
    results: list[Any] = []

    def call() -> None:
        answer = part.invoke(dist, part.inputs, part.outputs, arguments)
        results.append(answer)
        wait_for(case, answer)

    around(call)
    if part.own_results:
        assert results == [part.plain]
    wanted = [got if wanted is None else wanted for got, wanted in zip(part.outputs, part.expected, strict=True)]
    same(case, "output", part.outputs, wanted)


def all_right(mode: Mode) -> Callable[[int], None]:
    def around(call: Callable[[], Any]) -> None:
        with mode():
            call()

    def program(rank: int) -> None:
        for case in CASES:
            right(case, around)
        # What a mode has left in plans and buffers must serve without it, and the reverse.
        for case in CASES[:: 1 if mode is nullcontext else 3]:
            right(case, lambda call: call())

    return program


@pytest.mark.parametrize("mode", OF_THREADS.values(), ids=OF_THREADS)
def test_no_call_is_affected_by_a_mode_of_its_thread(mode: Mode) -> None:
    run(all_right(mode), WORLD)


def test_the_same_memory_is_reduced_in_and_after_inference_mode() -> None:
    def program(rank: int) -> Tensor:
        tensor = fill(rank, (5,))
        with torch.inference_mode():
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        return tensor

    total = torch.stack([fill(rank, (5,)) for rank in range(WORLD)]).sum(0)
    assert all(torch.equal(tensor, WORLD * total) for tensor in run(program, WORLD))


@pytest.mark.parametrize("mode", OF_THE_PROCESS.values(), ids=OF_THE_PROCESS)
def test_no_call_is_affected_by_a_mode_of_the_process(mode: Mode) -> None:
    with mode():
        run(all_right(nullcontext), WORLD)


def test_no_call_is_affected_by_a_transform() -> None:
    run(lambda rank: [right(case, in_grad) for case in CASES], WORLD)


@pytest.mark.parametrize("names", [["inference mode", "with torch.device", "dispatch mode", "function mode"]])
def test_no_call_on_gloo_is_affected(names: list[str]) -> None:
    def program(rank: int) -> None:
        for name in names:
            all_right(OF_THREADS[name])(rank)

    run(program, WORLD, backend="gloo", ranks="processes")


def test_the_reference_executor_is_not_affected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_EXECUTOR", "reference")
    for name in ("inference mode", "function mode"):
        run(all_right(OF_THREADS[name]), WORLD)


def test_arithmetic_outside_modes_is_real_in_a_fake_mode() -> None:
    tensor = torch.ones(3)
    with FakeTensorMode(), outside_modes():
        tensor.add_(torch.full((3,), 2.0, dtype=torch.float32, device="cpu"))
        assert type(tensor + tensor) is Tensor
    assert tensor.tolist() == [3, 3, 3]


# ---- tensors that autograd knows


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def result(values: Tensor) -> Tensor:
    return leaf(values) * 1


def view(values: Tensor) -> Tensor:
    return leaf(torch.cat([values, values]))[: len(values)]


def strided(values: Tensor) -> Tensor:
    return leaf(torch.stack([values, values], -1))[..., 0]


def inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


KINDS = (Tensor.clone, leaf, result, view, strided, inference)
WRITING = [case for case in CASES if case.call not in OBJECTS and case.dtype == "float32" and not case.uneven]


def untold(rank: int, library: Any = dist) -> None:
    """Hold that autograd learns nothing of what a call writes: neither by a version nor by the history of a tensor."""
    for case in WRITING:
        for kind in KINDS:
            part = meaning(case, rank, [*range(WORLD)])
            outputs = [kind(tensor) for tensor in part.outputs]
            before = [known(tensor) for tensor in outputs]
            wait_for(case, part.invoke(library, part.inputs, outputs, common(case, None)))
            assert [known(tensor) for tensor in outputs] == before, (case, kind)
            for got, wanted in zip(outputs, part.expected, strict=True):
                assert wanted is None or torch.equal(got, wanted), (case, kind)


def known(tensor: Tensor) -> Any:
    """Return what autograd knows of the values of a tensor; a tensor made under inference mode has no version."""
    return (None if tensor.is_inference() else tensor._version), tensor.grad_fn, tensor.requires_grad


def test_calls_between_threads_move_no_version() -> None:
    run(untold, WORLD)


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_calls_between_processes_move_no_version(backend: str) -> None:
    run(untold, WORLD, backend=backend, ranks="processes")


def normalized_by_hand(rank: int, size: int, library: Any = c10d) -> list[Tensor]:
    """Return gradients through a mean and a variance that are reduced between forward and backward."""
    x, weight = fill(rank, (4, 3)).requires_grad_(), fill(5, (3,)).requires_grad_()
    mean = x.mean(0)
    library.all_reduce(mean)
    square = (x * x).mean(0)
    library.all_reduce(square, async_op=True).wait()
    variance = square / size - (mean / size).pow(2)
    scale = torch.rsqrt(variance.abs() + 1)
    saved = [x.detach() * 1, fill(rank, (4, 3))]
    y = ((x - mean / size) * scale * weight).sum() + (weight * saved[0]).sum() + (x * saved[1]).sum()
    # Saved by the multiplications, and written before backward reads them.
    library.all_reduce(saved[0])
    library.broadcast(saved[1], 1)
    y.backward()
    assert x.grad is not None and weight.grad is not None
    return [x.grad, weight.grad, y.detach()]


def through_functional(rank: int, size: int, *, library: Any = functional) -> list[Tensor]:
    """Return the results of functional collectives on tensors that require a gradient."""
    x, group = fill(rank, (5,)).requires_grad_(), c10d.group.WORLD
    results = [library.all_reduce(x, "sum", group), library.all_reduce(x * 2, "max", group)]
    results += [library.all_to_all_single(x[:3] * 2, None, None, group), library.broadcast(x, 1, group)]
    return [library.wait_tensor(each).detach() for each in results]


# torch's dispatcher warns at a tensor with a history, and goes on.
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("program", [normalized_by_hand, through_functional])
def test_torchs_functions_on_ref_accept_what_they_accept_on_gloo(program: Any, tmp_path: Path) -> None:
    for ours, theirs, seen in compared(program, WORLD, f"{tmp_path}/world"):
        assert seen["all_reduce"] and all(map(torch.equal, ours, theirs))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_our_functions_accept_what_torchs_accept(tmp_path: Path) -> None:
    found = run(lambda rank: normalized_by_hand(rank, WORLD, dist), WORLD)
    for (_, theirs, _), ours in zip(compared(normalized_by_hand, WORLD, f"{tmp_path}/world"), found, strict=True):
        assert all(map(torch.equal, ours, theirs))


# ---- training and tools


class Products(nn.Module):
    """Model without an operation that autocast computes in another dtype, with a matrix for PowerSGD, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(fill(1, (24, 16)) / 8)
        self.vector = nn.Parameter(fill(2, (16,)) / 8)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.mean(0)
        return (self.matrix * x * self.vector).pow(2).sum() + (self.seen * self.vector).sum()


def trained(rank: int, mode: Mode, register: Callable[[Any], object], **arguments: Any) -> list[Tensor]:
    """Train for four steps, with a mode around the construction and the backward passes."""
    module = Products()
    with mode():
        model = dist.DistributedDataParallel(module, **arguments)
        register(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    for step in range(4):
        loss = model(fill(rank + step, (24, 16)))
        with mode():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*module.state_dict().values()]


def plain(rank: int, mode: Mode) -> list[Tensor]:
    return trained(rank, mode, lambda model: None, find_unused_parameters=True)


def in_half(rank: int, mode: Mode) -> list[Tensor]:
    return trained(rank, mode, lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook))


def power_sgd(rank: int, mode: Mode) -> list[Tensor]:
    def register(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return trained(rank, mode, register)


def batched_power_sgd(rank: int, mode: Mode) -> list[Tensor]:
    def register(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook))

    return trained(rank, mode, register, gradient_as_bucket_view=True)


def quantized(rank: int, mode: Mode) -> list[Tensor]:
    hook = quantization_hooks.quantization_pertensor_hook
    return trained(rank, mode, lambda model: model.register_comm_hook(dist.group.WORLD, hook))


def sharded(rank: int, mode: Mode) -> list[Tensor]:
    module = Products()
    with mode():
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(2):
        module(fill(rank + step, (24, 16))).backward()
        with mode():
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        with mode():
            average_parameters(module.parameters(), None)
    return [*module.state_dict().values()]


def uneven_inputs(rank: int, mode: Mode) -> list[Tensor]:
    module = Products()
    with mode():
        model = dist.DistributedDataParallel(module)
    with mode():
        joined = Join([model])
        joined.__enter__()
    for step in range(1 + rank):
        loss = model(fill(rank + step, (24, 16)))
        with mode():
            loss.backward()
    with mode():
        joined.__exit__(None, None, None)
    return [module.matrix.grad, module.vector.grad]  # type: ignore[list-item]


def through_collectives(rank: int, mode: Mode) -> list[Tensor]:
    x = fill(rank, (WORLD, 2)).requires_grad_()
    with mode():
        outputs = [differentiable.all_reduce(x), *differentiable.all_gather(x), differentiable.broadcast(x, 1)]
        outputs.append(differentiable.reduce_scatter(torch.zeros(2, device="cpu"), list(x)))
        outputs.append(differentiable.all_to_all_single(torch.zeros(WORLD, 2, device="cpu"), x))
    loss = torch.stack([(output * output).sum() for output in outputs]).sum()
    with mode():
        loss.backward()
    assert x.grad is not None
    return [x.grad, *(output.detach() for output in outputs)]


def meshes(rank: int, mode: Mode) -> list[Tensor]:
    with mode():
        mesh = dist.init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("x", "y"))
        tensor = fill(rank, (3,)).to("cpu")
        dist.all_reduce(tensor, group=mesh.get_group("x"))
    return [mesh.mesh, tensor]


def messages(rank: int, mode: Mode) -> list[Tensor]:
    """Receive a message that arrives before its receive, one to the rank itself, a batch, objects, many tensors."""
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    sent = [fill(rank, (5,)), fill(rank + 3, (3,))]
    received = [leaf(torch.zeros(5)), inference(torch.zeros(3)), leaf(torch.zeros(5)), leaf(torch.zeros(3))]
    objects: list[Any] = [None]
    with mode():
        works = [dist.isend(tensor, after, tag=tag) for tag, tensor in enumerate(sent)]
        dist.recv(received[1], before, tag=1)
        dist.recv(received[0], before, tag=0)
        own = dist.isend(sent[0], rank, tag=2)
        dist.recv(received[2], rank, tag=2)
        batch = [dist.P2POp(dist.irecv, received[3], before), dist.P2POp(dist.isend, sent[1], after)]
        for work in (*works, own, *dist.batch_isend_irecv(batch)):
            assert work is not None
            work.wait()
        if rank == 0:
            dist.send_object_list([{"sent": sent[0]}], 1)
        elif rank == 1:
            dist.recv_object_list(objects, 0)
    return [*(tensor.detach().clone() for tensor in received), *(objects[0] or {}).values()]


PROGRAMS = (
    plain,
    in_half,
    power_sgd,
    batched_power_sgd,
    quantized,
    sharded,
    uneven_inputs,
    through_collectives,
    meshes,
    messages,
)
# The model's own operations run there too, so each program has these modes around its parts.
BACKWARD_MODES = {name: mode for name, mode in OF_THREADS.items() if name != "inference mode"}


@cache
def without_mode(program: Callable[..., list[Tensor]]) -> list[list[Tensor]]:
    return run(program, WORLD, nullcontext)


def assert_equal(program: Callable[..., list[Tensor]], found: list[list[Tensor]]) -> None:
    for got, wanted in zip(found, without_mode(program), strict=True):
        assert len(got) == len(wanted) and all(map(torch.equal, got, wanted)), program


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_and_tools_are_not_affected_by_a_mode_of_their_thread(program: Callable[..., list[Tensor]]) -> None:
    for mode in BACKWARD_MODES.values():
        assert_equal(program, run(program, WORLD, mode))


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_and_tools_are_not_affected_by_a_mode_of_the_process(program: Callable[..., list[Tensor]]) -> None:
    without_mode(program)
    for name in ("deterministic", "anomaly"):
        with OF_THE_PROCESS[name]():
            assert_equal(program, run(program, WORLD, nullcontext))


class Scaled(nn.Module):
    """Product with a weight and a buffer, which the multiplication saves for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(fill(7, (3,)))
        self.register_buffer("scale", fill(8, (3,)))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.scale).sum()


def buffers_summed(
    rank: int, size: int, library: Any = c10d, wrap: Any = nn.parallel.DistributedDataParallel
) -> list[Tensor]:
    """Return what a buffer hook that writes between forward and backward leaves."""

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            library.all_reduce(buffer)

    model = wrap(Scaled())
    model._register_buffer_comm_hook(None, hook)
    for step in range(2):
        model(fill(rank + step, (3,))).backward()
    return [model.module.weight.grad, model.module.scale]


def test_a_buffer_hook_may_write_what_backward_saved(tmp_path: Path) -> None:
    found = run(lambda rank: buffers_summed(rank, WORLD, dist, dist.DistributedDataParallel), WORLD)
    for (on_ref, theirs, _), ours in zip(compared(buffers_summed, WORLD, f"{tmp_path}/world"), found, strict=True):
        # The two DDPs divide by the number of ranks at different times.
        torch.testing.assert_close([on_ref, ours], [theirs, theirs])


# ---- the kind of mistake that the default device and dtype reveal

FACTORIES = {
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "randperm", "eye", "range"),
    *("linspace", "logspace", "as_tensor", "asarray", "empty_strided", "sparse_coo_tensor", "scalar_tensor", "normal"),
}
# Programs that measure or test: they make the tensors of a user.
PROGRAMS_OF_USERS = ("benchmark", "testing/backend_contract.py", "testing/transport_contract.py")


def test_every_tensor_that_the_library_makes_names_its_device_and_dtype() -> None:
    root, missing = Path(dist.__file__).parent, []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.startswith(PROGRAMS_OF_USERS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in FACTORIES:
                # The numbers of a mesh are of the user's dtype.
                wanted = {"device"} if node.func.attr == "as_tensor" else {"device", "dtype"}
                if absent := wanted - {keyword.arg for keyword in node.keywords}:
                    missing.append(f"{name}:{node.lineno} torch.{node.func.attr} without {sorted(absent)}")
    assert not missing
