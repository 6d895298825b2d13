"""Programs for ranks of any kind: whatever the library offers above its transport. Each returns values to compare."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

import torchdist_ref as dist
from tests.parallel.training import batch, build, update
from torchdist_ref.algorithms import Join
from torchdist_ref.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, powerSGD_hook, quantization_hooks
from torchdist_ref.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as overlap
from torchdist_ref.algorithms.model_averaging import averagers
from torchdist_ref.debug import flight_recorder
from torchdist_ref.nn import functional
from torchdist_ref.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torchdist_ref.testing import fill

with warnings.catch_warnings():
    # torch's module compiles things as it is imported: here, not on a rank.
    warnings.simplefilter("ignore")
    import torch.distributed.fsdp

Program = Callable[[int], Any]
DDP = dist.DistributedDataParallel
SMALL_BUCKETS = 0.004


def state_of(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten().double() for each in model.state_dict().values()])


def losses(ddp: Any, rank: int, steps: int = 4) -> None:
    """Train with an optimizer without a state of its own."""
    model = ddp.module
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(steps):
        ddp.zero_grad()
        inputs, labels = batch(rank, step)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        update(model, momenta)


# ---- communication hooks


def nothing() -> None:
    return None


def power(rank: int, start: int = 2, **options: Any) -> Callable[[], Any]:
    return lambda: powerSGD_hook.PowerSGDState(None, rank, start, **options)


def local_state() -> Any:
    return default_hooks.PostLocalSGDState(None, dist.new_group([dist.get_rank()], use_local_synchronization=True), 2)


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (nothing, default_hooks.allreduce_hook),
    "fp16": (nothing, default_hooks.fp16_compress_hook),
    "bf16": (nothing, default_hooks.bf16_compress_hook),
    "noop": (nothing, default_hooks.noop_hook),
    "fp16 around allreduce": (nothing, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 around PowerSGD": (power(2), default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "quantization per tensor": (nothing, quantization_hooks.quantization_pertensor_hook),
    "quantization per channel": (nothing, quantization_hooks.quantization_perchannel_hook),
    "PowerSGD": (power(1), powerSGD_hook.powerSGD_hook),
    "PowerSGD without warm start": (
        power(2, use_error_feedback=False, warm_start=False),
        powerSGD_hook.powerSGD_hook,
    ),
    "PowerSGD in batches": (power(1), powerSGD_hook.batched_powerSGD_hook),
    "post-local SGD": (local_state, default_hooks.post_localSGD_hook),
}


def with_hook(name: str, rank: int) -> Tensor:
    make, hook = HOOKS[name]
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALL_BUCKETS)
    ddp.register_comm_hook(make(), hook)
    losses(ddp, rank)
    return state_of(ddp.module)


def builtin_hook(kind: Any, rank: int) -> Tensor:
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALL_BUCKETS)
    ddp._register_builtin_comm_hook(kind)  # noqa: SLF001 (torch's name)
    losses(ddp, rank)
    return state_of(ddp.module)


class Descent:
    """Optimizer that updates one parameter at a time."""

    def step_param(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.data -= 0.1 * gradient


def optimizer_in_hook(rank: int) -> Tensor:
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALL_BUCKETS)
    state = overlap._OptimizerHookState(Descent())  # noqa: SLF001 (torch's name)
    ddp.register_comm_hook(None, overlap._hook_then_optimizer(default_hooks.allreduce_hook, state))  # noqa: SLF001
    for step in range(3):
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(batch(rank, step)[0]), batch(rank, step)[1]).backward()
    return state_of(ddp.module)


def zero_in_hook(wrapper: Any, rank: int) -> Tensor:
    ddp = DDP(build("mlp"), bucket_cap_mb=SMALL_BUCKETS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, wrapper(default_hooks.allreduce_hook, ddp, zero))
    for step in range(5):
        ddp.zero_grad()
        inputs, labels = batch(rank, step)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        zero.step()
    return state_of(ddp.module)


# ---- DDP and what stands beside it


def ddp(model: str, rank: int, **options: Any) -> Tensor:
    wrapped = DDP(build(model), bucket_cap_mb=SMALL_BUCKETS, **options)
    losses(wrapped, rank)
    return state_of(wrapped.module)


def without_synchronization(rank: int) -> Tensor:
    wrapped = DDP(build("mlp"), bucket_cap_mb=SMALL_BUCKETS)
    with wrapped.no_sync():
        wrapped(batch(rank, 0)[0]).square().sum().backward()
    wrapped(batch(rank, 1)[0]).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in wrapped.parameters()])


def uneven_inputs(rank: int) -> Tensor:
    wrapped = DDP(build("mlp"), bucket_cap_mb=SMALL_BUCKETS)
    with wrapped.join():
        losses(wrapped, rank, steps=2 + 2 * rank)
    return state_of(wrapped.module)


def synchronized_batches(rank: int) -> str:
    """torch's layer normalizes on accelerators only, and DDP refuses it on the CPU."""
    try:
        DDP(nn.SyncBatchNorm.convert_sync_batchnorm(build("convnet")))
    except dist.ArgumentError as error:
        return str(error)
    return "accepted"


