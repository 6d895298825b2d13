"""Verdict on the dumps of a job: which rank is behind, which call differs, and where in the user's code.

Four questions are asked in this order, since each kind of failure causes those below it: Did ranks make different
calls under one number? Has a rank raised an exception of its own? Has a rank died, or aborted? For which rank do the
others wait? The answer to the last one is the end of a chain: a rank may wait for one that waits for a third. A rank
whose own time-out passed before it ended waited itself: its death is a consequence. A rank without a dump that can be
read is not evidence of anything.

Do not add ways to read dumps here: they belong to `dumps`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from signal import SIGABRT
from textwrap import shorten

from torchdist_ref.debug.dumps import GLOO_ABORTS, Dumps, Event, GroupCalls, RankDump
from torchdist_ref.debug.frames import frame_text, user_frames
from torchdist_ref.membership.events import ABORTED, DIED, KILLED, STALLED, Failure
from torchdist_ref.membership.words import absence_of, ending_text, reason_of
from torchdist_ref.recorder import Frame

Number = tuple[int, int]

MAX_NAMED = 64
"""Ranks that a sentence lists."""
MAX_QUOTED = 300
"""Characters of an error that a sentence quotes."""


@dataclass(frozen=True)
class Verdict:
    """Conclusion from the dumps.

    Attributes:
        kind: ``"mismatch"``, ``"swapped"``, ``"skipped"``, ``"raised"``, ``"died"``, ``"late"``, ``"behind"``,
            ``"deadlock"``, ``"pending"``, ``"sites"``, ``"failed"`` or ``"nothing"``.
        ranks: The ranks to look at; several if the dumps do not show who is wrong.
        sentence: The verdict in words.
        group: Name of the group, if there is one.
        number: Number of the call, if there is one.
    """

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    group: str = ""
    number: Number | None = None


@dataclass(frozen=True)
class JobGroup:
    """The calls of all ranks on one group.

    Attributes:
        name: The group's name.
        members: Global ranks, in group order.
        calls: For each rank with a dump, its collectives by number.
        first: Smallest number that no rank has dropped from its buffer.
    """

    name: str
    members: tuple[int, ...]
    calls: Mapping[int, Mapping[Number, Event]]
    first: Number

    @property
    def numbers(self) -> list[Number]:
        """All numbers that can be compared, in order."""
        return sorted({n for calls in self.calls.values() for n in calls if n >= self.first})

    def at(self, number: Number) -> dict[int, Event]:
        """Return the calls of the ranks that have made one with this number."""
        return {rank: calls[number] for rank, calls in self.calls.items() if number in calls}

    def absent(self, calls: Mapping[int, Event], awaited: Sequence[int] | None = None) -> frozenset[int]:
        """Return the members that are missing from a call: those with a dump, or if there are none, those without.

        Args:
            calls: The calls of the ranks that have made it.
            awaited: The members that the call waits for. Default: all.
        """
        lacking = set(self.members if awaited is None else awaited) - set(calls)
        return frozenset(lacking & set(self.calls) or lacking)


def job_groups(dumps: Dumps) -> list[JobGroup]:
    """Return the groups of a job; those of one name but other members are different groups."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, GroupCalls]] = {}
    for rank, dump in dumps.ranks.items():
        for group in dump.groups:
            found.setdefault((group.name, group.members), {})[rank] = group
    groups = []
    for (name, members), calls in found.items():
        # torch's Gloo does not record the members. Its default group is that of all ranks.
        everybody = members or tuple(dumps.ranks if name.startswith("default_pg") else calls)
        collectives = {r: calls[r].collectives if r in calls else {} for r in everybody if r in dumps.ranks}
        first = max((min(each) for each in collectives.values() if each), default=(0, 0))
        groups.append(JobGroup(name, everybody, collectives, first))
    return groups


def find_verdict(dumps: Dumps) -> Verdict:
    """Return the conclusion from the dumps of a job."""
    groups = job_groups(dumps)
    if not dumps.ranks:
        return Verdict("nothing", (), "There is no dump to read.")
    for find in (_difference, _raised, _death, _abort, _wait, _pending, _call_sites, _raised_afterward, _failed):
        found = find(dumps, groups)
        if found is not None:
            return found
    text = "No rank waits for another, and all calls agree"
    if dumps.missing:
        lack = "; ".join(map(dumps.lack, dumps.missing[:MAX_NAMED]))
        return Verdict("nothing", dumps.missing, f"{text}, but {lack}{dumps.possible_end}.")
    return Verdict("nothing", (), f"{text}.")


