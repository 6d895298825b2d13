"""Mailbox: point-to-point messages from one rank to another.

There is a mailbox for each ordered pair of ranks. The sender writes a message header (tag, fingerprint, size) and the
first chunk of the data, then posts the message semaphore (eager protocol). A longer message follows in chunks, as many
at a time as the ring buffer holds, so that both sides copy at once. A message begins where the previous one ended, if
it fits there. The receiver reads the header and accepts or rejects the message. It replies in both cases: a send that
returns was received, and a mismatch raises on both sides. Between ranks without common memory, the later chunks go over
a `DirectPath` from tensor to tensor, once the receiver has accepted (rendezvous protocol).

Do not match messages to receives here: backends do. A mailbox only knows the message at its head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.errors import MismatchError
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.transports.base import DirectPath, Range, Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import CACHE_LINE, MESSAGE_HEADER_BYTES, Announcement, memmove_for

# Fields of a message header in words, and offsets of its texts in bytes.
_TAG, _FINGERPRINT, _NBYTES, _VERDICT = range(4)
_FIELDS_BYTES, _TEXT, _REPLY, _TEXT_BYTES = 64, 64, 512, 384
_ACCEPTED, _REJECTED = 0, 1

_DIRECT_CHUNK_BYTES = 512 * 1024
"""Size of a chunk on a direct path. The kernel's socket buffers hold two, so that the sender rarely waits."""

_MAX_TRANSFERS = 64
"""Transfers that stay prepared: loops repeat a few sizes."""

# A message is split into four chunks, so that the receiver starts early. Chunks under 64 KiB cost more in signals than
# they overlap; chunks over 256 KiB leave the cache before the receiver reads them.
_CHUNKS, _MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 4, 64 * 1024, 256 * 1024

_SAME_OFFSET_BYTES = 4 * 1024
"""Size up to which consecutive messages reuse one offset: rewriting so few cache lines costs nothing."""


class MessageChunk(NamedTuple):
    """Part of a message.

    Attributes:
        ring_offset: Offset in the ring buffer, from the message's own.
        tensor_offset: Offset in the tensor in bytes.
        nbytes: Size in bytes.
        signal: Function that makes the chunk visible to the receiver.
    """

    ring_offset: int
    tensor_offset: int
    nbytes: int
    signal: Callable[[], Any]


class MessageTransfer(NamedTuple):
    """Chunks and copy function for messages of one size.

    Attributes:
        chunks: Chunks in order. Chunk `i` reuses the memory of chunk `i - capacity`.
        capacity: Number of chunks that the ring buffer holds at once.
        nbytes: Bytes of the ring buffer that the message uses.
        memmove: Copy function for one chunk.
    """

    chunks: tuple[MessageChunk, ...]
    capacity: int
    nbytes: int
    memmove: Callable[[int, int, int], None]


