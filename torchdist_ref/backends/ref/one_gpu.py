"""One GPU: a call of ranks whose tensors lie on the same CUDA device. Nothing goes through the host.

Each rank has a stage there that its peers map (`CudaIpc`). For window after window every rank copies to its
stage what peers read, and reads from theirs what it needs. The stage, not the tensors, is what processes share: a
tensor comes and goes with its program, and a process that maps it would keep its memory; a stage lasts as long as its
group. A copy within a device costs little beside a call in Python.

Ranks announce where their *letter* is (`stages_on_device`); by letters they agree, at the first call on a device,
whether this can be. Where it can't, for any reason, all go through the host's memory (`staging.through_host`) from then
on, and the log says why. Streams of two processes know nothing of each other: a rank waits for its own stream before it
tells the others that it has laid out, or read. Don't add other algorithms than those of one round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from torchdist_ref.backends.ref.plan import ALIGN, Plan
from torchdist_ref.backends.ref.stages_on_device import Stages
from torchdist_ref.backends.ref.staging import settle
from torchdist_ref.backends.ref.steps import Step
from torchdist_ref.schedules import catalogue
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.transports.status_table import DEVICE_MEMORY


def on_one_gpu(plan: Plan, root: int, stages: Stages) -> OneGpu | None:
    """How a call on tensors of devices runs where these are one; None where ranks can't share memory anyway."""
    if plan.link.hosts is not None or plan.link.size == 1:
        return None
    schedule = catalogue.build(plan.sizes.op, "direct", plan.link.size, root)
    sizes = replace(plan.sizes, chunks=schedule.chunks)
    return OneGpu(replace(plan, schedule=schedule, sizes=sizes, _code={}), stages)


class OneGpu:
    """How a plan of one round runs where all ranks' tensors are on one device.

    Args:
        plan: The call; only what it says of slots is used here.
        stages: The ranks' stages.

    Attributes:
        mark: What is announced with the call.
    """

    mark = DEVICE_MEMORY

    def __init__(self, plan: Plan, stages: Stages) -> None:
        self._plan, self._stages = plan, stages
        (self._moves,) = plan.rounds
        (self._staged,) = plan.staged
        most = max((len(slots) for slots in self._staged.values()), default=1)
        # A window lies in one half while what the window before laid out in the other is read.
        self._half = stages.nbytes // 2
        self._room = self._half // most // ALIGN * ALIGN
        self._window = self._room // plan.dtype.itemsize
        self._begins = range(0, plan.sizes.largest, self._window)

    def place(self, tensors: Sequence[Tensor]) -> bytes | None:
        """Where this rank's letter is; None where it has none for this device, or the tensors are not on one."""
        return self._stages.place({tensor.device if tensor.is_cuda else None for tensor in tensors})

    def rounds(self, places: bytes) -> Iterator[tuple[Step, ...]]:
        """Round n lays out window n and reads window n - 1, so there is one more of them than there are windows."""
        yield from self._stages.agree(places)
        stages = self._stages.found[places]
        for number in range(len(self._begins) + 1):
            yield (partial(self._round, stages, number),)

    def _round(self, stages: Sequence[Tensor], number: int, tensors: Sequence[Tensor], _: int) -> None:
        if number < len(self._begins):
            self._lay(stages, number, tensors)
        if number:
            self._read(stages, number - 1, tensors)
        settle(tensors[:1])

    def _lay(self, stages: Sequence[Tensor], number: int, tensors: Sequence[Tensor]) -> None:
        rank = self._plan.link.rank
        for slot in self._staged.get(rank, ()):
            self._there(stages, rank, slot, number).copy_(self._own(tensors, slot, number))

    def _read(self, stages: Sequence[Tensor], number: int, tensors: Sequence[Tensor]) -> None:
        arriving: dict[Slot, list[Move]] = {}
        for move in self._moves:
            if move.dst == self._plan.link.rank:
                arriving.setdefault(move.write, []).append(move)
        for slot, moves in arriving.items():
            into = self._own(tensors, slot, number)
            sources = [self._source(stages, move, tensors, number) for move in moves]
            for step in self._steps(into, moves, sources):
                step(tensors, 0)

    def _steps(self, into: Tensor, moves: Sequence[Move], sources: Sequence[Tensor]) -> Iterator[Step]:
        if count := into.numel():
            yield from self._plan.arrivals.steps(into, count, moves, sources, self._plan.divide)

    def _source(self, stages: Sequence[Tensor], move: Move, tensors: Sequence[Tensor], number: int) -> Tensor:
        if move.read in self._staged.get(move.src, ()):
            return self._there(stages, move.src, move.read, number)
        return self._own(tensors, move.read, number)

    def _there(self, stages: Sequence[Tensor], rank: int, slot: Slot, number: int) -> Tensor:
        """A window of a slot as it lies on a rank's stage."""
        offset = number % 2 * self._half + self._staged[rank].index(slot) * self._room
        nbytes = self._length(rank, slot, number) * self._plan.dtype.itemsize
        return stages[rank][offset : offset + nbytes].view(self._plan.dtype)

    def _own(self, tensors: Sequence[Tensor], slot: Slot, number: int) -> Tensor:
        """A window of a slot as it lies in this rank's tensors."""
        at, first = self._plan.sizes.place(slot, self._plan.inputs)
        begin = first + self._begins[number]
        return tensors[at].view(-1)[begin : begin + self._length(self._plan.link.rank, slot, number)]

    def _length(self, rank: int, slot: Slot, number: int) -> int:
        return max(0, min(self._window, self._plan.sizes.of(rank, slot) - self._begins[number]))