# ---- words


def ranks_text(ranks: Iterable[int]) -> str:
    """Return the names of ranks in words.

    >>> ranks_text([2]), ranks_text([0, 1, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > MAX_NAMED:
        names[MAX_NAMED - 1 :] = [f"{len(names) - MAX_NAMED + 1} others"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def capitalized(text: str) -> str:
    """Return a sentence with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def number_text(number: Number) -> str:
    """Return the number of a call as errors show it.

    >>> number_text((5, 0)), number_text((5, 2 << 42))
    ('5', '5.2')
    """
    main, path = number
    levels = [path >> 42 & 0x1FFFFF, path >> 21 & 0x1FFFFF, path & 0x1FFFFF]
    return ".".join([str(main), *(str(level) for level in levels if level)])


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's program."""
    return next(iter(user_frames(frames)), None)


def place(dump: RankDump, event: Event | None = None) -> str:
    """Return where a rank is, or where it made a call."""
    if event is not None and not event.frames and not _is_current(dump, event):
        # The stacks are those of another moment.
        return ""
    stacks = [event.frames if event else (), dump.error_frames, dump.program]
    return next((frame_text(frame) for stack in stacks if (frame := user_frame(stack))), "")


def _is_current(dump: RankDump, event: Event) -> bool:
    """Return whether a rank was in a call when it wrote its dump: the call ran, or its failure is the reason."""
    if event.state != "failed":
        return event.state != "completed"
    # The error that ended the rank may be another one, raised from the call's.
    is_last = all(later.start_ns <= event.start_ns for group in dump.groups for later in group.events)
    return bool(dump.error) and (is_last or event.error in (dump.error, dump.error_cause))


def _at(dump: RankDump, event: Event | None = None) -> str:
    where = place(dump, event)
    return f" at {where}" if where else ""


# ---- different calls


