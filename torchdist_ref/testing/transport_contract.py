"""Contract of every transport, as a function that runs on a transport of your own.

`check_transport` connects ranks with the transport's `connect` and runs one clause after the other on the links: memory
ordering of semaphores, delivery of messages, and the end of every wait. Backends rely on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchdist_ref.errors import GroupAbortedError, MismatchError, RankStalledError
from torchdist_ref.stores import HashStore, PrefixStore, Store
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.running import run
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.mailbox import Mailbox
from torchdist_ref.transports.segment import ROW_BYTES, Announcement

Connect = Callable[[Store, int, Sequence[int], str, float], Link]


def check_transport(connect: Connect, size: int = 3) -> None:
    """Check a transport against the whole contract, with ranks as threads of this process.

    Args:
        connect: Function that returns one rank's link. Arguments: a store, the rank, the members' global ranks, a name,
            and a time-out in seconds.
        size: Number of ranks, at least 2.

    Raises:
        RankError: A clause does not hold; the cause names it.

    Example:
        >>> from torchdist_ref.testing.transport_contract import check_transport
        >>> from torchdist_ref.transports.selection import connect_threads
        >>> check_transport(connect_threads)
    """
    store = HashStore()
    members = [10 * rank for rank in range(size)]

    def program(rank: int) -> None:
        for number, clause in enumerate(CLAUSES):
            link = connect(PrefixStore(str(number), store), rank, members, clause.__name__, 5.0)
            try:
                clause(link)
            except AssertionError as error:
                raise AssertionError(f"{clause.__name__} does not hold on rank {rank}: {error}") from error
            finally:
                link.close()

    run(program, size, init=False)


def _barrier(link: Link) -> None:
    """Wait for all ranks, and make the status rows and two eager buffers of each visible to all."""
    ranges = [(link.layout.status_row(link.rank), ROW_BYTES)]
    ranges += [(link.layout.eager_buffer(link.rank, cell), 4 * 500) for cell in (0, 1)]
    for peer in link.peers:
        link.make_signal("ready", peer, ranges)()
    for peer in link.peers:
        link.wait_for_signal(peer, "barrier")


def semaphores_count(link: Link) -> None:
    """Check that a semaphore can be acquired as often as it was posted, for each poster separately."""
    for peer in link.peers:
        for _ in range(link.rank + 2):
            link.make_signal("ready", peer)()
    for peer in link.peers:
        for _ in range(peer + 2):
            link.wait_for_signal(peer, "count")
        assert not link.ready_from[peer].acquire(False), f"more signals than rank {peer} has posted"


def writes_are_visible_after_acquire(link: Link) -> None:
    """Check that writes before a post are visible after the acquire, and that staging buffers do not overlap."""
    for iteration in range(20):
        _eager_buffer(link, link.rank, iteration & 1).copy_(fill(link.rank + iteration, (500,)))
        _barrier(link)
        for peer in link.peers:
            data = _eager_buffer(link, peer, iteration & 1)
            assert torch.equal(data, fill(peer + iteration, (500,))), f"data of rank {peer} in iteration {iteration}"
        _barrier(link)


def _eager_buffer(link: Link, rank: int, cell: int) -> torch.Tensor:
    offset = link.layout.eager_buffer(rank, cell)
    return torch.frombuffer(link.segment.buffer_of(rank), dtype=torch.float32, count=500, offset=offset)


def a_round_writes_signals_waits_reads_and_releases(link: Link) -> None:
    """Check the operations of a round: no rank overwrites data before all peers have released it."""
    offset, count = 256, 3000
    for iteration in range(10):
        for peer in link.peers if iteration else ():
            link.wait_for_release(peer, "write")
        link.row.announce(iteration, Announcement(5 + link.rank * iteration, b"a round"))
        link.write(offset, fill(link.rank + 7 * iteration, (count,)))
        for peer in link.peers:
            link.signal(peer, [(offset, 4 * count)], announce=True)
        for peer in link.peers:
            link.wait_for_signal(peer, "read")
            data = link.read(peer, offset, torch.float32, count)
            assert torch.equal(data, fill(peer + 7 * iteration, (count,))), (
                f"data of rank {peer}, iteration {iteration}"
            )
            announced = link.rows[peer].headers[iteration & 1][1]
            assert announced == 5 + peer * iteration, f"announcement of rank {peer}, iteration {iteration}"
            link.release(peer)


def status_rows_show_calls(link: Link) -> None:
    """Check that every rank can read the announced and completed calls of the others."""
    link.row.announce(0, Announcement(7 + link.rank, f"call of {link.rank}".encode()))
    _barrier(link)
    for peer in link.peers:
        assert link.rows[peer].headers[0][1] == 7 + peer
        assert link.rows[peer].describe() == f"is in call 0, call of {peer}"
    _barrier(link)
    link.row.completed = 0
    _barrier(link)
    for peer in link.peers:
        assert link.rows[peer].describe() == f"completed call 0, call of {peer}, and has made no other"
    _barrier(link)


def messages_of_all_sizes_are_delivered(link: Link) -> None:
    """Check that a mailbox delivers messages of every size with their tag, also those larger than its ring buffer."""
    if link.rank > 1:
        return
    mailbox = Mailbox(link, 0, 1)
    # Sizes that wrap around the ring buffer, and sizes that must not reuse its memory too early.
    part = link.layout.mailbox_ring_bytes // 4 // 5
    wrapping = 3 * link.layout.mailbox_ring_bytes // 4 + 5
    for count in (0, 1, 1000, 2 * part, 2, 2 * part, 2 * part + 1, wrapping, part):
        record = Announcement(count, f"message of {count}".encode())
        if link.rank == 0:
            mailbox.send(count + 1, record, fill(count, (count,)))
        else:
            link.acquire(mailbox.message, 0, "receive", only_peer=True)
            header = mailbox.peek()
            assert header == (count + 1, record.fingerprint, 4 * count), header
            assert mailbox.text() == f"message of {count}", mailbox.text()
            tensor = torch.zeros(count)
            mailbox.receive(tensor, "receive")
            assert torch.equal(tensor, fill(count, (count,))), (
                f"message of {count}: a transport without common memory needs a `direct_path`"
            )


def rejected_messages_raise_on_the_sender(link: Link) -> None:
    """Check that rejecting a message, a long one too, makes the send raise, and that the next one is delivered."""
    if link.rank > 1:
        return
    mailbox = Mailbox(link, 0, 1)
    for count in (3, link.layout.mailbox_ring_bytes // 16, link.layout.mailbox_ring_bytes):
        if link.rank == 0:
            try:
                mailbox.send(1, Announcement(1, b"first"), torch.ones(count))
            except MismatchError as error:
                assert "rank 1 (global 10) expects something else: five" in str(error), str(error)
            else:
                raise AssertionError("the send returned")
            mailbox.send(2, Announcement(2, b"second"), fill(count, (5000,)))
            continue
        link.acquire(mailbox.message, 0, "receive", only_peer=True)
        mailbox.reject("five")
        link.acquire(mailbox.message, 0, "receive", only_peer=True)
        tensor = torch.zeros(5000)
        mailbox.receive(tensor, "receive")
        assert torch.equal(tensor, fill(count, (5000,)))


def waits_time_out(link: Link) -> None:
    """Check that a wait for a signal that is not posted raises, with the group rank and the global rank."""
    _barrier(link)
    if link.rank == 0:
        try:
            link.acquire(link.released_by[1], 1, "lonely wait", timeout=0.05)
        except RankStalledError as error:
            assert "lonely wait on rank 0 of group" in str(error), str(error)
            assert "rank 1 (global 10) did not arrive within 0.05 s" in str(error), str(error)
        else:
            raise AssertionError("the wait returned")
    _barrier(link)


def an_abort_ends_the_waits_of_all(link: Link) -> None:
    """Check that an abort ends the waits of all other ranks, with its reason, long before their deadline."""
    _barrier(link)
    if link.rank == 0:
        link.abort(ValueError("lost interest"), "a call")
        return
    link.row.announce(0, Announcement(1, b"long wait"))
    try:
        link.wait_for_signal(0, "long wait")
    except GroupAbortedError as error:
        assert "rank 0 aborted: ValueError in a call: lost interest" in str(error), str(error)
    else:
        raise AssertionError("the wait returned")


def closing_ends_the_waits_of_dependents(link: Link) -> None:
    """Check that closing a link ends the waits of the ranks that need it."""
    _barrier(link)
    if link.rank == 0:
        link.close()
        return
    link.row.announce(0, Announcement(1, b"long wait"))
    try:
        link.wait_for_signal(0, "long wait")
    except GroupAbortedError as error:
        assert "destroyed the group" in str(error) and "0" in str(error), str(error)
    else:
        raise AssertionError("the wait returned")


def a_rank_that_has_completed_the_call_may_exit(link: Link) -> None:
    """Check that a rank may exit once it has completed the call: others still wait for each other's signals."""
    _barrier(link)
    link.row.announce(0, Announcement(1, b"last call"))
    last = link.size - 1
    if link.rank == 0:
        link.row.completed = 0
        link.close()
    elif link.rank == last:
        link.row.completed = 0
        for peer in range(1, last):
            link.make_signal("ready", peer)()
    else:
        link.acquire(link.ready_from[last], last, "last call", timeout=5.0)
        assert link.failure(None, "last call") is None


CLAUSES: tuple[Callable[[Link], None], ...] = (
    semaphores_count,
    writes_are_visible_after_acquire,
    a_round_writes_signals_waits_reads_and_releases,
    status_rows_show_calls,
    messages_of_all_sizes_are_delivered,
    rejected_messages_raise_on_the_sender,
    waits_time_out,
    an_abort_ends_the_waits_of_all,
    closing_ends_the_waits_of_dependents,
    a_rank_that_has_completed_the_call_may_exit,
)
