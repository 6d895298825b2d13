"""Messages match receives by source and tag, posted or unexpected."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.backends.ref.tag_matching import PostedReceive
from torchdist_ref.calls import Recv
from torchdist_ref.groups import world
from torchdist_ref.testing import fill, run
from torchdist_ref.transports.mailbox import Mailbox


def ask_in_the_other_order(rank: int) -> list[float]:
    """Receive from rank 2 first, after ranks 1 and 2 have both sent."""
    if rank:
        work = dist.isend(fill(rank, (4,)), 0)
        dist.barrier()
        assert work is not None and work.wait()
        return []
    dist.barrier()
    tensors = {source: torch.zeros(4) for source in (2, 1)}
    for source, tensor in tensors.items():
        assert dist.recv(tensor, source) == source
    return [*tensors[1].tolist(), *tensors[2].tolist()]


def test_a_receive_takes_only_from_its_source() -> None:
    wanted = [*fill(1, (4,)).tolist(), *fill(2, (4,)).tolist()]
    for ranks in ("threads", "processes"):
        assert run(ask_in_the_other_order, 3, ranks=ranks)[0] == wanted


def post_for_two_sources(rank: int) -> list[float]:
    """Receives from ranks 1 and 2 are posted; rank 2 sends first, with the same tag."""
    tensors = {source: torch.zeros(4) for source in (1, 2)}
    works = [dist.irecv(tensor, source) for source, tensor in tensors.items()] if rank == 0 else []
    dist.barrier()
    if rank == 2:
        dist.send(fill(2, (4,)), 0)
    dist.barrier()
    if rank == 1:
        dist.send(fill(1, (4,)), 0)
    assert all(work is not None and work.wait() for work in works)
    return [*tensors[1].tolist(), *tensors[2].tolist()]


def test_a_message_goes_to_the_receive_that_named_its_source() -> None:
    wanted = [*fill(1, (4,)).tolist(), *fill(2, (4,)).tolist()]
    for ranks in ("threads", "processes"):
        assert run(post_for_two_sources, 3, ranks=ranks)[0] == wanted


def receive_twice_at_once(rank: int) -> list[float]:
    """Two receives are posted; the message of the second comes first."""
    if rank == 1:
        for tag in (6, 5):
            dist.send(fill(tag, (3,)), 0, tag=tag)
        return []
    tensors = [torch.zeros(3), torch.zeros(3)]
    works = [dist.irecv(tensor, 1, tag=tag) for tensor, tag in zip(tensors, (5, 6), strict=True)]
    assert all(work is not None and work.wait() for work in works)
    return [*tensors[0].tolist(), *tensors[1].tolist()]


def test_posted_receives_complete_in_the_order_of_arrival() -> None:
    wanted = [*fill(5, (3,)).tolist(), *fill(6, (3,)).tolist()]
    for ranks in ("threads", "processes"):
        assert run(receive_twice_at_once, 2, ranks=ranks)[0] == wanted


def to_oneself(rank: int) -> list[float]:
    work = dist.isend(fill(rank, (5,)), rank, tag=4)
    tensor = torch.zeros(5)
    dist.recv(tensor, rank, tag=4)
    assert work is not None and work.wait()
    return tensor.tolist()


def test_a_rank_may_send_to_itself() -> None:
    assert run(to_oneself, 2) == [fill(r, (5,)).tolist() for r in range(2)]


def exchange(rank: int) -> list[float]:
    """Send to all ranks before receiving from any: no order of waits may cause a deadlock."""
    sends = [dist.isend(fill(10 * rank + d, (70_000,)), d) for d in range(3) if d != rank]
    got = {source: torch.zeros(70_000) for source in range(3) if source != rank}
    receives = [dist.irecv(tensor, source) for source, tensor in got.items()]
    assert all(work is not None and work.wait() for work in [*sends, *receives])
    return [float(torch.equal(tensor, fill(10 * source + rank, (70_000,)))) for source, tensor in got.items()]


def test_all_ranks_may_send_first_without_a_deadlock() -> None:
    for ranks in ("threads", "processes"):
        assert run(exchange, 3, ranks=ranks) == [[1.0, 1.0]] * 3


class RingsLate:
    """Semaphore of a message that is posted, with the doorbell, just after a scan has checked it."""

    def __init__(self, offer: Any) -> None:
        self._offer, self._looks = offer, 0
        self.looked, self.due, self.rung = threading.Event(), threading.Event(), threading.Event()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        found: bool = self._offer.acquire(False)
        self._looks += 1
        self.looked.set()
        if self._looks == 2:
            self.due.set()
            assert self.rung.wait(5)
        return found


def test_a_message_that_arrives_while_another_is_received_is_not_lost() -> None:
    """Rank 1 is notified of rank 2's message, checks rank 0 first, and misses rank 0's message by a moment."""
    late: list[RingsLate] = []

    def receive(backend: Any) -> list[float]:
        into = [torch.zeros(3), torch.zeros(3)]
        receiver = backend.messages.receiver
        late.append(RingsLate(receiver.mailboxes[0].message))
        receiver.mailboxes[0].message = late[0]
        with receiver.taking:
            works = [dist.irecv(tensor, source) for tensor, source in zip(into, (0, 2), strict=True)]
            dist.barrier()
        assert all(work is not None and work.wait() for work in works)
        return torch.cat(into).tolist()

    def send_late(backend: Any) -> None:
        box = backend.messages.sender.mailboxes[1][0]
        ring = box.ring_doorbell
        box.ring_doorbell = lambda: (ring(), late[0].rung.set())
        assert late[0].due.wait(5)

    def program(rank: int) -> list[float]:
        group = dist.GroupMember.WORLD
        assert group is not None
        if rank == 1:
            return receive(group.backend)
        dist.barrier()
        send_late(group.backend) if rank == 0 else late[0].looked.wait(5)
        dist.send(fill(rank, (3,)), 1)
        return []

    assert run(program, 3)[1] == [*fill(0, (3,)).tolist(), *fill(2, (3,)).tolist()]


def test_a_message_that_rang_before_its_receive_was_posted_is_taken() -> None:
    """Rank 1 waits for rank 0, which waits for rank 2, whose message came before rank 1 posted its receive."""
    rung, checked = threading.Event(), threading.Semaphore(0)

    def receive(backend: Any) -> list[float]:
        receiver, into = backend.messages.receiver, [torch.zeros(3), torch.zeros(3)]
        check = receiver.fail_receives
        receiver.fail_receives = lambda: (check(), checked.release())
        first = dist.irecv(into[0], 0)
        dist.barrier()
        assert rung.wait(5)
        while checked.acquire(False):
            pass
        # The thread that waits for rank 0 checks for failures after each ring without a message for it.
        assert checked.acquire(timeout=5) and checked.acquire(timeout=5)
        works = [first, dist.irecv(into[1], 2)]
        assert all(work is not None and work.wait() for work in works)
        return torch.cat(into).tolist()

    def program(rank: int) -> list[float]:
        group = dist.GroupMember.WORLD
        assert group is not None
        if rank == 1:
            return receive(group.backend)
        dist.barrier()
        if rank == 0:
            dist.recv(torch.zeros(1), 2)
        else:
            box = group.backend.messages.sender.mailboxes[1][0]
            ring = box.ring_doorbell
            box.ring_doorbell = lambda: (ring(), rung.set())
        dist.send(fill(rank, (3,)), 1)
        if rank == 2:
            dist.send(torch.zeros(1), 0)
        return []

    assert run(program, 3, timeout=10)[1] == [*fill(0, (3,)).tolist(), *fill(2, (3,)).tolist()]


def sources(rank: int) -> list[int]:
    """What works of all kinds say of their source: a receive from rank 1, one from anybody; the others raise."""
    tensor, known = torch.zeros(2), []
    others = [dist.all_reduce(tensor, async_op=True), dist.barrier(async_op=True), dist.isend(tensor, 1 - rank)]
    receives = [dist.irecv(tensor, 1 - rank)]
    others.append(dist.isend(tensor, 1 - rank, tag=1))
    receives.append(dist.irecv(tensor, tag=1))
    for work in receives:
        assert work is not None and work.source_rank() in (-1, 1 - rank)
        work.wait()
        known.append(work.source_rank())
    for work in others:
        assert work is not None
        with pytest.raises(RuntimeError, match=rf"source_rank: only a receive.*rank {rank}.*irecv"):
            work.source_rank()
        work.wait()
    return known


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_only_receives_have_a_source(backend: str) -> None:
    assert run(sources, 2, backend=backend) == [[1, 1], [0, 0]]


def wait_for_the_second(rank: int) -> list[float]:
    """Rank 1 sends the first message only after rank 0 has waited for the second."""
    first, second, go_on = torch.zeros(3), torch.zeros(3), torch.zeros(1)
    if rank == 1:
        dist.send(fill(2, (3,)), 0, tag=2)
        dist.recv(go_on, 0, tag=3)
        dist.send(fill(1, (3,)), 0, tag=1)
        return []
    works = [dist.irecv(first, 1, tag=1), dist.irecv(second, 1, tag=2)]
    assert works[0] is not None and works[1] is not None
    works[1].wait()
    # A dump of the calls shows the receive that is pending.
    events = world.default_group().backend.recorder.events()
    assert [each.state for each in events if "recv(src=1, tag=1)" in each.text] == ["started"], events
    assert not works[0].is_completed()
    dist.send(go_on, 1, tag=3)
    works[0].wait()
    return [*first.tolist(), *second.tolist()]


def test_receives_complete_in_the_order_of_their_messages() -> None:
    """Once a receive completed only after all that were posted before it: pipelines waited for ever."""
    wanted = [*fill(1, (3,)).tolist(), *fill(2, (3,)).tolist()]
    for ranks in ("threads", "processes"):
        assert run(wait_for_the_second, 2, ranks=ranks, timeout=10)[0] == wanted


def receive_with_an_interruption(rank: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> str:
    """Rank 0 is interrupted in the middle of a long message."""
    if rank == 0:

        def interrupted(*arguments: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Mailbox, "receive_chunks", interrupted)
            with pytest.raises(error):
                dist.recv(torch.zeros(4_000_000), 1)
    with pytest.raises(dist.GroupAbortedError) as caught:
        dist.recv(torch.zeros(3), 1) if rank == 0 else dist.send(torch.zeros(4_000_000), 0)
    return str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_message_that_is_received_in_part_ends_the_group(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the next call of either rank waited for the time-out."""
    of_receiver, of_sender = run(receive_with_an_interruption, 2, error, monkeypatch, timeout=10)
    assert "the group ended with an earlier failure" in of_receiver
    assert f"rank 0 aborted: {error.__name__}" in of_sender


