"""Reader of flight recorder dumps: ours, and those of torch's own recorder, as pickle or as JSON.

Both are read into values of the same classes. Files may come from anywhere, so nothing in them is run or believed:
pickles may refer to no class or function, sizes are bounded, and a wrong type is a `DumpError`. A pickle that somebody
has made for that purpose can still take long to read. Do not add conclusions here: they belong to `verdict`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError
from torchdist_ref.membership.events import Failure
from torchdist_ref.recorder import FORMAT, Frame

MAX_FILE_BYTES = 64 << 20
MAX_VALUES = 5_000_000
MAX_TEXT = 4_000
MAX_DIMENSIONS = 64
MAX_MEMBERS = 1 << 17

_STATES = ("scheduled", "started", "completed", "failed")
GLOO_ABORTS = "; Gloo does that if a rank gets more than it expects: TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls"
"""End of a sentence on a death that may follow from a mismatch, of which the dead rank has left no dump."""


class DumpError(ArgumentError):
    """A file is not a dump of a flight recorder, or holds more than plain data."""


@dataclass(frozen=True)
class Event:
    """Call of one rank.

    Attributes:
        number: Position among the collectives of its group; (-1, 0) for a message.
        op: Name of the operation.
        text: The call in words.
        compared: Everything that all ranks must agree on.
        state: ``"scheduled"``, ``"started"``, ``"completed"`` or ``"failed"``.
        start_ns: Time of day at which it began, in nanoseconds; 0 if it has not.
        end_ns: Time of day at which it ended; 0 if it has not, or if that is not known.
        error: Type and message of its exception, or the empty string.
        failure: The failure of another rank that the exception reports; None if it is the rank's own.
        peer: Global rank of the other side of a message; None for collectives and if any rank may send.
        nbytes: Size of the largest operand in bytes.
        frames: The caller's stack, innermost frame first, if it was recorded.
        awaited: Global ranks that it waits for, if it is one that meets them in the store; else None.
        error_type: Type of its exception, or the empty string.
    """

    number: tuple[int, int]
    op: str
    text: str
    compared: str
    state: str
    start_ns: int = 0
    end_ns: int = 0
    error: str = ""
    failure: Failure | None = None
    peer: int | None = None
    nbytes: int = 0
    frames: tuple[Frame, ...] = ()
    awaited: tuple[int, ...] | None = None
    error_type: str = ""

    @property
    def is_message(self) -> bool:
        """Whether this is a send or a receive."""
        return self.op in ("send", "recv")


@dataclass(frozen=True)
class GroupCalls:
    """The calls of one rank on one group.

    Attributes:
        name: The group's name.
        members: Global ranks, in group order.
        events: Oldest first.
        key: Text that tells the group from others of its name; empty if the dump has none.
        backend: Name of its backend; empty if the dump has none.
    """

    name: str
    members: tuple[int, ...]
    events: tuple[Event, ...]
    key: str = ""
    backend: str = ""

    @property
    def is_in_store(self) -> bool:
        """Whether these are calls that meet other ranks in the store, rather than a backend's."""
        return any(event.awaited is not None for event in self.events)

    @property
    def collectives(self) -> dict[tuple[int, int], Event]:
        """The collectives by number."""
        return {event.number: event for event in self.events if not event.is_message}


@dataclass(frozen=True)
class RankDump:
    """Dump of one rank.

    Attributes:
        rank: The global rank.
        source: Name of the file.
        time_ns: Time of day of the dump; 0 if it is not known.
        attempt: Number of restarts of the job.
        process: Host and pid, if known.
        reason: Cause of the dump, if known.
        error: Type and message of the exception that caused it, or the empty string.
        failure: The failure of another rank that this exception reports; None if it is the rank's own.
        error_cause: Type and message of the exception behind it that another rank caused, or the empty string.
        cause: The failure that the exception behind it reports; None if there is none.
        error_frames: Stack of that exception, innermost frame first.
        program: Stack of the thread that runs the program, innermost frame first.
        groups: The calls of each group.
        has_left: Whether the rank wrote it when it left the world in good order.
    """

    rank: int
    source: str
    groups: tuple[GroupCalls, ...]
    time_ns: int = 0
    attempt: int = 0
    process: str = ""
    reason: str = ""
    error: str = ""
    failure: Failure | None = None
    error_cause: str = ""
    cause: Failure | None = None
    error_frames: tuple[Frame, ...] = ()
    program: tuple[Frame, ...] = ()
    has_left: bool = False

    @property
    def host(self) -> str:
        """Name of the rank's host; empty if it is not known."""
        return self.process.rpartition(", pid ")[0]

    @property
    def initialization(self) -> tuple[int, int]:
        """Time of day at which the rank began to initialize its world, and at which that was done; 0 if unknown."""
        calls = (e for group in self.groups for e in group.events if e.op == "init_process_group")
        return max(((e.start_ns, e.end_ns * (e.state == "completed")) for e in calls), default=(0, 0))