def _difference(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on the first number, in time, under which ranks made different calls."""
    found = []
    for group in groups:
        for number in group.numbers:
            calls = group.at(number)
            if len({event.compared for event in calls.values()}) > 1:
                found.append((min(event.start_ns for event in calls.values()), group, number, calls))
                break
    if not found:
        return None
    _, group, number, calls = min(found, key=lambda entry: entry[0])
    counted = Counter(event.compared for event in calls.values()).most_common()
    usual = counted[0][0]
    odd = tuple(sorted(rank for rank, event in calls.items() if event.compared != usual))
    tied = len(counted) > 1 and counted[0][1] == counted[1][1]
    where = f"call {number_text(number)} of group {group.name!r}"
    order = None if tied and len(calls) > 2 else _order(group, number, odd[0], min(set(calls) - set(odd)))
    if order is not None and len({event.compared for r, event in calls.items() if r in odd}) == 1:
        kind, words = order
        both = "" if not tied else " or the reverse"
        sentence = f"{capitalized(ranks_text(odd))} {words} in group {group.name!r}{both}: {_sides(dumps, calls)}."
        return Verdict(kind, tuple(sorted(calls)) if tied else odd, sentence, group.name, number)
    if tied:
        # A dump that is missing would show who differs.
        lack = "".join(f"; {dumps.lack(rank)}" for rank in group.members[:MAX_NAMED] if rank not in dumps.ranks)
        sentence = f"{capitalized(ranks_text(calls))} made different calls as {where}: {_sides(dumps, calls)}{lack}."
        return Verdict("mismatch", tuple(sorted(calls)), sentence, group.name, number)
    sentence = f"{capitalized(ranks_text(odd))} made another call than the others as {where}: {_sides(dumps, calls)}."
    return Verdict("mismatch", odd, sentence, group.name, number)


def _sides(dumps: Dumps, calls: Mapping[int, Event]) -> str:
    """Return what each rank called, with equal calls together."""
    sides: dict[str, list[int]] = {}
    for rank, event in calls.items():
        sides.setdefault(f"{event.text}{_at(dumps.ranks[rank], event)}", []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} made {text}" for text, ranks in sides.items())


def _order(group: JobGroup, number: Number, odd: int, usual: int) -> tuple[str, str] | None:
    """Return whether a rank made two calls in the other order, or left one out, as kind and words."""
    mine, theirs = (_following(group.calls[rank], number) for rank in (odd, usual))
    # Ranks whose later calls are the same ones made another call, and no call more or less.
    if len(mine) < 2 or len(theirs) < 2 or mine[1:] == theirs[1:]:
        return None
    text = number_text(number)
    for later in range(1, min(len(mine), len(theirs))):
        crossed = mine[0] == theirs[later] and mine[later] == theirs[0] and mine[0] != mine[later]
        if crossed and all(map(eq, mine[later + 1 :], theirs[later + 1 :])):
            return "swapped", f"made calls {text} and {number[0] + later} in the other order"
    if mine[0] == theirs[1] and mine[: len(theirs) - 1] == theirs[1 : len(mine) + 1]:
        return "skipped", f"left out call {text}"
    if theirs[0] == mine[1] and theirs[: len(mine) - 1] == mine[1 : len(theirs) + 1]:
        return "skipped", f"made an additional call {text}"
    return None


def _following(calls: Mapping[Number, Event], number: Number, most: int = 16) -> list[str]:
    return [calls[n].compared for n in sorted(calls) if n >= number][:most]


# ---- exceptions and deaths


def _raised(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on the first rank with an exception that no other rank caused."""
    return _first_raised(dump for dump in dumps.ranks.values() if not _failed_because_of_another(dump))


def _raised_afterward(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on the first rank that raised an exception after a call that another rank made fail."""
    return _first_raised(dumps.ranks.values())


def _first_raised(candidates: Iterable[RankDump]) -> Verdict | None:
    own = [dump for dump in candidates if dump.error and dump.failure is None]
    if not own:
        return None
    dump = min(own, key=lambda dump: dump.time_ns)
    return Verdict("raised", (dump.rank,), f"Rank {dump.rank} raised{_at(dump)}: {quoted(dump.error)}")


def _failed_because_of_another(dump: RankDump) -> bool:
    """Return whether a call of a rank has failed because of another rank; what it raises then may follow from that."""
    return dump.cause is not None or any(event.failure is not None for group in dump.groups for event in group.events)


def quoted(text: str) -> str:
    """Return the text of an error in one line that ends as a sentence, cut at a word if it is long."""
    line = shorten(text, MAX_QUOTED, placeholder=" …")
    return line if line.endswith((".", "…")) else f"{line}."


def _death(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on ranks that others found dead, and that had not given up themselves."""
    gave_up = {rank for rank, dump in dumps.ranks.items() if _gave_up(dump)}
    reports = [
        (event.is_message, event.end_ns, dump.rank, group, event, event.failure)
        for dump in dumps.ranks.values()
        for group in dump.groups
        for event in group.events
        if event.failure is not None and event.failure.kind == DIED
        if not event.failure.ranks or not gave_up.issuperset(event.failure.ranks)
    ]
    if not reports:
        return None
    _, _, witness, group, event, failure = min(reports, key=lambda report: report[:3])
    number = None if event.is_message else event.number
    failed = [
        rank
        for _, _, rank, other, call, _ in reports
        if rank == witness or (number is not None and (other.name, call.number) == (group.name, number))
    ]
    where = f"{event.text}" if number is None else f"call {number_text(number)} of group {group.name!r}, {event.text}"
    dead = tuple(sorted(set(failure.ranks) - gave_up))
    which = ranks_text(dead) if dead else "a rank"
    cause = "; ".join(map(ending_text, failure.endings))
    witnesses = f"{ranks_text(set(failed))} failed in {where}{_at(dumps.ranks[witness], event)}"
    aborted = any(ending.how == KILLED and ending.number == SIGABRT for ending in failure.endings)
    hint = GLOO_ABORTS if group.backend == "gloo" and aborted else ""
    sentence = f"{capitalized(which)} died: {witnesses}{f' ({cause})' if cause else ''}{hint}."
    return Verdict("died", dead, sentence, "" if number is None else group.name, number)


def _gave_up(dump: RankDump) -> bool:
    """Return whether a rank ended after a time-out of its own, so that it was waiting for another one, or left."""
    events = (event for group in dump.groups for event in group.events)
    return dump.has_left or any(map(_is_stall, (dump.failure, dump.cause, *(event.failure for event in events))))


def _is_stall(failure: Failure | None) -> bool:
    return failure is not None and failure.kind == STALLED


def _abort(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on a rank without a dump that ended a group with an error, which the others quote."""
    # `_behind` names ranks that left without an exception.
    reports = [
        (event.end_ns, dump.rank, group, event, event.failure)
        for dump in dumps.ranks.values()
        for group in dump.groups
        for event in group.events
        if event.failure is not None and event.failure.kind == ABORTED
        if event.failure.ranks and event.failure.ranks[0] not in dumps.ranks
    ]
    if not reports:
        return None
    _, witness, group, event, failure = min(reports, key=lambda report: report[:2])
    culprit, reason = failure.ranks[0], reason_of(failure)
    number = None if event.is_message else event.number
    where = _call_text(event, group.name) + _at(dumps.ranks[witness], event)
    sentence = f"Rank {culprit} aborted, and rank {witness} failed in {where}: {quoted(reason)}"
    return Verdict("raised", (culprit,), sentence, group.name, number)


def _failed(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on the first error that ended a rank in a call that is not recorded, as those of stores."""
    failed = [dump for dump in dumps.ranks.values() if dump.error]
    if not failed:
        return None
    first = min(failed, key=lambda dump: dump.time_ns)
    order = f", rank {first.rank} first," if len(failed) > 1 else ""
    sentence = f"{capitalized(ranks_text(dump.rank for dump in failed))} failed{order}"
    ranks = first.failure.ranks if first.failure else ()
    return Verdict("failed", ranks, f"{sentence}{_at(first)}: {quoted(first.error)}")


# ---- waits


@dataclass(frozen=True)
class _Wait:
    """A call in which a rank waits for others."""

    rank: int
    ends: frozenset[int]
    event: Event
    group: str


def _wait(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on the rank at the end of the chain of waits."""
    late = _late(dumps, groups)
    if late is not None:
        return late
    waits = _waits(dumps, groups)
    if not waits:
        return None
    rank, chain = min(waits), []
    while rank in waits and rank not in chain:
        chain.append(rank)
        free = sorted(waits[rank].ends - set(waits))
        rank = (free or sorted(waits[rank].ends))[0]
    if rank in waits:
        cycle = chain[chain.index(rank) :]
        steps = ", ".join(
            f"rank {r} waits in {_where(waits[r])}{_at(dumps.ranks[r], waits[r].event)} for {ranks_text(waits[r].ends)}"
            for r in cycle
        )
        return Verdict(
            "deadlock", tuple(sorted(cycle)), f"{capitalized(ranks_text(cycle))} wait for each other: {steps}."
        )
    return _behind(dumps, groups, waits[chain[-1]], waits)


def _where(wait: _Wait) -> str:
    """Return the call of a wait, with the group that it is on if that matters."""
    return _call_text(wait.event, wait.group)


def _call_text(event: Event, group: str) -> str:
    return event.text if event.is_message or event.awaited is not None else f"{event.text} of group {group!r}"


_HOW_TO_ASK = "; to see where, run 'python -m torchdist_ref.debug --request PID' on that host while the job hangs"


def _behind(dumps: Dumps, groups: Sequence[JobGroup], last: _Wait, waits: Mapping[int, _Wait]) -> Verdict:
    absent = tuple(sorted(last.ends - set(waits)))
    number = None if last.event.is_message else last.event.number
    call = last.event.text if number is None else f"call {number_text(number)}, {last.event.text},"
    same = [w.rank for w in waits.values() if (w.group, w.event.number, w.event.op) == _key(last)] or [last.rank]
    if number is None:
        same = [last.rank]
    waiting = f"{ranks_text(same)} {'waits' if len(same) == 1 else 'wait'}"
    pronoun = "it" if len(absent) == 1 else "them"
    failures = [wait.event.failure for wait in waits.values()]
    # Also one whose call goes on, while its program has given up the wait.
    failures += [dump.failure for rank in waits if (dump := dumps.ranks.get(rank))]
    left = {rank: how for each in failures if each and (how := absence_of(each)) for rank in each.ranks}
    state_of = _state if last.event.awaited is None else partial(_state_in_store_call, last.event)
    states = "; ".join(state_of(dumps, groups, rank, last.group, left.get(rank, "")) for rank in absent[:MAX_NAMED])
    verb = "is" if len(absent) == 1 else "are"
    ask = "" if all(rank in dumps.ranks or left.get(rank) for rank in absent) else _HOW_TO_ASK
    where = _at(dumps.ranks[last.rank], last.event)
    call = last.event.text if last.event.awaited is not None else f"{call} of group {last.group!r}"
    sentence = (
        f"{capitalized(ranks_text(absent))} {verb} behind: {waiting} for {pronoun} in {call}{where}; {states}{ask}."
    )
    return Verdict("behind", absent, sentence, last.group, number)


def _key(wait: _Wait) -> tuple[str, Number, str]:
    return wait.group, wait.event.number, wait.event.op


def _state(dumps: Dumps, groups: Sequence[JobGroup], rank: int, name: str, left: str) -> str:
    """Return what is known about a rank that others wait for; `left` says that it has left the group or is stopped."""
    dump = dumps.ranks.get(rank)
    # A rank that has left with a dump tells where.
    if left and not (dump and dump.has_left):
        return f"rank {rank} {left}"
    if dump is None:
        return dumps.lack(rank)
    calls = next((group.calls.get(rank, {}) for group in groups if group.name == name and rank in group.members), {})
    last = calls[max(calls)] if calls else None
    made = f"made call {number_text(last.number)} last, {last.text}," if last else "has made no call on it"
    where, is_at = place(dump), "has left the world at" if dump.has_left else "is at"
    return f"rank {rank} {made} and {is_at} {where}" if where else f"rank {rank} {made.rstrip(',')}"


def _state_in_store_call(
    waiting: Event, dumps: Dumps, groups: Sequence[JobGroup], rank: int, name: str, left: str
) -> str:
    """Return what is known about a rank that others wait for in the store: the missing call, and its present one."""
    dump = dumps.ranks.get(rank)
    if left or dump is None:
        return _state(dumps, groups, rank, name, left)
    group = next((group for group in groups if group.name == name and rank in group.members), None)
    made = 0 if group is None else 1 + max((number for number, _ in group.calls.get(rank, {})), default=-1)
    times = "once" if made == 1 else f"{made} times"
    lacks = f"rank {rank} has {f'called {waiting.op} only {times}' if made else f'not called {waiting.op}'}"
    pending = [(e, g.name) for g in dump.groups for e in g.events if e.state in ("scheduled", "started")]
    event, of_group = max(pending, key=lambda each: each[0].start_ns, default=(None, ""))
    if event is not None:
        return f"{lacks}; it is in {_call_text(event, of_group)}{_at(dump, event)}"
    where = place(dump)
    return f"{lacks}; it is at {where}" if where else lacks


def _waits(dumps: Dumps, groups: Sequence[JobGroup]) -> dict[int, _Wait]:
    """Return the first call of each rank that has not ended, or ran into a time-out, and the ranks it waits for."""
    found: list[tuple[Event, int, str, Callable[[], frozenset[int]]]] = []
    for group in groups:
        for number in group.numbers:
            calls = group.at(number)
            if len(calls) < len(group.members):
                for rank, event in calls.items():
                    if _is_waiting(event):
                        found.append((event, rank, group.name, partial(group.absent, calls, event.awaited)))
    for dump in dumps.ranks.values():
        for of_rank in dump.groups:
            for event in of_rank.events:
                if event.is_message and _is_waiting(event):
                    found.append((event, dump.rank, of_rank.name, partial(_peers, event, dump.rank, of_rank.members)))
    waits: dict[int, _Wait] = {}
    # The ranks are listed for the first call alone: a group may have many members.
    for event, rank, name, listed in sorted(found, key=lambda each: (not each[0].start_ns, each[0].start_ns)):
        if rank not in waits and (ends_of_rank := listed()):
            waits[rank] = _Wait(rank, ends_of_rank, event, name)
    for late in [
        rank for wait in waits.values() for rank in wait.ends if rank in waits and _is_late(waits[rank], wait)
    ]:
        waits.pop(late, None)
    return waits


def _is_late(wait: _Wait, earlier: _Wait) -> bool:
    """Return whether a wait began when the time-out of another one for its rank had passed."""
    return _is_stall(earlier.event.failure) and wait.event.start_ns >= earlier.event.end_ns > 0


def _peers(event: Event, rank: int, members: Sequence[int]) -> frozenset[int]:
    """Return the other side of a message; all other members if any of them may send it."""
    return frozenset(members) - {rank} if event.peer is None else frozenset([event.peer])


def _is_waiting(event: Event) -> bool:
    # Where a death is the cause, `_death` has found it.
    return event.state in ("scheduled", "started") or event.failure is not None


def _late(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on ranks that made a call after others had given it up."""
    for group in groups:
        for number in group.numbers:
            calls = group.at(number)
            stalled = {r: e for r, e in calls.items() if _is_stall(e.failure)}
            if not stalled:
                continue
            given_up = min(event.end_ns for event in stalled.values())
            late = tuple(r for r, e in calls.items() if e.start_ns >= given_up)
            if not late:
                continue
            # A rank that was late may itself have waited for a third one.
            early = {rank: event for rank, event in stalled.items() if rank not in late}
            first = min(event.start_ns for event in early.values())
            seconds = (max(calls[r].start_ns for r in late) - first) / 1e9
            text = (
                f"{capitalized(ranks_text(late))} came late to call {number_text(number)} of group {group.name!r}, "
                f"{calls[late[0]].text}{_at(dumps.ranks[late[0]], calls[late[0]])}: {seconds:.3g} s after "
                f"{ranks_text(early)}, whose time-out had passed."
            )
            return Verdict("late", late, text, group.name, number)
    return None


def _pending(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on a call that all ranks have made and none has completed."""
    for group in groups:
        for number in group.numbers:
            calls = group.at(number)
            if len(calls) == len(group.members) and all(event.state == "started" for event in calls.values()):
                text = next(iter(calls.values())).text
                sentence = (
                    f"All ranks are in call {number_text(number)} of group {group.name!r}, {text}, which none has "
                    f"completed: look at the network between them."
                )
                return Verdict("pending", tuple(sorted(calls)), sentence, group.name, number)
    return None


# ---- call sites


def _call_sites(dumps: Dumps, groups: Sequence[JobGroup]) -> Verdict | None:
    """Return the verdict on equal calls that two ranks made at each other's lines, in another order."""
    for group in groups:
        differing: list[tuple[Number, dict[int, Event]]] = []
        for number in group.numbers:
            calls = {rank: event for rank, event in group.at(number).items() if event.frames}
            if len({event.frames for event in calls.values()}) < 2:
                continue
            for earlier, others in differing:
                pair = _crossed(calls, others)
                if pair is not None:
                    one, other = pair
                    texts = (frame_text(user_frame(others[rank].frames)) for rank in (one, other))
                    where = dict(zip((one, other), texts, strict=True))
                    sentence = (
                        f"{capitalized(ranks_text(pair))} made calls {number_text(earlier)} and {number_text(number)} "
                        f"of group {group.name!r}, {calls[one].text}, in different orders: call {number_text(earlier)} "
                        f"is that of {where[one]} on rank {one}, and that of {where[other]} on rank {other}."
                    )
                    return Verdict("sites", pair, sentence, group.name, earlier)
            differing.append((number, calls))
    return None


def _crossed(calls: Mapping[int, Event], earlier: Mapping[int, Event]) -> tuple[int, int] | None:
    """Return two ranks of which one makes a call now that the other made before, at the same line, or None."""
    for one in sorted(calls):
        for other in sorted(earlier):
            if one == other or one not in earlier or other not in calls:
                continue
            same = calls[one].compared == earlier[other].compared and calls[one].frames == earlier[other].frames
            if same and earlier[one].frames != earlier[other].frames and calls[one].op != "barrier":
                return (one, other) if one < other else (other, one)
    return None
