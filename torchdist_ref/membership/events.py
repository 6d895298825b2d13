"""Values that say how a process ended, how a rank failed or left, and which failure a wait reports.

Everybody who learns of an ending makes one of these values: the status table of a group, its store, the poller of
processes. `blame` chooses a `Failure` among them, and `words` makes the sentence. The texts in the values are payload,
such as the message of a user's exception. They are shown and passed on, and nothing is concluded from them.

Each value has a JSON form, in which ranks pass it to each other and the flight recorder writes it. All ranks of a job
run one version of this library, which the wire format of the transports requires too. Dumps may be of another version:
a reader ignores fields that it does not know. Do not add choices (`blame`) or sentences (`words`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from torchdist_ref.errors import (
    DistBackendError,
    GroupAbortedError,
    MismatchError,
    RankDiedError,
    RankStalledError,
    RendezvousError,
    text_of,
)

EXITED, KILLED, ENDED, REPLACED, DISCONNECTED, LOST, STOPPED = (
    "exited",
    "killed",
    "ended",
    "replaced",
    "disconnected",
    "lost",
    "stopped",
)
"""Values of `Ending.how`."""

DIED, ABORTED, PROGRAM_ENDED, LEFT, STALLED, MISMATCH, RENDEZVOUS = (
    "died",
    "aborted",
    "program ended",
    "left",
    "stalled",
    "mismatch",
    "rendezvous",
)
"""Values of `Failure.kind`."""

OF_ALL_RANKS = (MISMATCH, RENDEZVOUS)
"""Kinds whose message is the same on all ranks, so that no rank is blamed."""
_MAX_PASSED_ON, _MAX_ENDINGS = 64, 4
"""Culprits and endings of a failure that a rank passes on to others."""
_KINDS: dict[type[BaseException], str] = {
    RankDiedError: DIED,
    RankStalledError: STALLED,
    MismatchError: MISMATCH,
    RendezvousError: RENDEZVOUS,
}


@cache
def _types_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _is_default(field: Any, value: Any) -> bool:
    return field.default is not MISSING and bool(value == field.default)


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        return value.to_json()
    if isinstance(value, str):
        # Paths in it may hold bytes that are not text.
        return value.encode(errors="backslashreplace").decode()
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _restored(kind: Any, content: Any) -> Any:
    """Return the value of a type that its JSON form describes.

    Raises:
        ValueError: It describes none.
    """
    if get_origin(kind) is tuple:
        if not isinstance(content, list):
            raise ValueError(f"{content!r} is not a list")
        return tuple(_restored(get_args(kind)[0], each) for each in content)
    if isinstance(kind, UnionType):
        return None if content is None else _restored(get_args(kind)[0], content)
    if issubclass(kind, Value):
        return kind.from_json(content)
    if type(content) is not kind:
        raise ValueError(f"{content!r} is no {kind.__name__}")
    return content


class Value:
    """Base of the values: their JSON form, which leaves out fields that have their defaults."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        own: Any = self
        return {f.name: _plain(v) for f in fields(own) if not _is_default(f, v := getattr(self, f.name))}

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Return the value of a JSON form; fields that this version does not know are ignored.

        Raises:
            ValueError: It describes no such value.
        """
        if not isinstance(content, dict):
            raise ValueError(f"{content!r} is no {cls.__name__}")
        type_: Any = cls
        known = {name: kind for name, kind in _types_of(type_).items() if name in content}
        try:
            return cls(**{name: _restored(kind, content[name]) for name, kind in known.items()})
        except TypeError as error:
            raise ValueError(f"{content!r} is no {cls.__name__}") from error


@dataclass(frozen=True)
class Ending(Value):
    """How a process ended, or that it is stopped.

    Attributes:
        how: ``EXITED``, ``KILLED``, ``ENDED`` if the system tells no more than that, ``REPLACED`` by another program
            (exec), ``DISCONNECTED`` if only its connection is known to have ended, ``LOST`` if that to the store has,
            or ``STOPPED``.
        pid: Process id; 0 if it is not known.
        host: Name of its host.
        number: Exit code or signal.
        address: Other end of the connection, for ``DISCONNECTED``.

    >>> Ending.from_json(Ending(KILLED, 71, "node3", 9).to_json())
    Ending(how='killed', pid=71, host='node3', number=9, address='')
    """

    how: str
    pid: int = 0
    host: str = ""
    number: int = 0
    address: str = ""


@dataclass(frozen=True)
class Failure(Value):
    """Failure that a wait reports: who is to blame, and what is known of it.

    Attributes:
        kind: ``DIED``, ``ABORTED``, ``PROGRAM_ENDED`` without destroying the group, ``LEFT`` the group in good order,
            ``STALLED``, or one of ``OF_ALL_RANKS``.
        ranks: Culprits, as global ranks; empty if none is known, or if all ranks fail alike.
        endings: How their processes ended, as far as that is known.
        error: Type of the culprit's exception; empty where `text` needs none.
        call: Call in which the culprit raised it.
        text: Message of that exception, or reason that the culprit gave.
        last: Last call of a culprit that has left, in words.
        after: Failure after which it left, in words.
        publisher: Global rank that published the failure in a store; None if it was found in another way.
        continues: Whether the culprit meets others of the group again, to make another one.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    endings: tuple[Ending, ...] = ()
    error: str = ""
    call: str = ""
    text: str = ""
    last: str = ""
    after: str = ""
    publisher: int | None = None
    continues: bool = False

    @classmethod
    def of_death(cls, rank: int, ending: Ending | None) -> Self:
        """Return the failure of a rank whose process has ended."""
        return cls(DIED, (rank,), () if ending is None else (ending,))

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether all ranks fail alike, with the same message."""
        return self.kind in OF_ALL_RANKS


@dataclass(frozen=True)
class Died(Value):
    """End of a rank's process.

    Attributes:
        rank: Global rank.
        ending: How it ended; None if that is not known.
    """

    rank: int
    ending: Ending | None = None


@dataclass(frozen=True)
class Aborted(Value):
    """Abort of a group by a rank, in its row of the status table.

    Attributes:
        rank: Global rank.
        error: Type of its exception; empty if it gave a reason instead.
        text: Message of the exception, or the reason.
        call: Call in which it raised the exception.
        at: Time of the abort in nanoseconds, by the monotonic clock of its host.
        cause: Failure of another rank that it passes on; None if the exception is its own.
        continues: Whether it meets others of the group again, to make another one.
    """

    rank: int
    error: str = ""
    text: str = ""
    call: str = ""
    at: int = 0
    cause: Failure | None = None
    continues: bool = False


@dataclass(frozen=True)
class Left(Value):
    """Leave of a rank that destroyed its group, or whose program ended without doing so.

    Attributes:
        rank: Global rank.
        is_closed: Whether it has closed its end. Before that, it may still send messages.
        program_ended: Whether its program ended without destroying the group.
        last: Its last call, in words.
        after: Failure after which it left, in words; empty if there was none.
        ending: How its process ended, if that is known.
    """

    rank: int
    is_closed: bool = True
    program_ended: bool = False
    last: str = ""
    after: str = ""
    ending: Ending | None = None


@dataclass(frozen=True)
class Published(Value):
    """Failure that a rank published in the store, in a meeting of ranks or in that of a group.

    Attributes:
        rank: Global rank that published it, or for which the store's server did.
        kind: Kind of the failure.
        error: Type of the exception; empty if the message is enough, as those of this library are.
        text: Message of the exception.
        ending: How the rank's process ended, where that is the failure.
        cause: Failure of another rank that the exception reports; None if there is none.
        continues: Whether the rank meets others of the group again, to make another one.
    """

    rank: int
    kind: str = ABORTED
    error: str = ""
    text: str = ""
    ending: Ending | None = None
    cause: Failure | None = None
    continues: bool = False


MemberEvent = Died | Aborted | Left | Published
_BY_NAME: dict[str, type[MemberEvent]] = {kind.__name__: kind for kind in (Died, Aborted, Left, Published)}


def encode(event: MemberEvent, most: int | None = None) -> str:
    """Return an event as the text that other ranks `decode`.

    Args:
        event: The event.
        most: Largest size in bytes; the longest texts are cut until it fits. None: no limit.
    """
    content = {"event": type(event).__name__, **event.to_json()}
    while True:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        if most is None or (excess := len(text.encode()) - most) <= 0:
            return text
        holder, name = max(_texts_in(content), key=lambda place: len(place[0][place[1]]))
        holder[name] = holder[name][: -min(excess, len(holder[name]))]


def _texts_in(content: dict[str, Any]) -> Iterable[tuple[dict[str, Any], str]]:
    for name, value in content.items():
        if isinstance(value, str) and name not in ("event", "kind", "how"):
            yield content, name
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _texts_in(each)


def decode(text: str | bytes) -> MemberEvent | None:
    """Return the event that a text describes; None if it describes none.

    >>> decode(encode(Died(4, Ending(EXITED, 71, "node3", 2))))
    Died(rank=4, ending=Ending(how='exited', pid=71, host='node3', number=2, address=''))
    >>> decode('{"event":"Died","rank":4,"color":"a field of a newer version"}'), decode("garbage"), decode("[]")
    (Died(rank=4, ending=None), None, None)
    """
    with suppress(ValueError, RecursionError):
        content = json.loads(text)
        if isinstance(content, dict) and content.get("event") in _BY_NAME:
            return _BY_NAME[content["event"]].from_json(content)
    return None


def _kind_by(kind: type[BaseException]) -> str:
    return next((known for base, known in _KINDS.items() if issubclass(kind, base)), ABORTED)


def failure_of(error: BaseException) -> Failure | None:
    """Return the failure of another rank that an exception reports; None if it is one of its own.

    >>> failure_of(RankDiedError("rank 4 died").naming([4])), failure_of(ValueError("no data"))
    (Failure(kind='died', ranks=(4,), endings=(), error='', call='', text='', last='', after='', publisher=None, ...
    """
    return failure_by(type(error), getattr(error, "ranks", ()), getattr(error, "failure", None))


def failure_by(kind: type[BaseException] | None, ranks: tuple[int, ...], known: object) -> Failure | None:
    """Return the failure of another rank that an exception reports, by its class and attributes.

    Args:
        kind: Its class; None if there is no exception.
        ranks: Its attribute ``ranks``.
        known: Its attribute ``failure``.
    """
    if kind is None or not issubclass(kind, RankDiedError | RankStalledError | GroupAbortedError):
        return None
    return known if isinstance(known, Failure) else Failure(_kind_by(kind), ranks)


def published(rank: int, error: BaseException) -> Published:
    """Return what a rank publishes of the error for which it leaves a meeting."""
    kind = _kind_by(type(error))
    # The messages of this library say all; of another exception the type matters as much.
    is_ours = isinstance(error, DistBackendError)
    return Published(rank, kind, "" if is_ours else type(error).__name__, text_of(error), cause=failure_of(error))


def aborted(rank: int, error: BaseException, call: str, advice: str = "") -> Aborted:
    """Return what a rank writes of the error with which it aborts a group.

    A rank that fails because of another one's abort or leave passes that failure on: the ranks that see only this one
    learn who was first, and why. A death or a time-out it reports as its own error, since what it waited for may be
    another thing than what the others wait for.
    """
    failure = failure_of(error)
    if failure is not None and failure.ranks and failure.kind in (ABORTED, PROGRAM_ENDED, LEFT):
        # It has to fit into a row of the status table.
        cause = replace(failure, ranks=failure.ranks[:_MAX_PASSED_ON], endings=failure.endings[:_MAX_ENDINGS])
        return Aborted(rank, cause=cause)
    text = text_of(error) + (f". {advice}" if advice else "")
    return Aborted(rank, type(error).__name__ if call else "", text, call)
