"""The hooks that the laboratory compares: how each is put on a model, and how many bytes it should send in a step.

The byte counts are written from the shapes alone, so that what is counted while they run can be checked against them.
All follow one convention: what a rank has to send at the least for what the hook asks of the backend, 2 (n - 1) / n of
a tensor that is summed over n ranks, n - 1 times a tensor that is gathered. A new hook is a line in `CONTESTANTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import (
    PostLocalSGDState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    post_localSGD_hook,
)
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torchdist_ref.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from torchdist_ref.parallel import DistributedDataParallel

# The steps that every hook of a schedule averages exactly; PowerSGD needs two, DDP rebuilds its buckets in the first.
EXACT_STEPS = 2
LOCAL_STEPS = 4
_FLOAT, _HALF = 4, 2
_CHANNEL, _SCALE = 512, 8

Bucket = Sequence[torch.Size]
Count = Callable[[Sequence[Bucket], int], float]


@dataclass(frozen=True)
class Contestant:
    """A hook with its state.

    Attributes:
        name: As in ``--hooks``.
        words: What it does.
        register: Puts it on a model whose group is the second argument.
        nbytes: Bytes that a rank sends in a step, from each bucket's shapes and the number of ranks.
        every: In how many steps the models themselves are averaged; 0 for never.
    """

    name: str
    words: str
    register: Callable[[DistributedDataParallel, Any], None]
    nbytes: Count
    every: int = 0


def _hook(hook: Any, model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(group, hook)


def _power(hook: Any, rank: int, model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(PowerSGDState(group, rank, start_powerSGD_iter=EXACT_STEPS), hook)


def _local(model: DistributedDataParallel, group: Any) -> None:
    state = PostLocalSGDState(group, None, EXACT_STEPS, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)


def summed(world: int) -> float:
    """How many times a tensor's bytes a rank sends where it is summed over all ranks.

    >>> summed(2), summed(4)
    (1.0, 1.5)
    """
    return 2 * (world - 1) / world


def _dense(width: int, buckets: Sequence[Bucket], world: int) -> float:
    return width * sum(map(_numel, buckets)) * summed(world)


def _nothing(buckets: Sequence[Bucket], world: int) -> float:
    return 0.0


def _factors(rank: int, width: int, buckets: Sequence[Bucket], world: int) -> float:
    """An n × m matrix travels as (n + m) r numbers where that is less than half of n m, everything else as it is."""
    return width * sum(_factor(shape, rank) for bucket in buckets for shape in bucket) * summed(world)


def _factor(shape: torch.Size, rank: int) -> int:
    n, m = shape[0], shape.numel() // shape[0]
    r = min(n, m, rank)
    return (n + m) * r if len(shape) > 1 and 2 * (n + m) * r < n * m else n * m


def _square(rank: int, buckets: Sequence[Bucket], world: int) -> float:
    """A bucket as one square matrix: twice its side, for each rank."""
    return _FLOAT * sum(2 * rank * math.ceil(math.sqrt(_numel(bucket))) for bucket in buckets) * summed(world)


def _levels(width: int, buckets: Sequence[Bucket], world: int) -> float:
    """A byte a number, in rows of `width` that are filled up and have a scale and a zero each; every rank to every."""
    rows = [(math.ceil(_numel(bucket) / (width or _numel(bucket))), width or _numel(bucket)) for bucket in buckets]
    return (world - 1) * sum(count * (each + _SCALE) for count, each in rows)


def _now_and_then(every: int, buckets: Sequence[Bucket], world: int) -> float:
    return _dense(_FLOAT, buckets, world) / every


def _numel(bucket: Bucket) -> int:
    return sum(shape.numel() for shape in bucket)


def _powers() -> list[Contestant]:
    plain = [
        Contestant(
            f"powersgd-{rank}",
            f"two factors of rank {rank} in place of each matrix",
            partial(_power, powerSGD_hook, rank),
            partial(_factors, rank, _FLOAT),
        )
        for rank in (1, 2, 4)
    ]
    wrapped = [
        Contestant(
            f"{name}-powersgd-2",
            f"the same with rank 2, in {name}: a wrapper around the hook",
            partial(_power, wrapper(powerSGD_hook), 2),
            partial(_factors, 2, _HALF),
        )
        for name, wrapper in (("fp16", fp16_compress_wrapper), ("bf16", bf16_compress_wrapper))
    ]
    batched = Contestant(
        "batched-powersgd-1",
        "two factors of rank 1 in place of a whole bucket",
        partial(_power, batched_powerSGD_hook, 1),
        partial(_square, 1),
    )
    return [*plain, *wrapped, batched]


_ALL = (
    Contestant("none", "no hook: DDP's own average", lambda model, group: None, partial(_dense, _FLOAT)),
    Contestant("allreduce", "the same, by a hook", partial(_hook, allreduce_hook), partial(_dense, _FLOAT)),
    Contestant("fp16", "averaged as 16-bit floats", partial(_hook, fp16_compress_hook), partial(_dense, _HALF)),
    Contestant("bf16", "averaged as bfloat16", partial(_hook, bf16_compress_hook), partial(_dense, _HALF)),
    *_powers(),
    Contestant(
        "quantize-tensor",
        "8 bits a number, one scale a bucket",
        partial(_hook, quantization_pertensor_hook),
        partial(_levels, 0),
    ),
    Contestant(
        "quantize-channel",
        f"8 bits a number, a scale for every {_CHANNEL}",
        partial(_hook, quantization_perchannel_hook),
        partial(_levels, _CHANNEL),
    ),
    Contestant(
        "local-sgd",
        f"no gradients; every {LOCAL_STEPS} steps the models are averaged",
        _local,
        partial(_now_and_then, LOCAL_STEPS),
        every=LOCAL_STEPS,
    ),
    Contestant("noop", "nothing is sent: the floor", partial(_hook, noop_hook), _nothing),
)
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