class Mailbox:
    """Sender's or receiver's end of the mailbox from `source` to `target`.

    Attributes:
        message: Semaphore that the sender posts for each message. Acquire it before `peek`.
    """

    def __init__(self, link: Link, source: int, target: int) -> None:
        self.link, self.source, self.target = link, source, target
        self.peer = target if link.rank == source else source
        segment, layout = link.segment, link.layout
        self._header_offset = begin = layout.message_header(source, target)
        # The mailbox is part of the sender's memory; a receiver on another host has a copy.
        self._header = segment.bytes_of(source)[begin : begin + MESSAGE_HEADER_BYTES]
        self._fields = self._header[:_FIELDS_BYTES].cast("q")
        self._ring_offset, self._ring_bytes = layout.mailbox_ring(source, target), layout.mailbox_ring_bytes
        self._next = 0
        self._ring = torch.frombuffer(
            segment.buffer_of(source), dtype=torch.uint8, count=self._ring_bytes, offset=self._ring_offset
        )
        self._address = self._ring.data_ptr()
        self._written: Announcement | None = None
        self._tag, self._description = -1, ""
        self._transfers: dict[int, MessageTransfer] = {}
        self.message = segment.semaphore(layout, "message", source, target)
        self._reply = segment.semaphore(layout, "reply", target, source)
        self._chunk = segment.semaphore(layout, "chunk", source, target)
        self._credit = segment.semaphore(layout, "credit", target, source)
        self._direct = segment.direct_path(self.peer)
        fields = [(begin, _FIELDS_BYTES)]
        self.ring_doorbell = self._make_signal("doorbell")
        self._post_reply = self._make_signal("reply", fields)
        self._post_credit = self._make_signal("credit", fields)

    def send(self, tag: int, record: Announcement, tensor: Tensor, timeout: float | None = None) -> None:
        """Send a contiguous tensor; return when the receiver has it.

        Raises:
            MismatchError: The receiver expects something else, and has rejected the message.
        """
        fields, nbytes, address = self._fields, tensor.nbytes, tensor.data_ptr()
        transfer = self._transfers.get(nbytes) or self._new_transfer(nbytes)
        begin = self._begin_of(transfer)
        fields[_TAG], fields[_FINGERPRINT] = tag, record.fingerprint
        fields[_NBYTES], fields[_VERDICT] = nbytes, _ACCEPTED
        if self._written is not record or self._tag != tag:
            self._write_text(record, tag)
        _, _, size, signal = transfer.chunks[0]
        transfer.memmove(begin, address, size)
        signal()
        self.ring_doorbell()
        if size < nbytes and self._direct is None:
            self._send_chunks(transfer, begin, address, timeout)
        if not self._reply.acquire(False):
            self.acquire(self._reply, self._description, timeout)
        if fields[_VERDICT] == _REJECTED:
            raise MismatchError(
                f"{self.link.context(self._description)}: {self.link.rank_names([self.peer])} expects something else: "
                f"{self._get_text(_REPLY)}. Nothing was written."
            )
        if size < nbytes and self._direct is not None:
            self._send_direct(self._direct, _direct_chunks(tensor, size), timeout)

    def _write_text(self, record: Announcement, tag: int) -> None:
        self._written, self._tag = record, tag
        self._description = f"send(dst={self.target}, tag={tag}): {record.text.decode()}"
        self._put_text(_TEXT, record.text)

    def _begin_of(self, transfer: MessageTransfer) -> int:
        """Return the address of the next message. Both sides compute the same offset."""
        begin = self._next if self._next + transfer.nbytes <= self._ring_bytes else 0
        self._next = begin + (transfer.nbytes if transfer.nbytes > _SAME_OFFSET_BYTES else 0)
        return self._address + begin

    def _send_chunks(self, transfer: MessageTransfer, begin: int, address: int, timeout: float | None) -> None:
        for number, (ring_offset, tensor_offset, nbytes, signal) in enumerate(transfer.chunks[1:], 1):
            if number >= transfer.capacity:
                self.acquire(self._credit, self._description, timeout)
                if self._fields[_VERDICT] == _REJECTED:
                    return
            transfer.memmove(begin + ring_offset, address + tensor_offset, nbytes)
            signal()

    def _send_direct(self, path: DirectPath, chunks: list[memoryview], timeout: float | None) -> None:
        # Two chunks are in flight at a time: one credit returns for each.
        for number, chunk in enumerate(chunks):
            if number > 1:
                self.acquire(self._credit, self._description, timeout)
            path.send("chunk", chunk)
        for _ in chunks[:2]:
            self.acquire(self._credit, self._description, timeout)

    def peek(self) -> tuple[int, int, int]:
        """Return tag, fingerprint and size of the message at the head, after acquiring `message`."""
        fields = self._fields
        return fields[_TAG], fields[_FINGERPRINT], fields[_NBYTES]

    def text(self) -> str:
        """Return the sender's description of the message at the head."""
        return self._get_text(_TEXT)

    def reject(self, text: str) -> None:
        """Reject the message at the head. The send raises with `text`, the description of the expected message."""
        nbytes = self._fields[_NBYTES]
        transfer = self._transfers.get(nbytes) or self._new_transfer(nbytes)
        self._begin_of(transfer)
        self._put_text(_REPLY, text.encode())
        self._fields[_VERDICT] = _REJECTED
        if len(transfer.chunks) > transfer.capacity:
            self._post_credit()
        # The sender writes as many chunks as the ring buffer holds before it sees the verdict.
        for _ in transfer.chunks[1 : transfer.capacity]:
            self.acquire(self._chunk, text, None)
        self._make_signal("reply", [(self._header_offset, MESSAGE_HEADER_BYTES)])()

    def receive(self, tensor: Tensor, description: str, timeout: float | None = None) -> None:
        """Receive the message at the head into a contiguous tensor of its size."""
        nbytes = self._fields[_NBYTES]
        transfer, address = self._transfers.get(nbytes) or self._new_transfer(nbytes), tensor.data_ptr()
        begin, size = self._begin_of(transfer), transfer.chunks[0].nbytes
        try:
            transfer.memmove(address, begin, size)
            if size < nbytes and self._direct is None:
                self.receive_chunks(transfer, begin, address, description, timeout)
            if size == nbytes or self._direct is None:
                self._post_reply()
                return
            chunks = _direct_chunks(tensor, size)
            self._direct.post_receive(chunks)
            self._post_reply()
            for _ in chunks:
                self.acquire(self._chunk, description, timeout)
                self._post_credit()
        except BaseException as failure:
            if self._direct is not None:
                self._direct.cancel_receives()
            # Neither side can use a message of which a part has been received.
            self.link.abort_unless_definite(failure, description)
            raise

    def receive_chunks(
        self, transfer: MessageTransfer, begin: int, address: int, description: str, timeout: float | None
    ) -> None:
        """Copy the chunks of a message to an address as they arrive."""
        credits = len(transfer.chunks) - transfer.capacity
        for number, (ring_offset, tensor_offset, nbytes, _) in enumerate(transfer.chunks[1:]):
            if number < credits:
                self._post_credit()
            if not self._chunk.acquire(False):
                self.acquire(self._chunk, description, timeout)
            transfer.memmove(address + tensor_offset, begin + ring_offset, nbytes)

    def acquire(self, semaphore: Semaphore, description: str, timeout: float | None) -> None:
        """Wait for a semaphore that the peer posts; raise if it fails or the time is over."""
        self.link.acquire(semaphore, self.peer, description, timeout, only_peer=True)

    def _make_signal(self, kind: str, ranges: list[Range] | None = None) -> Callable[[], Any]:
        """Return the function that signals the peer that ranges of this mailbox are written."""
        return self.link.make_signal(kind, self.peer, ranges or [], owner=self.source)

    def _new_transfer(self, nbytes: int) -> MessageTransfer:
        """Return how a message of this size is cut into chunks, and keep it for the next one."""
        if len(self._transfers) >= _MAX_TRANSFERS:
            self._transfers.clear()
        wanted = _MAX_CHUNK_BYTES if self._direct else max(nbytes // _CHUNKS, _MIN_CHUNK_BYTES)
        size = min(wanted, _MAX_CHUNK_BYTES, self._ring_bytes // 2)
        capacity, end = self._ring_bytes // size, min(nbytes, size) if self._direct else nbytes
        chunks = [
            self._new_chunk(at, min(size, nbytes - at), at // size % capacity * size) for at in range(0, end, size)
        ]
        # With a direct path the first chunk always uses the same offset, which its signal contains.
        used = 0 if self._direct else min(-(-nbytes // CACHE_LINE) * CACHE_LINE, self._ring_bytes)
        transfer = MessageTransfer(tuple(chunks) or (self._new_chunk(0, 0, 0),), capacity, used, memmove_for(size))
        self._transfers[nbytes] = transfer
        return transfer

    def _new_chunk(self, tensor_offset: int, nbytes: int, ring_offset: int) -> MessageChunk:
        """Return one chunk of a message, with the signal that announces it; the first also announces the message."""
        data = (self._ring_offset + ring_offset, nbytes)
        if tensor_offset:
            signal = self._make_signal("chunk", [data])
        else:
            signal = self._make_signal("message", [(self._header_offset, MESSAGE_HEADER_BYTES), data])
        return MessageChunk(ring_offset, tensor_offset, nbytes, signal)

    def _put_text(self, at: int, text: bytes) -> None:
        text = text[: _TEXT_BYTES - 2]
        self._header[at : at + 2 + len(text)] = len(text).to_bytes(2, "little") + text

    def _get_text(self, at: int) -> str:
        length = min(int.from_bytes(self._header[at : at + 2], "little"), _TEXT_BYTES - 2)
        return bytes(self._header[at + 2 : at + 2 + length]).decode(errors="replace")


def _direct_chunks(tensor: Tensor, first: int) -> list[memoryview]:
    """Return the memory of a contiguous tensor from byte `first` on, in chunks for a direct path."""
    with outside_modes():
        data = tensor.detach().view(-1).view(torch.uint8).numpy().data[first:]
    return [data[at : at + _DIRECT_CHUNK_BYTES] for at in range(0, len(data), _DIRECT_CHUNK_BYTES)]