def wait_in_a_chain(rank: int) -> str:
    """Rank 0 fails; rank 1 waits for it, and rank 2 for rank 1."""
    if rank == 0:
        world.default_group().backend.abort("out of paper")
        return ""
    with pytest.raises(dist.GroupAbortedError) as caught:
        dist.recv(torch.zeros(3), rank - 1)
    assert (caught.value.culprit, caught.value.reason) == ("rank 0", "out of paper")
    return str(caught.value).partition(": ")[2]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_each_rank_of_a_chain_learns_who_failed_first(ranks: str) -> None:
    """Once each rank named the one before it, with the reason of the first."""
    _, *errors = run(wait_in_a_chain, 3, ranks=ranks, timeout=10)
    assert errors == ["rank 0 aborted: out of paper"] * 2


def fail_in_a_receive(rank: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rank 0 has no memory for the message of rank 1."""
    if rank == 0:

        def fail(*arguments: Any) -> None:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(Mailbox, "peek", fail)
            with pytest.raises(MemoryError):
                dist.recv(torch.zeros(3), 1)
        # It stays until the other knows.
    with pytest.raises(dist.GroupAbortedError) as caught:
        dist.recv(torch.zeros(3), 1) if rank == 0 else dist.send(torch.zeros(3), 0)
    return str(caught.value)


def test_a_rank_that_fails_in_a_receive_tells_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the sender waited for the time-out."""
    _, of_sender = run(fail_in_a_receive, 2, monkeypatch, timeout=10)
    assert "rank 0 aborted: MemoryError in recv(src=1, tag=0): no memory" in of_sender


class InterruptedLock:
    """Lock whose first release is interrupted, as by Ctrl-C between two statements."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._interrupts = lock, True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt


def lose_a_posted_receive(rank: int) -> tuple[bool, str, bool]:
    """Interrupt a thread that takes a message when it has found the receive, which another thread has posted."""
    backend: Any = world.default_group().backend
    receiver, link = backend.messages.receiver, backend.link
    if rank:
        return True, "", True
    receive = PostedReceive(Recv(1, 0), torch.zeros(3), time.monotonic() + 5)
    receiver.post(receive)
    receiver.lock = InterruptedLock(receiver.lock)
    fields = (0, receive.record.fingerprint, 12)
    message = SimpleNamespace(acquire=lambda block: True)
    with pytest.raises(KeyboardInterrupt):
        receiver.accept_next(SimpleNamespace(source=1, message=message, peek=lambda: fields))
    return receive.ended, repr(receive.error), link.broken is not None


def test_an_interrupted_receive_is_not_lost_and_its_sender_learns_of_it() -> None:
    """Once the thread that had posted the receive waited without a deadline, and the sender for the time-out."""
    assert run(lose_a_posted_receive, 2)[0] == (True, "KeyboardInterrupt()", True)


def wait_for_a_message(rank: int, given_up: threading.Event) -> tuple[str, tuple[int, ...]]:
    if rank:
        assert rank == 1 or given_up.wait(10)
        dist.send(fill(rank, (4,)), 0)
        return "", ()
    tensors = [torch.zeros(4), torch.zeros(4)]
    works: list[Any] = [dist.irecv(tensor, source) for tensor, source in zip(tensors, (2, None), strict=True)]
    with pytest.raises(dist.RankStalledError) as caught:
        works[0].wait(0.01)
    assert works[1].wait() and works[1].source_rank() == 1 and torch.equal(tensors[1], fill(1, (4,)))
    given_up.set()
    assert works[0].wait() and torch.equal(tensors[0], fill(2, (4,)))
    return str(caught.value), caught.value.ranks


def test_a_wait_for_a_message_that_gives_up_names_its_sender() -> None:
    text, ranks = run(wait_for_a_message, 3, threading.Event())[0]
    assert text.startswith("recv: not done after 0.01 s of waiting; the call itself is still running. ")
    assert text.endswith("It waits for rank 2 of group 'world'.")
    assert ranks == (2,)


def receive_while_another_thread_gives(rank: int) -> list[float]:
    """Receive a message to this rank itself that another thread has taken for the receive, and not yet written."""
    receiver: Any = world.default_group().backend.messages.receiver
    post, give, finish = receiver.post, receiver.give, receiver.finish
    taken, write = threading.Event(), threading.Event()

    def post_and_send(receive: Any) -> None:
        post(receive)
        receiver.post = post
        sender = threading.Thread(target=dist.isend, args=(fill(3, (5,)), rank))
        sender.start()
        senders.append(sender)
        assert taken.wait(20)

    def give_late(*of_message: Any) -> None:
        taken.set()
        assert write.wait(20)
        give(*of_message)

    def finish_late(receive: Any) -> None:
        write.set()
        finish(receive)

    senders: list[threading.Thread] = []
    receiver.post, receiver.give, receiver.finish = post_and_send, give_late, finish_late
    tensor = torch.zeros(5)
    try:
        assert dist.recv(tensor, rank) == rank
    finally:
        write.set()
        for sender in senders:
            sender.join()
    return tensor.tolist()


def test_a_message_to_itself_that_comes_while_a_receive_looks_for_it_is_received() -> None:
    """Once the receive said that there is none, and the message was lost."""
    assert run(receive_while_another_thread_gives, 1, ranks="processes") == [fill(3, (5,)).tolist()]