@dataclass(frozen=True)
class Dumps:
    """The dumps of one job.

    Attributes:
        ranks: The dump of each rank.
        skipped: Files that are not dumps, or of an earlier run or attempt, each with the reason.
        old: Files of an earlier run or attempt, each with the word that says which.
    """

    ranks: Mapping[int, RankDump]
    skipped: Mapping[str, str] = field(default_factory=dict)
    old: Mapping[str, str] = field(default_factory=dict)

    def lack(self, rank: int) -> str:
        """Return why there is no dump of a rank, in words."""
        for name in self.skipped:
            digits = re.search(r"(\d+)(?:\.\w+)?$", name)
            if digits is not None and int(digits[1]) == rank:
                known = f"is of an earlier {self.old[name]}" if name in self.old else "could not be read"
                return f"the dump of rank {rank} {known}"
        return f"rank {rank} left no dump"

    @property
    def possible_end(self) -> str:
        """How a rank may have ended without a dump, as the end of a sentence; empty if no backend ends ranks."""
        on_gloo = any(group.backend == "gloo" for dump in self.ranks.values() for group in dump.groups)
        return f". See in the launcher's output whether SIGABRT ended it{GLOO_ABORTS}" if on_gloo else ""

    @property
    def missing(self) -> tuple[int, ...]:
        """Members of the groups that have left no dump that can be read."""
        members = {member for dump in self.ranks.values() for group in dump.groups for member in group.members}
        return tuple(sorted(members - set(self.ranks)))


