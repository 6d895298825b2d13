"""What every transport must do, as a function that you can call on your own.

`check_transport` connects ranks with the transport's `connect` and puts the links through one clause after the
other: what a token orders, what a message carries, and that every wait ends. Backends rely on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchdist_ref.errors import GroupAbortedError, MismatchError, RankStalledError
from torchdist_ref.stores import HashStore, PrefixStore, Store
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.running import run
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.board import Record
from torchdist_ref.transports.layout import BOARD_LINE
from torchdist_ref.transports.mailbox import Mailbox

Connect = Callable[[Store, int, Sequence[int], str, float], Link]


def check_transport(connect: Connect, size: int = 3) -> None:
    """Put a transport through the whole contract, with ranks as threads of this process.

    Args:
        connect: Makes one rank's link from a store, its rank, the members, a name, and a time-out in seconds.
        size: How many ranks, at least 2.

    Raises:
        RankError: A clause does not hold; the cause names it.

    Example:
        >>> from torchdist_ref.testing.transport_contract import check_transport
        >>> from torchdist_ref.transports import threads
        >>> check_transport(threads.connect)
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


def _meet(link: Link) -> None:
    """Meet, and show what lies in both pockets of the stage."""
    shown = [(link.layout.board(link.rank), BOARD_LINE)]
    shown += [(link.layout.pocket(link.rank, turn), 4 * 500) for turn in (0, 1)]
    for peer in link.peers:
        link.giver("full", peer, shown)()
    for peer in link.peers:
        link.wait(link.full_from[peer], peer, "meet")


def tokens_count(link: Link) -> None:
    """As many tokens come out as went in, from each rank separately."""
    for peer in link.peers:
        for _ in range(link.rank + 2):
            link.giver("full", peer)()
    for peer in link.peers:
        for _ in range(peer + 2):
            link.wait(link.full_from[peer], peer, "count")
        assert not link.full_from[peer].acquire(False), f"more tokens than rank {peer} gave"


def stages_are_seen_after_a_token(link: Link) -> None:
    """What a rank laid out before it gave a token is what the taker sees; the stages don't overlap."""
    for turn in range(20):
        _pocket(link, link.rank, turn & 1).copy_(fill(link.rank + turn, (500,)))
        _meet(link)
        for peer in link.peers:
            seen = _pocket(link, peer, turn & 1)
            assert torch.equal(seen, fill(peer + turn, (500,))), f"stage of rank {peer} in turn {turn}"
        _meet(link)


def _pocket(link: Link, rank: int, turn: int) -> torch.Tensor:
    offset = link.layout.pocket(rank, turn)
    return torch.frombuffer(link.memory.buffer_of(rank), dtype=torch.float32, count=500, offset=offset)


def boards_show_calls(link: Link) -> None:
    """Every rank can read what the others have announced and finished."""
    link.line.announce(0, Record(7 + link.rank, f"call of {link.rank}".encode()))
    _meet(link)
    for peer in link.peers:
        assert link.lines[peer].heads[0][1] == 7 + peer
        assert link.lines[peer].doing() == f"is in call 0, call of {peer}"
    _meet(link)
    link.line.done = 0
    _meet(link)
    for peer in link.peers:
        assert link.lines[peer].doing() == f"finished call 0, call of {peer}, and has made no other"
    _meet(link)


def messages_arrive_whole(link: Link) -> None:
    """A mailbox carries messages of every size, also longer than the mailbox, with tag and size."""
    if link.rank > 1:
        return
    box = Mailbox(link, 0, 1)
    # Some that go round in the mailbox, some of which it must not come back too early.
    part = link.layout.box // 4 // 5
    for count in (0, 1, 1000, 2 * part, 2, 2 * part, 2 * part + 1, 3 * link.layout.box // 4 + 5, part):
        record = Record(count, f"message of {count}".encode())
        if link.rank == 0:
            box.send(count + 1, record, fill(count, (count,)))
        else:
            link.wait(box.offer, 0, "receive", alone=True)
            envelope = box.look()
            assert envelope == (count + 1, record.fingerprint, 4 * count), envelope
            assert box.text() == f"message of {count}", box.text()
            tensor = torch.zeros(count)
            box.take(tensor, "receive")
            assert torch.equal(tensor, fill(count, (count,))), f"message of {count}"


def refusals_reach_the_sender(link: Link) -> None:
    """A receiver that refuses a message, a long one too, makes the send raise; the next message gets through."""
    if link.rank > 1:
        return
    box = Mailbox(link, 0, 1)
    for count in (3, link.layout.box // 16, link.layout.box):
        if link.rank == 0:
            try:
                box.send(1, Record(1, b"first"), torch.ones(count))
            except MismatchError as error:
                assert "rank 1 (global 10) expects something else: five" in str(error), str(error)
            else:
                raise AssertionError("the send returned")
            box.send(2, Record(2, b"second"), fill(count, (5000,)))
            continue
        link.wait(box.offer, 0, "receive", alone=True)
        box.refuse("five")
        link.wait(box.offer, 0, "receive", alone=True)
        tensor = torch.zeros(5000)
        box.take(tensor, "receive")
        assert torch.equal(tensor, fill(count, (5000,)))


def waits_end_at_the_deadline(link: Link) -> None:
    """A token that does not come is an error that names the rank, globally too, and what it was last seen at."""
    _meet(link)
    if link.rank == 0:
        try:
            link.wait(link.free_from[1], 1, "lonely wait", timeout=0.05)
        except RankStalledError as error:
            assert "lonely wait on rank 0 of group" in str(error), str(error)
            assert "rank 1 (global 10) did not come within 0.05 s" in str(error), str(error)
        else:
            raise AssertionError("the wait returned")
    _meet(link)


def giving_up_reaches_all(link: Link) -> None:
    """A rank that gives up ends the waits of all others, with its reason, long before their deadline."""
    _meet(link)
    if link.rank == 0:
        link.give_up(ValueError("lost interest"), "a call")
        return
    link.line.announce(0, Record(1, b"patient wait"))
    try:
        link.wait(link.full_from[0], 0, "patient wait")
    except GroupAbortedError as error:
        assert "rank 0 gave up: ValueError in a call: lost interest" in str(error), str(error)
    else:
        raise AssertionError("the wait returned")


def leaving_reaches_all(link: Link) -> None:
    """A rank that closes its link ends the waits of those who count on it."""
    _meet(link)
    if link.rank == 0:
        link.close()
        return
    link.line.announce(0, Record(1, b"patient wait"))
    try:
        link.wait(link.full_from[0], 0, "patient wait")
    except GroupAbortedError as error:
        assert "destroyed the group" in str(error) and "0" in str(error), str(error)
    else:
        raise AssertionError("the wait returned")


def a_rank_that_has_finished_may_leave(link: Link) -> None:
    """A wait goes on when a rank ends that has finished the call; another rank's token may still come."""
    _meet(link)
    link.line.announce(0, Record(1, b"last call"))
    last = link.size - 1
    if link.rank == 0:
        link.line.done = 0
        link.close()
    elif link.rank == last:
        link.line.done = 0
        for peer in range(1, last):
            link.giver("full", peer)()
    else:
        link.wait(link.full_from[last], last, "last call", timeout=5.0)
        assert link.trouble(None, "last call") is None


CLAUSES: tuple[Callable[[Link], None], ...] = (
    tokens_count,
    stages_are_seen_after_a_token,
    boards_show_calls,
    messages_arrive_whole,
    refusals_reach_the_sender,
    waits_end_at_the_deadline,
    giving_up_reaches_all,
    leaving_reaches_all,
    a_rank_that_has_finished_may_leave,
)
