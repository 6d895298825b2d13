"""One question on an open connection, in either dialect: to our own servers, and to torch's.

A question that waits for keys ends at its deadline: the client then sends CANCEL_WAIT and gives the server a short
grace to say how it ended. Our server answers `get` in one step; at torch's it takes two, and `set` is followed by a
PING, whose echo shows that the value is there. Who asks again after a broken connection is `tcp_client`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.channel import Channel
from torchdist_ref.stores.tcp_parse import read, take_whole
from torchdist_ref.stores.tcp_wire import ANSWER_HEAD, REPLIES, Op, Status, WireError, reply_shape, write_request
from torchdist_ref.timeouts import Deadline

WAITS = {Op.WAIT, Op.WAIT_GET, Op.WAIT_GET_ALL, Op.WAIT_POP, Op.WAIT_NUMBER, Op.BARRIER}
SILENT = {Op.SET, Op.APPEND, Op.MULTI_SET, Op.QUEUE_PUSH}
_HEAD, _answer_head = ANSWER_HEAD.size, ANSWER_HEAD.unpack_from
_DONE = int(Status.DONE)
_PROBE = 0x5E7


class TimedOut(Exception):
    """The keys did not come in time; `missing` lists them if the server said so."""

    def __init__(self, missing: list[bytes] | None = None, silent: bool = False) -> None:
        super().__init__()
        self.missing, self.silent = missing, silent


def grace(seconds: float) -> float:
    """How long after its time-out a call may still take to hear from the server."""
    return 0.09 + min(0.04 * seconds, 2.0)


def ask_numbered(channel: Channel, mine: int, op: Op, fields: tuple[Any, ...], deadline: Deadline) -> tuple[Any, ...]:
    """Ask our server; its answer has the question's number, and its length in front.

    Raises:
        TimedOut: the keys did not come (for questions that wait).
        TimeoutError: the server did not answer, not even in the grace after the deadline.
        ArgumentError: the server refused the question.
        Lost: the connection broke.
    """
    channel.send(write_request(op, *fields, number=mine), deadline)
    try:
        answer = channel.receive(deadline)
    except TimeoutError:
        answer = _late_answer(channel, op, deadline)
    if len(answer) < _HEAD:
        answer += channel.take(_HEAD - len(answer), _late(deadline))
    number, size, status = _answer_head(answer)
    if len(answer) < _HEAD + size:
        answer += channel.take(_HEAD + size - len(answer), _late(deadline))
    if number != mine:
        raise WireError(f"answer {number} to question {mine}")
    if status != _DONE:
        _failed(status, answer[_HEAD:])
    return read(REPLIES[op], answer, _HEAD) if len(answer) > _HEAD else ()


def _late(deadline: Deadline) -> Deadline:
    return deadline.extended(grace(deadline.seconds))


def _late_answer(channel: Channel, op: Op, deadline: Deadline) -> bytes:
    """Nothing came until the deadline: have the waiting ended, and hear what the server says."""
    if op in WAITS:
        channel.send(write_request(Op.CANCEL_WAIT), _late(deadline))
    return channel.receive(_late(deadline))


def _failed(status: int, body: bytes) -> NoReturn:
    if status == Status.REFUSED:
        raise ArgumentError(body.decode())
    if status == Status.CANCELLED:
        raise TimedOut(read("L", body)[0])
    raise WireError(f"an answer of status {status}")


def ask_foreign(channel: Channel, op: Op, fields: tuple[Any, ...], deadline: Deadline) -> tuple[Any, ...]:
    """Ask torch's server, in torch's dialect. Raises as `ask_numbered`; it refuses nothing, but may hang up."""
    return EMULATED.get(op, _plain)(channel, op, fields, deadline)


def _plain(channel: Channel, op: Op, fields: tuple[Any, ...], deadline: Deadline) -> tuple[Any, ...]:
    request, late = write_request(op, *fields), _late(deadline)
    if op in SILENT:
        # torch's server does not answer these; the PING behind shows that it has got so far.
        channel.send(request + write_request(Op.PING, _PROBE), late)
        take_whole("n", lambda size: channel.take(size, late))
        return ()
    channel.send(request, late)
    patience = deadline if op in WAITS else late
    try:
        return take_whole(reply_shape(op, fields), lambda size: channel.take(size, patience))
    except TimeoutError:
        if op not in WAITS:
            raise
    return _cancelled(channel, late)


def _cancelled(channel: Channel, late: Deadline) -> tuple[Any, ...]:
    channel.send(write_request(Op.CANCEL_WAIT), late)
    if channel.take(1, late) == b"\x01":
        raise TimedOut
    channel.take(1, late)  # the keys came while the cancellation was under way; both are answered
    return (0,)


# At torch's servers, waiting and taking are two questions; another client may come in between.


def _get_in_two(channel: Channel, op: Op, fields: tuple[Any, ...], deadline: Deadline) -> tuple[Any, ...]:
    _plain(channel, Op.WAIT, (list(fields),), deadline)
    return _plain(channel, Op.GET, fields, deadline)


def _get_all_in_two(channel: Channel, op: Op, fields: tuple[Any, ...], deadline: Deadline) -> tuple[Any, ...]:
    _plain(channel, Op.WAIT, fields, deadline)
    return (list(_plain(channel, Op.MULTI_GET, fields, deadline)),)


def _pop_in_two(channel: Channel, op: Op, fields: tuple[Any, ...], deadline: Deadline) -> tuple[Any, ...]:
    while True:
        _plain(channel, Op.WAIT, (list(fields),), deadline)
        [(length, value)] = _plain(channel, Op.QUEUE_POP, fields, deadline)
        if length:
            return (value,)


Foreign = Callable[[Channel, Op, tuple[Any, ...], Deadline], tuple[Any, ...]]
EMULATED: dict[Op, Foreign] = {
    Op.WAIT_GET: _get_in_two,
    Op.WAIT_GET_ALL: _get_all_in_two,
    Op.WAIT_POP: _pop_in_two,
}
