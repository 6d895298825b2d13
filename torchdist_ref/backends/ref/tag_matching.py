"""Point-to-point messages: which message is for which receive, by source and tag.

Sends to one rank run one after the other; sends to different ranks don't wait for each other. Receives that wait are in
the posted-receive queue. One thread at a time (any that waits, else a thread of the group) takes messages as they
arrive, and gives each to the first posted receive that it matches. A message without one goes to the
unexpected-message queue until a receive for it is posted. So tags match in any order, and `recv` takes from any rank.

Do not add bytes or windows here: how a message travels is `transports.mailbox`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from time import monotonic, perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchdist_ref.backends.operands import PLAIN_TYPES
from torchdist_ref.backends.ref.contiguous import contiguous_on_host, copy_back, receive_buffer, side_streams
from torchdist_ref.backends.worker_threads import WorkerThread, WorkFactory, settle
from torchdist_ref.calls import Call, Number, Recv, Send, fingerprint
from torchdist_ref.errors import (
    ArgumentError,
    DistError,
    GroupAbortedError,
    MismatchError,
    RankDiedError,
    RankStalledError,
    add_note,
    on_rank,
)
from torchdist_ref.recorder import END, Entry, Operands, Recorder
from torchdist_ref.timeouts import CHECK_SECONDS
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.mailbox import Mailbox
from torchdist_ref.transports.segment import Announcement
from torchdist_ref.work import Done, Work

T = TypeVar("T")
_SAME_TAG = "Pass the same tag to send and recv."
_DONE = Done()
# Messages are not counted among a group's collectives.
POINT_TO_POINT: Number = (-1, 0)


class MessageKind(NamedTuple):
    """Kind of message: what sender and receiver must agree on (dtype and number of elements), operands, bytes."""

    record: Announcement
    operands: Operands
    nbytes: int


@lru_cache(maxsize=256)
def _kind_of(dtype: torch.dtype, shape: torch.Size) -> MessageKind:
    """Return what the messages of a dtype and shape have in common: announcement, operands and size."""
    text = f"a message of {shape.numel()} x {str(dtype).removeprefix('torch.')}"
    return MessageKind(
        Announcement(fingerprint(text), text.encode()), (((dtype, shape),), ()), shape.numel() * dtype.itemsize
    )


def record_of(tensor: Tensor) -> Announcement:
    """Return what sender and receiver of a message must agree on."""
    return _kind_of(tensor.dtype, tensor.shape).record


class PostedReceive:
    """Receive that waits for its message.

    Args:
        call: The call.
        tensor: Memory for the message.
        deadline: Time at which it must be there.
        on_end: Function to call once, when the message is there or will not come. Default: none.
    """

    __slots__ = ("call", "deadline", "ended", "error", "on_end", "record", "source", "tensor")

    def __init__(self, call: Recv, tensor: Tensor, deadline: float, on_end: Callable[[], None] | None = None) -> None:
        self.call, self.tensor, self.deadline, self.on_end = call, tensor, deadline, on_end
        self.record = record_of(tensor)
        self.source = -1
        self.error: BaseException | None = None
        self.ended = False

    def matches(self, source: int, tag: int) -> bool:
        """Return whether a message of this source and tag is for this receive."""
        return self.call.src in (None, source) and self.call.tag == tag

    def end(self, source: int, error: BaseException | None = None) -> None:
        """Announcement that the message is in the tensor, or the error for which it never will be."""
        self.source, self.error = source, error
        self.ended = True
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()


@dataclass(frozen=True, slots=True)
class UnexpectedMessage:
    """Message that arrived before its receive was posted."""

    source: int
    tag: int
    fingerprint: int
    text: str
    data: Tensor


class ByRank(dict[int, T]):
    """Something for each rank, made on first use: many groups never send a message.

    >>> names = ByRank(lambda rank: f"rank {rank}")
    >>> names[2], dict(names)
    ('rank 2', {2: 'rank 2'})
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rank: int) -> T:
        # Two threads that ask at once get the same object.
        return self.setdefault(rank, self._make(rank))


