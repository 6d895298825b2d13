"""One GPU: collectives of ranks whose tensors are on the same device. Nothing goes through the host's memory.

Each rank has a staging buffer on the device that its peers map (`MEMORIES`). For window after
window, every rank copies to its buffer what peers read, and reads from theirs what it needs. The buffer, not the
tensors, is what processes share: a tensor lasts as long as its program wants, and a process that maps it would keep its
memory; a buffer lasts as long as its group. A copy within a device costs little beside a call in Python.

At the first call on a device, ranks agree whether this works, by control blocks in registered memory. A control block
has three fields. Each is written once, before its rank signals the others: the name of the device; then, if it is the
same for all, a handle of the buffer for each peer; then whether all peers' handles could be opened. So all ranks get
the same answer at the same point of the same call. If one rank fails, all use the host's memory from then on
(`contiguous.copy_to_host`), and the log gives the reason.

Streams of two processes are not ordered: a rank waits for its own stream before it signals that it has written, or
read. Do not add algorithms of more than one round.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchdist_ref.backends.ref.contiguous import settle
from torchdist_ref.backends.ref.handshake import SomeUnregisteredError
from torchdist_ref.backends.ref.plan import ALIGNMENT, Plan, with_schedule
from torchdist_ref.backends.ref.steps import Part, Scratch, Step, StepMaker, Tensors
from torchdist_ref.backends.ref.zero_copy import Phases, ZeroCopyPath
from torchdist_ref.schedules import catalogue
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.transports import registered_memory
from torchdist_ref.transports.cuda_ipc import MEMORIES
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import DeviceMemory, MemoryHandle, PeerMemory
from torchdist_ref.transports.segment import DEVICE_MEMORY

log = logging.getLogger("torchdist_ref.backends")

# Bytes of a rank's staging buffer on a device: as many as of its rings in the host's memory, for all groups.
BUFFER_BYTES = 16 * 1024 * 1024

DEVICE, HANDLES, FAILURE = range(3)
_LENGTH_BYTES = 4
_FIELD_BYTES_PER_RANK = 2048
_TEXT_BYTES = 512


def device_path(plan: Plan, buffers: DeviceBuffers, scratch: Scratch) -> DevicePath:
    """Return how a call runs on tensors of devices where all ranks have the same device."""
    schedule = catalogue.build(plan.op, "direct", plan.schedule.world, plan.root)
    return DevicePath(with_schedule(plan, schedule), buffers, scratch)


class DevicePath(ZeroCopyPath):
    """Way to run a plan of one round where all ranks' tensors are on one device.

    Args:
        plan: The call.
        buffers: The ranks' staging buffers.
        scratch: Memory for partial results.
    """

    mark = DEVICE_MEMORY

    def __init__(self, plan: Plan, buffers: DeviceBuffers, scratch: Scratch) -> None:
        super().__init__()
        self.plan, self._buffers, self._scratch = plan, buffers, scratch
        # A window is in one half of the buffer while the window before it is read in the other.
        self.half = buffers.nbytes // 2
        self.capacity = self.half // plan.most_staged // ALIGNMENT * ALIGNMENT
        self.window = self.capacity // plan.dtype.itemsize

    def location(self, tensors: Sequence[Tensor]) -> bytes | None:
        """See `ZeroCopyPath.location`: of this rank's control block, if the tensors are on a device that has one."""
        return self._buffers.location({None if tensor.is_cpu else tensor.device for tensor in tensors})

    def phases(self, locations: bytes) -> Iterator[Sequence[Step]]:
        """See `ZeroCopyPath.phases`. The first call on a device begins with the agreement."""
        yield from self._buffers.agree(locations)
        yield from super().phases(locations)

    def compile(self, locations: bytes) -> Phases:
        """See `ZeroCopyPath.compile`. Phase n writes window n and reads window n - 1."""
        plan, slots = self.plan, DeviceSlots(self, self._buffers.found[locations])
        maker, begins = StepMaker(plan, self._scratch, on_device=True), range(0, plan.sizes.largest, self.window)
        moves = plan.moves_into(0)
        phases: list[list[Step]] = [[] for _ in range(len(begins) + 1)]
        for number, begin in enumerate(begins):
            for slot in plan.staged(0, plan.rank):
                if count := slots.count(plan.rank, slot, begin):
                    target, source = slots.view(plan.rank, slot, begin), slots.target(plan.rank, slot, begin)
                    phases[number].append(maker.copy(target, source, count))
            phases[number + 1].extend(maker.of_moves(0, moves, slots, begin))
        link, text = self._buffers.link, plan.text

        # No method: the phases would keep this object, which keeps them, and so the buffers, after the group's end.
        def settle_first(tensors: Tensors, begin: int) -> None:
            settle(tensors[:1], link, text)

        return tuple((*phase, settle_first) for phase in phases)


