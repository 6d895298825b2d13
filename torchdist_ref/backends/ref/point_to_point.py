"""Point to point: which message is whose, by source and tag.

Sends to one rank go one after the other; sends to different ranks don't wait for each other. Receives are
posted; one thread at a time (any that waits, else a thread of the group) takes what arrives and hands each
message to the first posted receive that it fits. A message that nobody has posted for is kept until
somebody does. So tags match in any order, and `recv` takes from any rank.

Don't add bytes or windows here: how a message travels is `transports.mailbox`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from torchdist_ref.backends.ref.progress import Lane
from torchdist_ref.calls import Recv, Send, fingerprint
from torchdist_ref.errors import DistError, MismatchError, RankStalledError
from torchdist_ref.timeouts import CHECK_SECONDS
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.mailbox import Mailbox
from torchdist_ref.transports.status_table import Announcement

T = TypeVar("T")


def record_of(tensor: Tensor) -> Announcement:
    """What sender and receiver must agree on: dtype and number of elements."""
    return _record(tensor.dtype, tensor.numel())


@lru_cache(maxsize=256)
def _record(dtype: torch.dtype, count: int) -> Announcement:
    text = f"a message of {count} x {str(dtype).removeprefix('torch.')}"
    return Announcement(fingerprint(text), text.encode())


class Posted:
    """A receive that waits for its message."""

    __slots__ = ("call", "deadline", "ended", "error", "record", "source", "tensor")

    def __init__(self, call: Recv, tensor: Tensor, deadline: float) -> None:
        self.call, self.tensor, self.deadline = call, tensor, deadline
        self.record = record_of(tensor)
        self.source = -1
        self.error: BaseException | None = None
        self.ended = False

    def fits(self, source: int, tag: int) -> bool:
        """Whether a message of this source and tag is for this receive."""
        return self.call.src in (None, source) and self.call.tag == tag

    def end(self, source: int, error: BaseException | None = None) -> None:
        """The message is in the tensor, or will never be."""
        self.source, self.error = source, error
        self.ended = True


@dataclass(frozen=True, slots=True)
class Kept:
    """A message that came before its receive was posted."""

    source: int
    tag: int
    fingerprint: int
    text: str
    data: Tensor


class OnFirstUse(dict[int, T]):
    """What there is for each rank, made when it is first asked for: many groups never see a message.

    >>> names = OnFirstUse(lambda rank: f"rank {rank}")
    >>> names[2], dict(names)
    ('rank 2', {2: 'rank 2'})
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rank: int) -> T:
        # Of two threads that ask at once both get the same.
        return self.setdefault(rank, self._make(rank))


class Outbox:
    """This rank's sends, in order for each destination."""

    def __init__(self, link: Link) -> None:
        self._ways = OnFirstUse(lambda peer: (Mailbox(link, link.rank, peer), threading.Lock()))
        self.lanes = {peer: Lane(f"{link.name} to {peer}") for peer in link.peers}

    def send(self, call: Send, tensor: Tensor) -> None:
        """Deliver now. Raises what the mailbox raises; a half-sent message ends the pair."""
        box, one_at_a_time = self._ways[call.dst]
        with one_at_a_time:
            box.send(call.tag, record_of(tensor), tensor)