def read_directory(directory: str | Path) -> Dumps:
    """Return the dumps of a directory: of the last run and its last attempt, and the newest of each rank.

    Raises:
        OSError: The directory cannot be read.
    """
    found: list[RankDump] = []
    skipped: dict[str, str] = {}
    old: dict[str, str] = {}
    for path in sorted(Path(directory).iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        try:
            found.append(read_file(path))
        except (DumpError, OSError) as error:
            skipped[path.name] = str(error)
    last = max((dump.attempt for dump in found), default=0)
    # Of each host, whose clock is one.
    started: dict[str, int] = {}
    for dump in found:
        started[dump.host] = max(started.get(dump.host, 0), dump.initialization[0])
    ranks: dict[int, RankDump] = {}
    for dump in sorted(found, key=lambda dump: dump.time_ns):
        if dump.attempt < last:
            skipped[dump.source] = f"of attempt {dump.attempt}, and the last one is {last}"
            old[dump.source] = "attempt"
        elif dump.initialization[1] and dump.time_ns < started[dump.host]:
            skipped[dump.source] = "of an earlier run, which had ended before another rank of this one began"
            old[dump.source] = "run"
        else:
            ranks[dump.rank] = dump
    return Dumps(_with_unique_names(dict(sorted(ranks.items()))), skipped, old)


def _with_unique_names(ranks: dict[int, RankDump]) -> dict[int, RankDump]:
    """Add the key to the names of groups that share a name."""
    keys: dict[str, set[str]] = {}
    for dump in ranks.values():
        for group in dump.groups:
            keys.setdefault(group.name, set()).add(group.key)

    def unique(group: GroupCalls) -> GroupCalls:
        return group if len(keys[group.name]) == 1 else replace(group, name=f"{group.name} ({group.key})")

    return {rank: replace(dump, groups=tuple(map(unique, dump.groups))) for rank, dump in ranks.items()}


def read_file(path: Path) -> RankDump:
    """Return the dump in a file.

    Raises:
        DumpError: The file is not a dump.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        _refuse(f"larger than {MAX_FILE_BYTES} bytes")
    data = path.read_bytes()
    try:
        content = json.loads(data) if data.lstrip()[:1] in (b"{", b"[") else load_plain_pickle(data)
        _check_values(content)
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return _our_dump(content, path.name)
        if isinstance(content, dict) and "entries" in content:
            return _torchs_dump(content, path.name)
    except DumpError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
        raise DumpError(f"not a dump of a flight recorder: {error!r}"[:300]) from error
    _refuse("not a dump of a flight recorder")


def _refuse(reason: str) -> NoReturn:
    raise DumpError(reason)


# ---- pickles


class _PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 - the one in C allocates as many entries as a pickle says
    """Unpickler of plain data. Without a class or function, a pickle has nothing that it could call."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse a class or function."""
        _refuse(f"the pickle holds more than plain data ({module}.{name})")


def load_plain_pickle(data: bytes) -> Any:
    """Return the value of a pickle of plain data: None, numbers, texts, bytes, lists, tuples and dicts.

    Raises:
        DumpError: It holds anything else, or is damaged.
    """
    try:
        return _PlainUnpickler(BytesIO(data)).load()
    except DumpError:
        raise
    except Exception as error:
        raise DumpError(f"not a dump of a flight recorder: {error!r}"[:300]) from error


def _check_values(content: Any) -> None:
    """Refuse content of too many values. One in several places counts in each: a small file may unfold to any size."""
    pending, count = [content], 0
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        count += 1 + min(len(value), MAX_TEXT) // 64 if isinstance(value, str) else 1
        if count + len(pending) > MAX_VALUES:
            _refuse("more values than a flight recorder writes")


# ---- checks of types


def _int(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        return int(value)
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        _refuse(f"expected a number, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _refuse(f"expected a text, got {type(value).__name__}")
    return "".join(c if c.isprintable() else " " for c in value[:MAX_TEXT])


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        _refuse(f"expected a list, got {type(value).__name__}")
    return value


def _frames(value: Any) -> tuple[Frame, ...]:
    return tuple((_text(name), _text(file), _int(line)) for name, file, line in _list(value))


def _members(value: Sequence[Any]) -> tuple[int, ...]:
    if len(value) > MAX_MEMBERS:
        _refuse(f"a group of more than {MAX_MEMBERS} members")
    return tuple(map(_int, value))


def _failure(content: Any) -> Failure | None:
    """Return the failure that an error reports; dumps of earlier releases have none."""
    return None if content is None else Failure.from_json(_checked(content))


def _checked(content: Any, depth: int = 4) -> Any:
    """Return a JSON form after checking the numbers and texts in it."""
    if isinstance(content, dict) and depth:
        return {_text(name): _checked(value, depth - 1) for name, value in content.items()}
    if isinstance(content, list) and depth:
        return [_checked(value, depth - 1) for value in content[:MAX_MEMBERS]]
    return _text(content) if isinstance(content, str) else content if content is None else _number(content)


def _number(value: Any) -> int:
    return value if isinstance(value, bool) else _int(value)


def _shapes(value: Any) -> list[list[int]]:
    shapes = [[_int(extent) for extent in _list(shape)] for shape in _list(value)]
    if any(len(shape) > MAX_DIMENSIONS for shape in shapes):
        _refuse(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
    return shapes


# ---- our format


def _our_dump(content: dict[str, Any], source: str) -> RankDump:
    stacks = [_frames(stack) for stack in _list(content["stacks"])]
    threads = [thread for thread in _list(content["threads"]) if thread["program"] is True]
    error = content["error"]
    return RankDump(
        rank=_int(content["rank"]),
        source=source,
        groups=tuple(_our_group(group, stacks) for group in _list(content["groups"])),
        time_ns=_int(content["time_ns"]),
        attempt=_int(content["attempt"]),
        process=f"{_text(content['host'])}, pid {_int(content['pid'])}",
        reason=_text(content["reason"]),
        error="" if error is None else _text(error["text"]),
        failure=None if error is None else _failure(error.get("failure")),
        error_cause="" if error is None else _text(error.get("caused_by", "")),
        cause=None if error is None else _failure(error.get("cause")),
        error_frames=() if error is None else _frames(error["frames"]),
        program=_frames(threads[0]["frames"]) if threads else (),
        has_left=content.get("has_left") is True,
    )


def _our_group(content: dict[str, Any], stacks: Sequence[tuple[Frame, ...]]) -> GroupCalls:
    members = _members(_list(content["members"]))
    events = tuple(_our_event(event, members, stacks) for event in _list(content["events"]))
    key, backend = _text(content.get("key", "")), _text(content.get("backend", ""))
    return GroupCalls(_text(content["name"]), members, events, key, backend)


def _our_event(content: dict[str, Any], members: Sequence[int], stacks: Sequence[tuple[Frame, ...]]) -> Event:
    op, state, stack = _text(content["op"]), _text(content["state"]), content["stack"]
    if state not in _STATES:
        _refuse(f"unknown state {state!r}")
    peer = content["arguments"].get({"send": "dst", "recv": "src"}.get(op, ""))
    awaited = content["arguments"].get("awaited")
    sequence, path = _list(content["number"])
    return Event(
        number=(_int(sequence), _int(path)),
        op=op,
        text=_text(content["text"]),
        compared=_text(content["compared"]),
        state=state,
        start_ns=_int(content["start_ns"]),
        end_ns=_int(content["end_ns"]),
        error=_text(content["error"]),
        failure=_failure(content.get("failure")),
        peer=None if peer is None else members[_int(peer)],
        nbytes=_int(content["nbytes"]),
        frames=() if stack is None else stacks[_int(stack)],
        awaited=None if awaited is None else _members(_list(awaited)),
        error_type=_text(content.get("error_type", "")),
    )


# ---- torch's format


def _torchs_dump(content: dict[str, Any], source: str) -> RankDump:
    """Return a dump of torch's; it does not hold its rank, which ends the file's name."""
    digits = re.search(r"(\d+)(?:\.\w+)?$", source)
    if digits is None:
        _refuse("a dump of torch's whose name does not end with the rank")
    configured = content.get("pg_config") or {}
    by_group: dict[tuple[str, str], list[Event]] = {}
    latest = 0
    for entry in _list(content["entries"]):
        name, description = _list(entry["process_group"])
        members = _torchs_members(configured, _text(name))
        event = _torchs_event(entry, members)
        if event.op == "coalesced" and entry.get("is_p2p") is True:
            # It ends a batch of messages, which have entries of their own.
            continue
        latest = max(latest, event.start_ns, event.end_ns)
        by_group.setdefault((_text(name), _text(description)), []).append(event)
    groups = tuple(
        GroupCalls(
            name if description in ("", "undefined") else f"{description} ({name})" if name else description,
            _torchs_members(configured, name),
            tuple(events),
        )
        for (name, description), events in by_group.items()
    )
    return RankDump(_int(digits[1]), source, groups, time_ns=latest)


def _torchs_members(configured: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the members of a group; the default group is listed without a name by some versions."""
    found = configured.get(name) or configured.get("") or {}
    return _members(_list(json.loads(_text(found.get("ranks", "[]")))))


def _torchs_event(entry: dict[str, Any], members: Sequence[int]) -> Event:
    backend, _, name = _text(entry["profiling_name"]).partition(":")
    op, _, pair = (name or backend).partition(" ")
    inputs, outputs = _shapes(entry["input_sizes"]), _shapes(entry["output_sizes"])
    # The root alone has inputs of a scatter.
    typed = "output_dtypes" if op.startswith("scatter") else "input_dtypes"
    dtype = next(map(_text, _list(entry.get(typed) or [])), "").lower()
    is_message = op in ("send", "recv")
    state = {"scheduled": "scheduled", "started": "started", "completed": "completed"}.get(entry["state"], "scheduled")
    if entry.get("retired") is True and state == "scheduled":
        # Backends without events of the device, such as Gloo, only retire their calls.
        state = "completed"
    ends = [_int(found) for found in re.findall(r"\d+", pair)]
    sizes = " ".join(map(str, inputs))
    elements = 0 if op.startswith(("all_to_all", "scatter")) else sum(map(prod, inputs))
    if op.startswith(("all_gather", "allgather")) and len(set(map(prod, outputs))) > 1:
        elements = sum(map(prod, outputs))
    return Event(
        number=(-1, 0) if is_message else (_int(entry["collective_seq_id"]), 0),
        op=op,
        text=f"{name or backend}{f' of {dtype} {sizes}' if inputs else ''}",
        compared=f"{op} of {dtype} [{elements}]",
        state=state,
        start_ns=_int(entry.get("time_discovered_started_ns") or entry.get("time_created_ns") or 0),
        end_ns=_int(entry.get("time_discovered_completed_ns") or 0),
        peer=members[ends[1]] if is_message and len(ends) == 2 and ends[1] < len(members) else None,
        nbytes=max(sum(map(prod, inputs)), sum(map(prod, outputs))) * _ITEM_BYTES.get(dtype, 1),
        frames=tuple(_torchs_frames(entry.get("frames") or [])),
    )


_ITEM_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "short": 2}
_ITEM_BYTES |= {"complexfloat": 8, "complexdouble": 16}


def _torchs_frames(value: Any) -> Iterator[Frame]:
    for frame in _list(value):
        yield _text(frame["name"]), _text(frame["filename"]), _int(frame["line"])