class DeviceSlots:
    """Addresses of slots in the ranks' staging buffers on a device, and in this rank's tensors.

    Args:
        path: The call.
        buffers: The staging buffer of every rank.
    """

    def __init__(self, path: DevicePath, buffers: Sequence[Tensor]) -> None:
        self._path, self._plan, self._buffers = path, path.plan, buffers

    def count(self, rank: int, slot: Slot, begin: int) -> int:
        """See `steps.Addresses`."""
        return max(0, min(self._path.window, self._plan.sizes.of(rank, slot) - begin))

    def target(self, rank: int, slot: Slot, begin: int) -> Part:
        """See `steps.Addresses`."""
        operand, first = self._plan.address_of(slot)
        return Part(operand, first + begin)

    def source(self, number: int, move: Move, begin: int) -> Part | Tensor:
        """See `steps.Addresses`."""
        if move.read in self._plan.staged(number, move.src):
            return self.view(move.src, move.read, begin)
        return self.target(move.src, move.read, begin)

    def view(self, rank: int, slot: Slot, begin: int) -> Tensor:
        """Return a window of a slot in a rank's staging buffer."""
        half = begin // self._path.window % 2 * self._path.half
        offset = half + self._plan.staged(0, rank)[slot] * self._path.capacity
        nbytes = self.count(rank, slot, begin) * self._plan.dtype.itemsize
        return self._buffers[rank][offset : offset + nbytes].view(self._plan.dtype)