class Sender:
    """This rank's sends, in order for each destination.

    Attributes:
        queues: A send queue for each peer.
        mailboxes: The mailbox to each peer, and a lock for one send at a time.
    """

    def __init__(self, link: Link) -> None:
        self.mailboxes = ByRank(lambda peer: (Mailbox(link, link.rank, peer), threading.Lock()))
        self.queues = ByRank(lambda peer: WorkerThread(f"{link.name} to {peer}"))

    def send(self, record: Announcement, call: Send, tensor: Tensor) -> None:
        """Deliver a message now. Raises what the mailbox raises; a half-sent message ends the pair."""
        mailbox, one_at_a_time = self.mailboxes[call.dst]
        with one_at_a_time:
            mailbox.send(call.tag, record, tensor)


class Receiver:
    """This rank's posted-receive and unexpected-message queues.

    Attributes:
        mailboxes: The mailbox of each peer's messages.
        lock: Held while the two queues are read or changed.
        taking: Held by the thread that takes messages.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.mailboxes = ByRank(lambda peer: Mailbox(link, peer, link.rank))
        self._doorbell = link.segment.semaphore(link.layout, "doorbell", link.rank, link.rank)
        self._posted: list[PostedReceive] = []
        self._unexpected: list[UnexpectedMessage] = []
        self.lock = threading.Lock()
        self.taking = threading.Lock()
        self._ending = False

    @outside_modes()
    def send_to_self(self, tag: int, tensor: Tensor) -> None:
        """Add a message from this rank to itself."""
        copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu").copy_(tensor.view(-1))
        record, data = record_of(tensor), copy.view(torch.uint8)
        self._arrived(UnexpectedMessage(self.link.rank, tag, record.fingerprint, record.text.decode(), data))

    def post(self, receive: PostedReceive) -> None:
        """Give a receive an unexpected message, or post it."""
        with self.lock:
            messages = (m for m in self._unexpected if receive.matches(m.source, m.tag))
            message = next(messages, None) if self._unexpected else None
            if message is None:
                self._posted.append(receive)
            else:
                self._unexpected.remove(message)
        if message is not None:
            self.give(receive, message)
        elif self.taking.locked():
            # A thread that waits for another receive may have heard the ring of this one's message, and left it: its
            # sender waits for this rank, perhaps before it does what the other receive is about.
            self._doorbell.release()

    def end_all(self) -> None:
        """End the posted receives whose messages have not come, for a rank that destroys the group."""
        if not self._ending:
            self._ending = True
            self._doorbell.release()

    def refuse_unsent(self, receive: PostedReceive) -> None:
        """Raise if a receive of this rank from itself has no message yet: its thread would wait for itself.

        Raises:
            ArgumentError: There is none.
        """
        with self.lock:
            # Another thread may just give it its message.
            unsent = receive in self._posted
            if unsent:
                self._posted.remove(receive)
        if unsent:
            raise ArgumentError(
                f"recv: Invalid source rank: source rank should not be the same as the rank of the current process"
                f"{on_rank()}, unless a message to itself was sent before, and none with tag {receive.call.tag} is "
                "pending. Call isend first, or use irecv."
            )

    def _arrived(self, message: UnexpectedMessage) -> None:
        with self.lock:
            receive = self._match(message.source, message.tag)
            if receive is None:
                self._unexpected.append(message)
                return
            self._posted.remove(receive)
        self.give(receive, message)

    def _match(self, source: int, tag: int) -> PostedReceive | None:
        return next((receive for receive in self._posted if receive.matches(source, tag)), None)

    def give(self, receive: PostedReceive, message: UnexpectedMessage) -> None:
        """Copy an unexpected message to a receive that it matches, and end the receive."""
        source, tag = message.source, message.tag
        if receive.record.fingerprint != message.fingerprint:
            receive.end(source, self._mismatch(receive.call, receive.record, source, tag, message.text))
            return
        with outside_modes():
            receive.tensor.view(-1).copy_(message.data.view(receive.tensor.dtype))
        receive.end(source)

    def take_at_once(self, record: Announcement, call: Recv, tensor: Tensor) -> bool:
        """Receive without posting, if both queues are empty and the message arrives while this thread spins.

        Raises:
            MismatchError: As `finish` does.
        """
        source = call.src
        if source is None or source == self.link.rank:
            return False
        mailbox = self.mailboxes[source]
        if not self.taking.acquire(False):
            return False
        try:
            while not (self._posted or self._unexpected):
                if not (mailbox.message.acquire(False) or self.link.spin(mailbox.message)):
                    return False
                try:
                    tag, fingerprint, _ = mailbox.peek()
                    if tag == call.tag:
                        self._take(mailbox, fingerprint, record, call, tensor)
                        # Rings would pile up. This one may be for another sender, but nobody waits for that: a thread
                        # that comes to wait looks at all offers first. Where one waits, no ring may be taken here.
                        self._doorbell.acquire(False)
                        return True
                    self._accept(mailbox)
                except BaseException as failure:
                    self._abort_if_interrupted(failure, mailbox)
                    raise
            return False
        finally:
            self.taking.release()

    def _take(self, box: Mailbox, fingerprint: int, record: Announcement, call: Recv, tensor: Tensor) -> None:
        """Receive the message at the head, which is for this call."""
        if fingerprint == record.fingerprint:
            box.receive(tensor, "recv")
            return
        error = self._mismatch(call, record, box.source, call.tag, box.text())
        box.reject(f"{call} of {record.text.decode()}")
        raise error

    def finish(self, receive: PostedReceive) -> None:
        """Wait for a posted receive, and meanwhile take the messages of all others.

        Raises:
            MismatchError: The message was of another size or dtype; the sender gets this error too.
            RankStalledError: Nothing came in time.
            DistBackendError: The sender died, left or aborted.
        """
        try:
            while not receive.ended:
                if self.taking.acquire(timeout=CHECK_SECONDS):
                    try:
                        self._take_until(receive)
                    finally:
                        self.taking.release()
        except BaseException:
            self._forget(receive)
            raise
        if receive.error is not None:
            raise receive.error

    def _forget(self, receive: PostedReceive) -> None:
        with self.lock:
            self._posted = [p for p in self._posted if p is not receive]

    def _take_until(self, receive: PostedReceive) -> None:
        self._scan()
        while not receive.ended:
            rung = self.link.spin(self._doorbell) or self._doorbell.acquire(True, self._seconds_to_wait())
            # A peer that fails rings without a message, and so does this rank when it destroys the group.
            if not (rung and self._scan()):
                self.fail_receives()

    def _seconds_to_wait(self) -> float:
        """Return the time until the first posted receive has to give up, or until the next look for failed peers."""
        with self.lock:
            first = min((posted.deadline for posted in self._posted), default=inf)
        return max(0.0, min(CHECK_SECONDS, first - monotonic()))

    def _scan(self) -> bool:
        """Take a message from each peer that a posted receive names; return whether there was one."""
        with self.lock:
            wanted = {p.call.src for p in self._posted}
        found = False
        for peer in self.link.peers if None in wanted else wanted:
            if peer is not None and peer != self.link.rank:
                found |= self.accept_next(self.mailboxes[peer])
        return found

    def accept_next(self, box: Mailbox) -> bool:
        """Receive the next message of a peer, and return whether there was one."""
        try:
            if box.message.acquire(False):
                self._accept(box)
                return True
            return False
        except BaseException as failure:
            self._abort_if_interrupted(failure, box)
            raise

    def _abort_if_interrupted(self, failure: BaseException, box: Mailbox) -> None:
        """End the group if a signal's handler has raised while a message was taken: its sender waits for this rank."""
        if not isinstance(failure, Exception):
            self.link.abort(failure, f"a receive from {self.link.rank_names([box.source])}")

    def _accept(self, box: Mailbox) -> None:
        """Receive the message at the head into the first receive that it matches, or as an unexpected message."""
        peer, (tag, fingerprint, nbytes) = box.source, box.peek()
        receive = None
        try:
            with self.lock:
                receive = self._match(peer, tag)
                if receive is not None:
                    self._posted.remove(receive)
            if receive is not None:
                self._take(box, fingerprint, receive.record, receive.call, receive.tensor)
                receive.end(peer)
                return
        except BaseException as error:
            if receive is not None:
                # A thread waits for it, which would find it in no queue.
                self._forget(receive)
                receive.end(peer, error)
            if not isinstance(error, DistError):
                raise
            return
        with outside_modes():
            data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        text = box.text()
        box.receive(data, f"a message with tag {tag}")
        self._arrived(UnexpectedMessage(peer, tag, fingerprint, text, data))

    def _mismatch(self, call: Recv, record: Announcement, source: int, tag: int, text: str) -> MismatchError:
        link = self.link
        return MismatchError(
            f"{link.context(str(call))}: expects {record.text.decode()}, but {link.rank_names([source])} sent "
            f"{text} with tag {tag}. Nothing was written."
        )

    def fail_receives(self) -> None:
        """End the receives whose message cannot arrive any more, or did not arrive in time."""
        with self.lock:
            posted = list(self._posted)
        for receive in posted:
            error = self._failure_of(receive)
            if error is not None:
                while not receive.ended and self._scan():
                    pass
                if not receive.ended:
                    self._forget(receive)
                    receive.end(-1, error)

    def _failure_of(self, receive: PostedReceive) -> BaseException | None:
        link, operation = self.link, str(receive.call)
        sources: Sequence[int] = link.peers if receive.call.src is None else (receive.call.src,)
        # One that has left in good order is a sender less, unless it was the last one; any other failure counts.
        concerned = [source for source in sources if not link.rows[source].has_left] or sources
        error = link.failure([source for source in concerned if source != link.rank], operation)
        others = self._other_tags(sources)
        if error is not None:
            if others:
                add_note(error, f"No message with tag {receive.call.tag} came, but {others}. {_SAME_TAG}")
            return error
        if self._ending:
            ended = link.left_meanwhile(operation)
            # The others learn of it when this rank has delivered its messages.
            ended.definite = True
            return ended
        if monotonic() < receive.deadline:
            return None
        if others:
            return RankStalledError(
                f"{link.context(operation)}: no message with tag {receive.call.tag} came in {link.timeout:g} s, but "
                f"{others}. {_SAME_TAG}{link.deaths()}"
            )
        if receive.call.src is not None:
            return link.stall_error(receive.call.src, operation, link.timeout)
        tag = receive.call.tag
        return RankStalledError(
            f"{link.context(operation)}: no rank sent with tag {tag} within {link.timeout:g} s.{link.deaths()}"
        )

    def _other_tags(self, sources: Sequence[int]) -> str:
        """Return the unexpected messages of some ranks as text, for an error."""
        with self.lock:
            found = sorted({(m.source, m.tag) for m in self._unexpected if m.source in sources})
        return ", ".join(f"{self.link.rank_names([source])} sent one with tag {tag}" for source, tag in found)


