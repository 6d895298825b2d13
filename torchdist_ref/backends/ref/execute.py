"""Reference executor: runs a plan on a link the way the definition of a schedule reads.

The tensors are divided into windows that fit the staging buffers, and the whole schedule runs for each window. Each
round has six steps:

1. Write: wait until the readers of the last round have released this rank's staging buffer. Then copy the slots that
   peers read into it.
2. Signal: post a semaphore of each peer that reads them; in the first round of a call, of all peers.
3. Wait: acquire the semaphore of each peer that this rank reads from; in the first round, of all peers.
4. Compare: in the first round, compare the calls that the peers announced with this one.
5. Copy or reduce: update this rank's slots from the senders' staging buffers. After the last round AVG divides, unless
   a single round reduces: then it divides as well.
6. Release: post the second semaphore of each peer that has been read from, so that it may write again.

Every round uses the same part of the staging buffer (no ring buffer), so a rank cannot write while its peers still
read. In an *uneven* exchange a rank knows only its own block sizes, so the ranks exchange the sizes first.

Backend `ref` uses `fast` instead, which gives the same bits sooner, unless the environment has
``TORCHDIST_REF_EXECUTOR=reference``. Tests hold both to that. Do not add here: anything that is only there for
speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdist_ref.backends import reductions
from torchdist_ref.backends.reductions import WIDENED, Reduction
from torchdist_ref.backends.ref import contiguous
from torchdist_ref.backends.ref.handshake import Handshake
from torchdist_ref.backends.ref.plan import Plan, exchange_of_sizes, operands_of, with_sizes
from torchdist_ref.calls import Number
from torchdist_ref.schedules.reduction_tree import combined
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.transports.link import Link


class ReferenceExecutor:
    """Executor without optimizations, for readers and as a reference for tests.

    Args:
        link: This rank's end of the group.
    """

    name = "reference"

    def __init__(self, link: Link) -> None:
        self._link, self._handshake = link, Handshake(link)
        # Peers that may still be reading what the last round wrote into the staging buffer.
        self._readers: Sequence[int] = ()

    def compile(self, plan: Plan) -> Plan:
        """Return the plan: nothing is compiled."""
        return plan

    @outside_modes()
    def run(self, plan: Plan, tensors: Sequence[Tensor], number: Number) -> None:
        """Run a call on tensors that are flat (`Plan.is_flat`); errors as in `fast.FastExecutor.run`."""
        self._handshake.announce(self._handshake.sequence, plan.record, number)
        try:
            on_host = contiguous.copy_to_host(plan, tensors, self._link)
            if plan.uneven:
                self._run_rounds(self._exchange_sizes(plan, on_host), on_host, check=False)
            else:
                self._run_rounds(plan, on_host, check=True)
            contiguous.copy_from_host(plan, on_host, tensors)
        except BaseException as error:
            self._handshake.fail(plan, error)
            raise
        self._handshake.complete()

    def close(self) -> None:
        """Do nothing: this executor holds no memory between calls."""

    def _run_rounds(self, plan: Plan, tensors: Sequence[Tensor], check: bool) -> None:
        link, rank, last = self._link, plan.rank, len(plan.rounds) - 1
        check = check and not self._handshake.met(plan)
        scratch = {
            slot: torch.empty(plan.window, dtype=plan.dtype, device="cpu") for slot in plan.slots if slot[0] == "tmp"
        }
        reduction = reductions.reduction(plan.reduction, plan.dtype, plan.op, True) if plan.reduction else None
        for begin in plan.windows:
            own = {slot: _window_of(plan, tensors, scratch, slot, begin) for slot in plan.slots}
            for round_index in plan.rounds:
                staged = {slot: own[slot] for slot in plan.staged(round_index, rank) if own[slot].numel()}
                first = check and begin == round_index == 0
                # 1. Write.
                for peer in self._readers:
                    link.wait_for_release(peer, plan.text)
                self._readers = ()
                for slot, values in staged.items():
                    link.write(plan.staging_offset(round_index, rank, slot), values)
                # 2. Signal.
                for peer in link.peers if first else plan.targets[round_index]:
                    link.signal(peer, plan.staged_for(round_index, peer, begin), announce=first)
                # 3. Wait.
                for peer in link.peers if first else plan.sources[round_index]:
                    link.wait_for_signal(peer, plan.text)
                # 4. Compare.
                if first:
                    self._handshake.compare(plan)
                # 5. Copy or reduce.
                for slot, moves in plan.arrivals[round_index]:
                    if own[slot].numel():
                        sources = [self._source(plan, round_index, move, own, begin) for move in moves]
                        reduce(own[slot], moves, sources, reduction, plan.divisor if plan.divides_at_once else 0)
                if plan.divisor and round_index == last and not plan.divides_at_once:
                    for slot in plan.results:
                        reductions.divide(own[slot], plan.divisor)
                # 6. Release.
                for peer in plan.sources[round_index]:
                    link.release(peer)
                self._readers = plan.targets[round_index]

    def _source(self, plan: Plan, round_index: int, move: Move, own: dict[Slot, Tensor], begin: int) -> Tensor:
        """Return the values that a move reads: in the source's staging buffer, or this rank's slot if not staged."""
        if move.read not in plan.staged(round_index, move.src):
            return own[move.read]
        offset = plan.staging_offset(round_index, move.src, move.read)
        return self._link.read(move.src, offset, plan.dtype, plan.length(move.src, move.read, begin))

    def _exchange_sizes(self, plan: Plan, tensors: Sequence[Tensor]) -> Plan:
        """Exchange the sizes of all blocks of an uneven exchange, and return its plan with them."""
        world = plan.schedule.world
        mine = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64, device="cpu")
        table = torch.empty(world, 2, world, dtype=torch.int64, device="cpu")
        self._run_rounds(exchange_of_sizes(plan), (mine, table), check=True)
        sent, expected = table[:, 0], table[:, 1].t()
        self._handshake.compare_sizes(plan, sent, expected)
        return with_sizes(plan, tuple(map(tuple, sent.tolist())))


def _window_of(plan: Plan, tensors: Sequence[Tensor], scratch: dict[Slot, Tensor], slot: Slot, begin: int) -> Tensor:
    """Return the part of one of this rank's slots in the window that begins at `begin`."""
    count = plan.length(plan.rank, slot, begin) if plan.carries_data else 0
    if slot in scratch:
        return scratch[slot][:count]
    operand, first = plan.address_of(slot)
    return tensors[operand].view(-1)[first + begin : first + begin + count]


def reduce(
    target: Tensor, moves: Sequence[Move], sources: Sequence[Tensor], reduction: Reduction | None, divisor: int
) -> None:
    """Copy or reduce the sources of moves into the slot in which they end (`plan.operands_of`).

    Sums of 16-bit floats are computed in float32, divided there if `divisor` is not 0, and rounded once. A float16 sum
    can overflow where the average does not.
    """
    operands = [target if source is None else sources[source] for source in operands_of(moves)]
    if reduction is None or len(operands) == 1:
        target.copy_(operands[0])
        return
    if target.dtype in WIDENED and not reduction.is_exact and (len(operands) > 2 or divisor):
        operands = [operand.float() for operand in operands]
    total = combined(operands, reduction.of_two)
    target.copy_(reductions.divide(total, divisor) if divisor else total)
