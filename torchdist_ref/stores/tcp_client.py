"""One conversation of a TCPStore client with the server: questions, answers, deadlines, and coming back.

A `Conversation` has one socket and one question out at a time. It speaks torch's dialect to torch's servers and
the numbered one to ours (`tcp_wire` says how they tell each other apart).

*Deadlines.* A call ends at the time asked for, or a short grace later. A server that stays silent (stopped, cut off
from the network) costs the connection, not more time.

*Coming back.* If the connection breaks, the next try opens another. Our server recognises the client and does not
repeat what it has done; at torch's, only questions that change nothing are asked again.

What `get` or `barrier` mean belongs to `tcp`, how one question is put to `tcp_questions`, the bytes to `tcp_wire`.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from torchdist_ref.errors import ArgumentError, DistNetworkError
from torchdist_ref.stores import sockets
from torchdist_ref.stores.channel import Channel, Lost
from torchdist_ref.stores.tcp_parse import take_whole
from torchdist_ref.stores.tcp_questions import TimedOut, ask_foreign, ask_numbered, grace
from torchdist_ref.stores.tcp_wire import MAGIC, MARK, Op, recognised, write_request
from torchdist_ref.timeouts import Deadline

HARMLESS = {Op.GET, Op.CHECK, Op.GETNUMKEYS, Op.MULTI_GET, Op.QUEUE_LEN, Op.LIST_KEYS}
HARMLESS |= {Op.WAIT, Op.WAIT_GET, Op.WAIT_GET_ALL}
TRIES = 5


@dataclass
class Server:
    """Whom a client talks to, and what it has learnt of him: all conversations of one store share this."""

    host: str
    port: int
    met: bool = False
    identity: bytes | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Conversation:
    """One client's talk with one server, over as many connections as it takes."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.ours = False
        self.name = os.urandom(16)
        self._channel: Channel | None = None
        self._number = 0
        self._aborted = False

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def abort(self) -> None:
        """End a question that another thread has out; it gets `DistNetworkError`."""
        self._aborted = True
        if self._channel is not None:
            self._channel.abort()

    def connect(self, deadline: Deadline) -> Channel:
        """Open the connection, trying again until the deadline.

        Raises:
            DistNetworkError: nobody answers, the name does not resolve, or no store answers there.
        """
        # Ranks start together: whoever runs the server is late by a millisecond or two, seldom by more.
        pause = 0.0005
        while True:
            try:
                return self._open(deadline)
            except (OSError, Lost) as error:
                if isinstance(error, TimeoutError) and self.server.met:
                    raise  # it was there and is silent now: that is a time-out, not a lost server
                # A server that was there and refuses now has ended; one that cuts the line again may yet listen.
                patient = not self.server.met or (isinstance(error, Lost) and pause < 0.1)
                if deadline.passed() or not patient:
                    raise self._unreachable(error, deadline) from error
                time.sleep(min(pause, deadline.remaining()))
                pause = min(pause * 1.5, 0.25)

    def ask(self, op: Op, fields: tuple[Any, ...], seconds: float) -> tuple[Any, ...]:
        """Ask one question and return the fields of its answer.

        Raises:
            TimedOut: the keys did not come (for questions that wait), or the server did not answer.
            ArgumentError: the server refused the question.
            DistNetworkError: the connection broke and the question could not be asked again.
        """
        self._number += 1
        deadline = Deadline(seconds)
        for attempt in range(TRIES):
            try:
                channel = self._channel or self.connect(deadline.extended(grace(seconds)))
                if self.ours:
                    return ask_numbered(channel, self._number, op, fields, deadline)
                return ask_foreign(channel, op, fields, deadline)
            except Lost as lost:
                self.close()
                if self._aborted or attempt == TRIES - 1 or not (self.ours or op in HARMLESS):
                    raise self._broken(op, lost) from lost
            except TimeoutError:
                self.close()
                raise TimedOut(silent=True) from None
            except (ArgumentError, TimedOut):
                raise
            except BaseException:
                self.close()  # an answer may still be under way; it must not meet the next question
                raise
        raise AssertionError("unreachable")

    # Opening

    def _open(self, deadline: Deadline) -> Channel:
        addresses = sockets.resolve(self.server.host, self.server.port, deadline)
        for index, address in enumerate(addresses):
            try:
                share = Deadline(deadline.remaining() / (len(addresses) - index))
                channel = Channel(sockets.connect(address, share))
                break
            except OSError:
                if address is addresses[-1]:
                    raise
        try:
            self._greet(channel, deadline)
        except BaseException:
            channel.close()
            raise
        self._channel, self.server.met = channel, True
        return channel

    def _greet(self, channel: Channel, deadline: Deadline) -> None:
        # VALIDATE and PING go in one write: torch's server drops a client whose first bytes come apart.
        nonce = MARK | int.from_bytes(os.urandom(2), "little")
        hello = write_request(Op.VALIDATE, MAGIC) + write_request(Op.PING, nonce)
        channel.send(hello, deadline)
        [echo] = take_whole("n", lambda size: channel.take(size, deadline))
        self.ours = echo == recognised(nonce)
        if not self.ours and echo != nonce:
            raise DistNetworkError(
                f"TCPStore: what answers at {self.server} is no store (a PING came back as {echo:#x} instead "
                f"of {nonce:#x}). Another service may hold the port: check MASTER_ADDR and MASTER_PORT."
            )
        if self.ours:
            self._introduce(channel, deadline)

    def _introduce(self, channel: Channel, deadline: Deadline) -> None:
        channel.send(write_request(Op.HELLO, self.name), deadline)
        [identity] = take_whole("r", lambda size: channel.take(size, deadline))
        if self.server.identity not in (None, identity):
            raise DistNetworkError(
                f"TCPStore: the server at {self.server} has been restarted since this client connected, and "
                f"the keys of before are gone. Make a new store, and initialise the process group again."
            )
        self.server.identity = identity

    # Words for failure

    def _unreachable(self, error: Exception, deadline: Deadline) -> DistNetworkError:
        where = self.server
        if self.server.met:
            return DistNetworkError(
                f"TCPStore: the server at {where} is gone ({error}). The process that held it (rank 0, or the "
                f"launcher) has ended or cannot be reached; its own log says why."
            )
        if isinstance(error, socket.gaierror):
            return DistNetworkError(
                f"TCPStore: the host name {self.server.host!r} did not resolve to an address within "
                f"{deadline.seconds:g} s ({error.strerror}). Check MASTER_ADDR, or use an IP address."
            )
        return DistNetworkError(
            f"TCPStore: no connection to {where} within {deadline.seconds:g} s ({error}). See whether rank 0, which "
            f"runs the store, is up and uses the same MASTER_ADDR and MASTER_PORT, and whether a firewall is between."
        )

    def _broken(self, op: Op, lost: Lost) -> DistNetworkError:
        return DistNetworkError(
            f"{op.name.lower()}: the connection to the store at {self.server} broke ({lost}); the operation "
            f"may or may not have been done. The next call connects again."
        )