def zero(rank: int) -> Any:
    model = build("mlp")
    wrapped = DDP(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([wrapped, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            inputs, labels = batch(rank, step)
            nn.functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    return state_of(model), sorted(optimizer.state_dict()["state"]) if rank == 0 else None


def averaged(rank: int) -> list[Tensor]:
    weights = [nn.Parameter(fill(rank + number, shape)) for number, shape in enumerate([(2, 3), (4,)])]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    averager = averagers.PeriodicModelAverager(2, 1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(weights, lr=0.1), averager)
    found = []
    for step in range(5):
        for number, weight in enumerate(weights):
            weight.grad = fill(rank + step + number, tuple(weight.shape))
        optimizer.step()
        found.append(torch.cat([weight.detach().flatten() for weight in weights]))
    return found


def hierarchical(rank: int) -> list[Tensor]:
    from torchdist_ref.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

    size = dist.get_world_size()
    averager, found = HierarchicalModelAverager({2: size // 2, 4: size}, 0), []
    weight = nn.Parameter(fill(rank, (3, 2)))
    weight.grad = torch.zeros_like(weight)
    for step in range(5):
        averager.average_parameters([weight])
        found.append(weight.detach().clone())
        weight.data = weight.data + rank * step
    return found


# ---- differentiable collectives, pipelines, helpers


def differentiable(rank: int) -> list[Tensor]:
    size, found = dist.get_world_size(), []
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: functional.all_reduce(x),
        lambda x: functional.broadcast(x, 1),
        lambda x: torch.stack(list(functional.all_gather(x))),
        lambda x: functional.reduce_scatter(torch.empty_like(x[0]), list(x.unbind())),
        lambda x: torch.stack(list(functional.all_to_all([torch.empty_like(row) for row in x], list(x.unbind())))),
        lambda x: functional.all_to_all_single(torch.empty_like(x), x),
    ]
    for call in calls:
        inputs = (fill(rank, (size, 3), torch.float64) / 4).requires_grad_()
        result = call(inputs)
        (result**2 * fill(rank + 1, result.shape, torch.float64)).sum().backward()
        found += [result.detach(), inputs.grad]
    return found


def piped(rank: int) -> list[Tensor]:
    from torchdist_ref.pipeline.sync import Pipe
    from torchdist_ref.pipeline.sync.utils import partition_model

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(fill(number + rank, parameter.shape, torch.float64) / 16)
    pipe = Pipe(partition_model(model, [2, 1], ["cpu", "cpu"]), chunks=3, checkpoint="always")
    result = pipe(fill(rank, (6, 6), torch.float64) / 8).local_value()
    (result**2).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return [result.detach(), *(parameter.grad for parameter in model.parameters())]


def gathered_for_a_loss(rank: int) -> list[Tensor]:
    from torchdist_ref.utilities.distributed import AllGatherGrad

    tensor = (fill(rank, (2, 3), torch.float64) / 8).requires_grad_()
    rows = AllGatherGrad.apply(tensor)
    (gradient,) = torch.autograd.grad((rows**3).sum() * (rank + 1), tensor)
    return [rows.detach(), gradient]


# ---- groups, messages, futures


def groups(rank: int) -> list[Any]:
    size = dist.get_world_size()
    found: list[Any] = []
    for group in (
        dist.new_group([0, size - 1]),
        dist.split_group(split_ranks=[list(range(size // 2)), list(range(size // 2, size))]),
        dist.new_subgroups(group_size=size)[0],
        dist.new_subgroups_by_enumeration([[0], list(range(1, size))])[0],
    ):
        if group is None or dist.get_rank(group) < 0:
            found.append(None)
            continue
        dist.all_reduce(tensor := fill(rank, (3,)), group=group)
        dist.monitored_barrier(group, timeout=timedelta(seconds=30), wait_all_ranks=True)
        found += [tensor.tolist(), dist.get_process_group_ranks(group)]
    return found


def shrunk(rank: int) -> list[Any]:
    if rank == 1:
        dist.all_reduce(fill(rank, (3,)))
        return []
    dist.all_reduce(fill(rank, (3,)))
    dist.shrink_group([1])
    dist.all_reduce(tensor := fill(rank, (3,)))
    return [tensor.tolist(), dist.get_rank(), dist.get_world_size()]


def objects(rank: int) -> list[Any]:
    size = dist.get_world_size()
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "row": [rank] * 3})
    at_one: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(("from", rank), at_one, dst=1)
    shared = [{"seed": 3}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    own: list[Any] = [None]
    dist.scatter_object_list(own, [f"for {each}" for each in range(size)] if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list([{"late": True}], 1)
    received: list[Any] = [None]
    if rank == 1:
        dist.recv_object_list(received, 0)
    return [everything, at_one, shared, own, received]


def exchanged(rank: int) -> list[Any]:
    size = dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    inputs = [torch.zeros(5), torch.zeros(2, 2)]
    operations = [
        dist.P2POp(dist.isend, fill(rank, (5,)), right),
        dist.P2POp(dist.irecv, inputs[0], left),
        dist.P2POp(dist.isend, fill(rank, (2, 2)), left, tag=7),
        dist.P2POp(dist.irecv, inputs[1], right, tag=7),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    sources = []
    if rank == 0:
        sources = sorted(dist.recv(torch.zeros(1)) for _ in range(size - 1))
    else:
        dist.send(torch.ones(1), 0)
    return [*(tensor.tolist() for tensor in inputs), sources]


def coalesced(rank: int) -> list[Any]:
    tensors = [fill(rank + number, (number + 2,)) for number in range(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    dist.all_reduce_coalesced(more := [fill(rank, (2,)), fill(rank + 1, (3,))])
    return [tensor.tolist() for tensor in (*tensors, *more)]


def futures(rank: int) -> list[Any]:
    works = [dist.all_reduce(fill(rank + number, (4,)), async_op=True) for number in range(3)]
    chained = [
        work.get_future().then(lambda future, number=number: future.value()[0] * (number + 2))
        for number, work in enumerate(works)
    ]

    def again(future: Any) -> Tensor:
        # A callback that makes a call of its own.
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor)
        return tensor

    nested = works[0].get_future().then(again)
    together = torch.futures.wait_all([*chained, nested])
    seen: list[bool] = []
    work = dist.barrier(async_op=True)
    work.get_future().add_done_callback(lambda future: seen.append(future.done()))
    work.wait()
    work.get_future().wait()
    return [*(tensor.tolist() for tensor in together), work.is_completed(), seen]


def recorded(rank: int) -> list[Any]:
    dist.all_reduce(fill(rank, (3,)))
    dist.broadcast(fill(rank, (2,)), 1)
    dump = flight_recorder.snapshot(rank, "the test")
    events = [event for group in dump["groups"] if group["backend"] == "ref" for event in group["events"]]
    return [{name: event[name] for name in ("op", "number", "text", "state", "nbytes")} for event in events]


def sharded(rank: int) -> list[Tensor]:
    """Train with FSDP2, which finds the library's group as if it were torch's."""
    from torch.distributed.fsdp import fully_shard

    model = build("mlp")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, labels = batch(rank, step)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def every_collective(rank: int) -> list[Any]:
    size, found = dist.get_world_size(), []
    for operation in (
        dist.ReduceOp.SUM,
        dist.ReduceOp.MAX,
        dist.ReduceOp.MIN,
        dist.ReduceOp.AVG,
        dist.ReduceOp.PRODUCT,
    ):
        dist.all_reduce(tensor := fill(rank, (7,)), operation)
        found.append(tensor)
    dist.reduce(tensor := fill(rank, (5,)), size - 1)
    found.append(tensor if rank == size - 1 else None)
    dist.broadcast(tensor := fill(rank, (40_000,)), 1)
    found.append(tensor)
    dist.gather(fill(rank, (3,)), rows := [torch.zeros(3) for _ in range(size)] if rank == 0 else None, dst=0)
    found += rows or []
    dist.scatter(tensor := torch.zeros(3), [fill(each, (3,)) for each in range(size)] if rank == 1 else None, src=1)
    found.append(tensor)
    dist.all_gather_into_tensor(tensor := torch.zeros(2 * size), fill(rank, (2,)))
    found.append(tensor)
    dist.reduce_scatter(tensor := torch.zeros(2), [fill(rank + each, (2,)) for each in range(size)])
    found.append(tensor)
    uneven = torch.zeros(size * (rank + 1))
    dist.all_to_all_single(uneven, fill(rank, (sum(range(1, size + 1)),)), [rank + 1] * size, list(range(1, size + 1)))
    found.append(uneven)
    dist.all_to_all(parts := [torch.zeros(2) for _ in range(size)], [fill(rank + each, (2,)) for each in range(size)])
    return [*found, *parts]


PROGRAMS: dict[str, Program] = {
    **{f"hook {name}": functools.partial(with_hook, name) for name in HOOKS},
    **{f"built-in {kind.name}": functools.partial(builtin_hook, kind) for kind in dist.BuiltinCommHookType},
    "hook optimizer": optimizer_in_hook,
    "hook zero": functools.partial(zero_in_hook, ddp_zero_hook.hook_with_zero_step),
    "hook zero interleaved": functools.partial(zero_in_hook, ddp_zero_hook.hook_with_zero_step_interleaved),
    "ddp": functools.partial(ddp, "mlp"),
    "ddp with buffers": functools.partial(ddp, "convnet"),
    "ddp with unused parameters": functools.partial(ddp, "mlp", find_unused_parameters=True),
    "ddp with views": functools.partial(ddp, "transformer", gradient_as_bucket_view=True),
    "ddp static": functools.partial(ddp, "mlp", static_graph=True),
    "no_sync": without_synchronization,
    "join": uneven_inputs,
    "SyncBatchNorm": synchronized_batches,
    "ZeRO": zero,
    "averaging": averaged,
    "hierarchical averaging": hierarchical,
    "nn": differentiable,
    "pipe": piped,
    "utilities": gathered_for_a_loss,
    "groups": groups,
    "shrink": shrunk,
    "objects": objects,
    "messages": exchanged,
    "coalescing": coalesced,
    "futures": futures,
    "flight recorder": recorded,
    "collectives": every_collective,
    "FSDP2": sharded,
}
