"""The stages of a group's ranks on a CUDA device, and the letters by which ranks agree to use them.

A letter lies in registered memory, which every rank of the host can read, and has three sheets. Each is written once,
by its rank, before this rank tells the others so: what the device is; then, if it is the same for all, an export of the
stage for each peer; then whether all peers' exports could be opened. So all ranks come to the same answer at the same
point of the same call. Tokens order what is written and what is read, as with announcements.
Don't add what a call does on the stages: that is `one_gpu`.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchdist_ref.backends.ref.executor import SomeLendError
from torchdist_ref.transports import registered_memory
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import CudaIpc, DeviceMemory, MemoryHandle, PeerMemory

log = logging.getLogger("torchdist_ref.backends")

# Bytes of a stage: what this library's staging takes on the host too.
STAGE = 16 * 1024 * 1024
MEMORY: DeviceMemory = CudaIpc()

DEVICE, EXPORTS, TROUBLE = range(3)
_LENGTH = 4


class Letter:
    """Three short texts of one rank, for the others to read.

    Args:
        memory: Where they are, as bytes.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._sheet = memory.numel() // 3

    @staticmethod
    def new(ranks: int) -> Letter:
        """An empty one."""
        with torch.inference_mode(False):
            return Letter(registered_memory.empty((Letter.size(ranks),), torch.uint8))

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the letters in a group of so many ranks: a sheet has 2 KiB for each, and takes less."""
        return 3 * 2048 * ranks

    @property
    def place(self) -> MemoryHandle | None:
        """Where it is, as others find it; None where there is no registered memory."""
        return registered_memory.handle_of(self.memory)

    def write(self, sheet: int, text: bytes) -> None:
        """Fill a sheet, for good.

        Raises:
            ValueError: The text is too long for it.
        """
        if _LENGTH + len(text) > self._sheet:
            raise ValueError(f"a sheet of {self._sheet} bytes is too short for {len(text)}")
        data = bytearray(len(text).to_bytes(_LENGTH, "little") + text)
        begin = sheet * self._sheet
        self.memory[begin : begin + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read(self, sheet: int) -> bytes:
        """What a sheet says."""
        begin = sheet * self._sheet + _LENGTH
        length = int.from_bytes(self._bytes(begin - _LENGTH, begin), "little")
        return self._bytes(begin, begin + length)

    def _bytes(self, begin: int, end: int) -> bytes:
        return bytes(self.memory[begin:end].tolist())


# How ranks that are threads of one process find each other's stages: by where the letter is.
_of_this_process: WeakValueDictionary[bytes, Tensor] = WeakValueDictionary()


class Stages:
    """The stages of one group, as one of its ranks knows them.

    Args:
        link: The group's link.
        neighbours: The registered memory of every rank, this one's too.

    Attributes:
        nbytes: Bytes of each stage.
        found: The stages of all ranks, by where their letters are.
    """

    def __init__(self, link: Link, neighbours: Sequence[PeerMemory]) -> None:
        self._rank, self._peers, self._pids = link.rank, link.peers, [row.pid for row in link.rows]
        self._neighbours, self._name, self.nbytes = neighbours, link.name, STAGE
        self._letters: dict[torch.device, Letter | None] = {}
        self.found: dict[bytes, list[Tensor]] = {}

    def place(self, devices: set[torch.device | None]) -> bytes | None:
        """Where the letter for a device is; None if a call has tensors elsewhere, or that has failed before."""
        device = next(iter(devices)) if len(devices) == 1 else None
        if device is None:
            return None
        if device not in self._letters:
            self._letters[device] = self._begin(device)
        letter = self._letters[device]
        return None if letter is None or letter.place is None else letter.place.pack()

    def _begin(self, device: torch.device) -> Letter:
        letter = Letter.new(len(self._pids))
        try:
            name = MEMORY.name(device)
        except Exception as error:
            # Like nobody else's, so that all come to know.
            name = self._trouble("name its device", error)
        letter.write(DEVICE, name.encode()[:512])
        return letter

    def agree(self, places: bytes) -> Iterator[tuple[()]]:
        """See to it that `found` has the stages of ranks whose letters lie there. At each step all wait for all.

        Raises:
            SomeLendError: It can't be; all ranks get the same answer.
        """
        if places in self.found:
            return
        letters = self._open_letters(places)
        device, mine = next((d, each) for d, each in self._letters.items() if each and self._is(each, places))
        names = sorted({letter.read(DEVICE).decode(errors="replace") for letter in letters})
        if len(names) > 1:
            raise self._refuse(device, ["the ranks' tensors are on several devices, or numbers of devices", *names])
        stages, trouble = self._export(device, mine)
        yield ()
        trouble = trouble or self._open(letters, places, stages)
        mine.write(TROUBLE, trouble.encode()[:512])
        yield ()
        reasons = [letter.read(TROUBLE).decode(errors="replace") for letter in letters]
        if any(reasons):
            raise self._refuse(device, [reason for reason in reasons if reason])
        self.found[places] = stages

    def _is(self, letter: Letter, places: bytes) -> bool:
        place = letter.place
        return place is not None and place == MemoryHandle.unpack_all(places)[self._rank]

    def _open_letters(self, places: bytes) -> list[Letter]:
        there = zip(self._neighbours, MemoryHandle.unpack_all(places), strict=True)
        size = Letter.size(len(self._pids))
        return [Letter(neighbour.view(place, torch.uint8, size)) for neighbour, place in there]

    def _export(self, device: torch.device, mine: Letter) -> tuple[list[Tensor], str]:
        """Make this rank's stage, and write what other processes need to open it; or say why that can't be."""
        exports: dict[int, bytes] = {}
        try:
            # Where the first call is made under inference mode, the stage would be of no use after it.
            with torch.inference_mode(False):
                stage = MEMORY.empty(self.nbytes, device)
            others = [peer for peer in self._peers if self._pids[peer] != os.getpid()]
            exports = {peer: MEMORY.export(stage) for peer in others}
            mine.write(EXPORTS, pickle.dumps(exports))
        except Exception as error:
            return [], self._trouble("lay out data there for others", error)
        if mine.place is not None:
            _of_this_process[mine.place.pack()] = stage
        return [stage], ""

    def _open(self, letters: Sequence[Letter], places: bytes, stages: list[Tensor]) -> str:
        """Have the stages of all ranks in order; or say why that can't be."""
        (own,) = stages
        try:
            opened = [own if r == self._rank else self._stage_of(r, letters[r], places) for r in range(len(letters))]
        except Exception as error:
            return self._trouble("use what another one has laid out there", error)
        stages[:] = opened
        return ""

    def _stage_of(self, rank: int, letter: Letter, places: bytes) -> Tensor:
        if self._pids[rank] == os.getpid():
            return _of_this_process[MemoryHandle.unpack_all(places)[rank].pack()]
        return MEMORY.open(pickle.loads(letter.read(EXPORTS))[self._rank])

    def _trouble(self, what: str, error: Exception) -> str:
        return f"rank {self._rank} can't {what} ({type(error).__name__}: {error})"

    def _refuse(self, device: torch.device, reasons: Sequence[str]) -> SomeLendError:
        self._letters[device] = None
        log.info("group %r: tensors on %s go through the host's memory: %s", self._name, device, "; ".join(reasons))
        return SomeLendError()