class Messages:
    """Sends and receives of one group on one rank.

    Args:
        link: This rank's end of the group.
        recorder: The last calls of this group on this rank.
        make_work: Makes the Work of a call (operation, outputs, number).
        in_memory: Sizes in bytes of tensors that were found in memory, by address.
        check_memory: Raises if an operand is not in memory (call, inputs, outputs, all of them).
    """

    def __init__(
        self,
        link: Link,
        recorder: Recorder,
        make_work: WorkFactory,
        in_memory: Mapping[int, int],
        check_memory: Callable[[Call, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None],
    ) -> None:
        self._in_memory, self._check_memory = in_memory, check_memory
        self._link, self._rank = link, link.rank
        self._recorder, self._make_work = recorder, make_work
        self.sender, self.receiver = Sender(link), Receiver(link)
        # Results of receives that are over when they return, by source, which a Work carries.
        self._received: dict[int | None, Work] = {r: Done("recv", [], r) for r in range(link.size)}
        # One thread takes messages for as long as a receive is pending. Another one completes receives, in the order in
        # which their messages came: a program may wait for a later one before it has the others' messages sent.
        self._receives = WorkerThread(f"{link.name} receives")
        self._completions = WorkerThread(f"{link.name} completions")

    def send(self, call: Send, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Start a send; see `Backend.submit`."""
        kind = self._checked_kind(call, inputs[0])
        tensor = contiguous_on_host(inputs[0], call, self._link)
        if call.dst == self._rank:
            self.receiver.send_to_self(call.tag, tensor)
            return Done("send", [])
        queue = self.sender.queues[call.dst]
        if wait and queue.idle:
            self._timed(self._record(kind, call), call, self.sender.send, kind.record, call, tensor)
            return _DONE
        work = self._make_work(call.op, [], POINT_TO_POINT)
        work.awaited = partial(self._link.awaited, call.dst)

        def run() -> None:
            self._timed(self._record(kind, call), call, self.sender.send, kind.record, call, tensor)

        try:
            queue.put(lambda: settle(work, run))
        except BaseException as failure:
            # No thread can be started for a call that others wait for.
            self._link.abort_unless_definite(failure, str(call))
            raise
        if wait:
            work.wait()
        return work

    def receive(self, call: Recv, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Start a receive; see `Backend.submit`."""
        (tensor,) = outputs
        kind, buffer = self._checked_kind(call, tensor), receive_buffer(tensor, call)
        entry = self._record(kind, call)
        if wait:
            return self._timed(entry, call, self._receive_now, kind.record, call, buffer, tensor)
        work = self._make_work(call.op, [tensor], POINT_TO_POINT)
        on_side_streams = side_streams((tensor,), self._link, str(call))
        if call.src is not None:
            work.awaited = partial(self._link.awaited, call.src)

        def finish() -> None:
            with on_side_streams():
                work.source = self._timed(entry, call, self._finish, receive, tensor)

        complete = partial(self._completions.put, lambda: settle(work, finish))
        receive = PostedReceive(call, buffer, monotonic() + self._link.timeout, complete)
        try:
            # Before a message can come.
            self._completions.start()
            self._receives.start()
        except BaseException as failure:
            self._link.abort_unless_definite(failure, str(call))
            raise
        self.receiver.post(receive)
        self._receives.put(lambda: self._take_messages(receive))
        return work

    def _checked_kind(self, call: Send | Recv, tensor: Tensor) -> MessageKind:
        """Return the kind of message of a tensor; raise if the tensor is not in memory."""
        try:
            if type(tensor) in PLAIN_TYPES:
                kind = _kind_of(tensor.dtype, tensor.shape)
                if self._in_memory.get(tensor.data_ptr(), 0) >= kind.nbytes:
                    return kind
        except RuntimeError:
            # A tensor without storage.
            pass
        operands = (tensor,)
        self._check_memory(call, operands, operands, operands)
        return _kind_of(tensor.dtype, tensor.shape)

    def _take_messages(self, receive: PostedReceive) -> None:
        """Take messages until a receive has ended; its Work raises the error."""
        try:
            self.receiver.finish(receive)
        except BaseException as error:
            if not receive.ended:
                receive.end(-1, error)

    def _receive_now(self, record: Announcement, call: Recv, buffer: Tensor, tensor: Tensor) -> Work:
        """Receive on this thread, and return the completed `Work`."""
        if buffer is tensor and self.receiver.take_at_once(record, call, tensor):
            return self._received[call.src]
        receive = PostedReceive(call, buffer, monotonic() + self._link.timeout)
        self.receiver.post(receive)
        if call.src == self._rank:
            self.receiver.refuse_unsent(receive)
        return self._received[self._finish(receive, tensor)]

    def _finish(self, receive: PostedReceive, tensor: Tensor) -> int:
        self.receiver.finish(receive)
        if receive.tensor is not tensor:
            with outside_modes():
                copy_back(receive.tensor, tensor)
        return receive.source

    def _record(self, kind: MessageKind, call: Call) -> Entry:
        """Begin an entry of the flight recorder."""
        entry: Entry = [POINT_TO_POINT, call, kind.operands, perf_counter(), 0.0, ""]
        self._recorder.record(entry)
        return entry

    def _timed(self, entry: Entry, call: Call, act: Callable[..., T], *arguments: Any) -> T:
        """Call a function, and end its entry in the flight recorder by its result or its error."""
        try:
            result = act(*arguments)
        except BaseException as failure:
            # The other ranks first: the recorder may write a file.
            self._pass_on(failure, call)
            self._recorder.fail(entry, failure)
            raise
        entry[END] = perf_counter()
        return result

    def _pass_on(self, failure: BaseException, call: Call) -> None:
        """End the group, for ranks that wait for this one, where it can't go on.

        That is after a message that was sent in part, the failure of a peer, or an error that is none of communication.
        """
        unforeseen = isinstance(failure, Exception) and not isinstance(failure, (DistError, ArgumentError))
        if unforeseen or isinstance(failure, (RankDiedError, GroupAbortedError)) or isinstance(call, Send):
            self._link.abort_unless_definite(failure, str(call))

    def end_receives(self) -> None:
        """End the receives whose messages have not come."""
        self.receiver.end_all()

    @property
    def threads(self) -> list[WorkerThread]:
        """Threads of sends and receives; the last one completes what others have received."""
        return [*self.sender.queues.values(), self._receives, self._completions]