class Inbox:
    """This rank's posted receives and kept messages."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._boxes = OnFirstUse(lambda peer: Mailbox(link, peer, link.rank))
        self._bell = link.segment.semaphore(link.layout, "doorbell", link.rank, link.rank)
        self._posted: list[Posted] = []
        self._kept: list[Kept] = []
        self._state = threading.Lock()
        self._taking = threading.Lock()

    def keep(self, tag: int, tensor: Tensor) -> None:
        """A message from this rank to itself."""
        copy = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().view(-1))
        record = record_of(tensor)
        self._arrived(Kept(self._link.rank, tag, record.fingerprint, record.text.decode(), copy.view(torch.uint8)))

    def post(self, receive: Posted) -> None:
        """Give it a kept message, or let it wait for one."""
        with self._state:
            kept = next((k for k in self._kept if receive.fits(k.source, k.tag)), None) if self._kept else None
            if kept is None:
                self._posted.append(receive)
                return
            self._kept.remove(kept)
        self._hand(receive, kept)

    def _arrived(self, kept: Kept) -> None:
        with self._state:
            receive = self._match(kept.source, kept.tag)
            if receive is None:
                self._kept.append(kept)
                return
        self._hand(receive, kept)

    def _match(self, source: int, tag: int) -> Posted | None:
        for place, receive in enumerate(self._posted):
            if receive.fits(source, tag):
                del self._posted[place]
                return receive
        return None

    def _hand(self, receive: Posted, kept: Kept) -> None:
        if receive.record.fingerprint != kept.fingerprint:
            receive.end(kept.source, self._misfit(receive.call, receive.record, kept.source, kept.tag, kept.text))
            return
        receive.tensor.view(-1).copy_(kept.data.view(receive.tensor.dtype))
        receive.end(kept.source)

    def take_at_once(self, call: Recv, tensor: Tensor) -> bool:
        """Receive without posting, if nothing else is waited for and the message comes while it is good to spin.

        Raises:
            MismatchError: As `finish` does.
        """
        source = call.src
        if source is None or source == self._link.rank:
            return False
        box = self._boxes[source]
        if not self._taking.acquire(False):
            return False
        try:
            while not self._posted and not self._kept and (box.message.acquire(False) or self._link.spin(box.message)):
                if box.peek()[0] == call.tag:
                    self._take(box, call, tensor)
                    # Bells would pile up. This one may be another sender's, but nobody is waiting for that: whoever
                    # comes to wait looks at all offers first. Where somebody waits, no bell may be taken in passing.
                    self._bell.acquire(False)
                    return True
                self._accept(box)
            return False
        finally:
            self._taking.release()

    def _take(self, box: Mailbox, call: Recv, tensor: Tensor) -> None:
        """The message at the head is for this receive."""
        record = record_of(tensor)
        if box.peek()[1] == record.fingerprint:
            box.receive(tensor, "recv")
            return
        error = self._misfit(call, record, box.source, call.tag, box.text())
        box.reject(f"{call} of {record.text.decode()}")
        raise error

    def finish(self, receive: Posted) -> None:
        """Wait for a posted receive, taking what arrives for anybody meanwhile.

        Raises:
            MismatchError: The message was of another size or dtype; the sender knows too.
            RankStalledError: Nothing came in time.
            DistBackendError: The sender died, left or gave up.
        """
        try:
            while not receive.ended:
                if self._taking.acquire(timeout=CHECK_SECONDS):
                    try:
                        self._take_until(receive)
                    finally:
                        self._taking.release()
        except BaseException:
            self._forget(receive)
            raise
        if receive.error is not None:
            raise receive.error

    def _forget(self, receive: Posted) -> None:
        with self._state:
            self._posted = [p for p in self._posted if p is not receive]

    def _take_until(self, receive: Posted) -> None:
        self._scan()
        while not receive.ended:
            if self._rang():
                self._scan()
            else:
                self._fail_hopeless()

    def _rang(self) -> bool:
        return self._link.spin(self._bell) or self._bell.acquire(True, CHECK_SECONDS)

    def _scan(self) -> None:
        with self._state:
            wanted = {p.call.src for p in self._posted}
        for peer in self._link.peers if None in wanted else wanted:
            if peer is not None and peer != self._link.rank and self._boxes[peer].message.acquire(False):
                self._accept(self._boxes[peer])

    def _accept(self, box: Mailbox) -> None:
        """Bring the message at the head to the first receive that it fits, or keep it."""
        peer, (tag, fingerprint, nbytes) = box.source, box.peek()
        with self._state:
            receive = self._match(peer, tag)
        if receive is not None:
            self._receive(receive, box)
            return
        data, text = torch.empty(nbytes, dtype=torch.uint8), box.text()
        box.receive(data, f"a message with tag {tag}")
        self._arrived(Kept(peer, tag, fingerprint, text, data))

    def _receive(self, receive: Posted, box: Mailbox) -> None:
        try:
            self._take(box, receive.call, receive.tensor)
        except DistError as error:
            receive.end(box.source, error)
        except BaseException as error:
            receive.end(box.source, error)
            raise
        else:
            receive.end(box.source)

    def _misfit(self, call: Recv, record: Announcement, source: int, tag: int, text: str) -> MismatchError:
        link = self._link
        return MismatchError(
            f"{link.context(str(call))}: expects {record.text.decode()}, but {link.rank_names([source])} sent "
            f"{text} with tag {tag}. Nothing was written."
        )

    def _fail_hopeless(self) -> None:
        """End the receives whose message can't come any more, or did not come in time."""
        with self._state:
            posted = list(self._posted)
        for receive in posted:
            error = self._hopeless(receive)
            if error is not None:
                self._scan()
                if not receive.ended:
                    self._forget(receive)
                    receive.end(-1, error)

    def _hopeless(self, receive: Posted) -> BaseException | None:
        link, doing = self._link, str(receive.call)
        sources: Sequence[int] = link.peers if receive.call.src is None else (receive.call.src,)
        troubles = [link.failure([source], doing) for source in sources if source != link.rank]
        if troubles and all(troubles):
            return troubles[0]
        if monotonic() < receive.deadline:
            return None
        if receive.call.src is not None:
            return link.stall_error(receive.call.src, doing, link.timeout)
        tag = receive.call.tag
        return RankStalledError(f"{link.context(doing)}: no rank sent with tag {tag} within {link.timeout:g} s.")