class ControlBlock:
    """Three texts of one rank, for the others to read.

    Args:
        memory: The bytes that hold them.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._field_bytes = memory.numel() // 3

    @staticmethod
    def new(ranks: int) -> ControlBlock:
        """Return an empty control block in registered memory."""
        return ControlBlock(registered_memory.empty((ControlBlock.size(ranks),), torch.uint8))

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of a control block in a group of so many ranks."""
        return 3 * _FIELD_BYTES_PER_RANK * ranks

    @property
    def place(self) -> MemoryHandle | None:
        """Location of the block, for peers; None where there is no registered memory."""
        return registered_memory.handle_of(self.memory)

    def write(self, field: int, text: bytes) -> None:
        """Write a field, once.

        Raises:
            ValueError: The text is too long for it.
        """
        if _LENGTH_BYTES + len(text) > self._field_bytes:
            raise ValueError(f"a field of {self._field_bytes} bytes is too short for {len(text)}")
        data = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        begin = field * self._field_bytes
        self.memory[begin : begin + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read(self, field: int) -> bytes:
        """Return the text of a field."""
        begin = field * self._field_bytes + _LENGTH_BYTES
        length = int.from_bytes(self._bytes(begin - _LENGTH_BYTES, begin), "little")
        return self._bytes(begin, begin + length)

    def _bytes(self, begin: int, end: int) -> bytes:
        return bytes(self.memory[begin:end].tolist())


# Buffers of this process by the location of the control block, for ranks that are threads of it.
_of_this_process: WeakValueDictionary[bytes, Tensor] = WeakValueDictionary()


class DeviceBuffers:
    """The staging buffers of one group on devices, as one of its ranks knows them.

    Args:
        link: The group's link.
        neighbors: The registered memory of every rank, including this one.

    Attributes:
        link: The group's link.
        nbytes: Bytes of each buffer.
        found: The buffers of all ranks, by the locations of their control blocks.
    """

    def __init__(self, link: Link, neighbors: Sequence[PeerMemory]) -> None:
        self.link = link
        self._rank, self._peers, self._pids = link.rank, link.peers, [row.pid for row in link.rows]
        self._neighbors, self._name, self.nbytes = neighbors, link.name, BUFFER_BYTES
        self._blocks: dict[torch.device, ControlBlock | None] = {}
        self.found: dict[bytes, list[Tensor]] = {}

    def location(self, devices: set[torch.device | None]) -> bytes | None:
        """Return where the control block for a device is; None for tensors elsewhere, or where this failed before."""
        device = next(iter(devices)) if len(devices) == 1 else None
        if device is None or device.type not in MEMORIES:
            return None
        if device not in self._blocks:
            self._blocks[device] = self._name_device(device)
        block = self._blocks[device]
        return None if block is None or block.place is None else block.place.pack()

    def _name_device(self, device: torch.device) -> ControlBlock:
        block = ControlBlock.new(len(self._pids))
        try:
            name = MEMORIES[device.type].name(device)
        except Exception as error:
            # No other rank has this name, so all learn of the failure.
            name = self._failure("name its device", error)
        block.write(DEVICE, name.encode()[:_TEXT_BYTES])
        return block

    def agree(self, locations: bytes) -> Iterator[tuple[()]]:
        """Open the buffers of the ranks whose control blocks are there, into `found`. At each step all wait for all.

        Raises:
            SomeUnregisteredError: A rank failed; all ranks get the same answer.
        """
        if locations in self.found:
            return
        blocks = self._open_blocks(locations)
        device, mine = next((d, each) for d, each in self._blocks.items() if each and self._is(each, locations))
        names = sorted({block.read(DEVICE).decode(errors="replace") for block in blocks})
        if len(names) > 1:
            raise self._refuse(device, ["the ranks' tensors are on several devices, or numbers of devices", *names])
        memory = MEMORIES[device.type]
        buffers, failure = self._export(memory, device, mine)
        yield ()
        failure = failure or self._open(memory, blocks, locations, buffers)
        mine.write(FAILURE, failure.encode()[:_TEXT_BYTES])
        yield ()
        reasons = [block.read(FAILURE).decode(errors="replace") for block in blocks]
        if any(reasons):
            raise self._refuse(device, [reason for reason in reasons if reason])
        self.found[locations] = buffers

    def _is(self, block: ControlBlock, locations: bytes) -> bool:
        place = block.place
        return place is not None and place == MemoryHandle.unpack_all(locations)[self._rank]

    def _open_blocks(self, locations: bytes) -> list[ControlBlock]:
        there = zip(self._neighbors, MemoryHandle.unpack_all(locations), strict=True)
        size = ControlBlock.size(len(self._pids))
        return [ControlBlock(neighbor.view(place, torch.uint8, size)) for neighbor, place in there]

    def _export(self, memory: DeviceMemory, device: torch.device, mine: ControlBlock) -> tuple[list[Tensor], str]:
        """Allocate this rank's buffer and write its handles for other processes; or return why that failed."""
        handles: dict[int, bytes] = {}
        try:
            buffer = memory.empty(self.nbytes, device)
            others = [peer for peer in self._peers if self._pids[peer] != os.getpid()]
            handles = {peer: memory.export(buffer) for peer in others}
            mine.write(HANDLES, pickle.dumps(handles))
        except Exception as error:
            return [], self._failure("export memory there", error)
        if mine.place is not None:
            _of_this_process[mine.place.pack()] = buffer
        return [buffer], ""

    def _open(
        self, memory: DeviceMemory, blocks: Sequence[ControlBlock], locations: bytes, buffers: list[Tensor]
    ) -> str:
        """Replace this rank's buffer by those of all ranks in order; or return why that failed."""
        (own,) = buffers
        try:
            ranks: Iterable[int] = range(len(blocks))
            opened = [own if r == self._rank else self._buffer_of(memory, r, blocks[r], locations) for r in ranks]
        except Exception as error:
            return self._failure("open a peer's memory there", error)
        buffers[:] = opened
        return ""

    def _buffer_of(self, memory: DeviceMemory, rank: int, block: ControlBlock, locations: bytes) -> Tensor:
        if self._pids[rank] == os.getpid():
            return _of_this_process[MemoryHandle.unpack_all(locations)[rank].pack()]
        return memory.open(pickle.loads(block.read(HANDLES))[self._rank])

    def close(self) -> None:
        """Release the buffers, and give back the memory of those that the peers have released."""
        self.found.clear()
        for device in self._blocks:
            MEMORIES[device.type].collect()

    def _failure(self, action: str, error: Exception) -> str:
        return f"rank {self._rank} can't {action} ({type(error).__name__}: {error})"

    def _refuse(self, device: torch.device, reasons: Sequence[str]) -> SomeUnregisteredError:
        self._blocks[device] = None
        log.info("group %r: tensors on %s go through the host's memory: %s", self._name, device, "; ".join(reasons))
        return SomeUnregisteredError()
