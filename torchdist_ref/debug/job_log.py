"""Verdict on the log of a job: a launcher's or torchrun's output, with the tracebacks of ranks and NCCL's watchdog.

A log shows less than dumps do: the last line of each rank that printed a traceback, the exit codes that the launcher
reports, and the calls that NCCL's watchdog names. Lines belong to a rank if they have torch's prefix ``[rank0]:``. The
log may be anything: each line is cut, and the number of lines that are kept is bounded. Do not add conclusions from
dumps here: they belong to `verdict`.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torchdist_ref.debug.frames import frame_text, user_frames
from torchdist_ref.debug.verdict import Verdict, capitalized, quoted, ranks_text
from torchdist_ref.error_index import PREFIX
from torchdist_ref.recorder import Frame

MAX_LINE = 4_000
"""Characters of a line that are read."""
MAX_FOUND = 10_000
"""Errors, and ranks, that are kept."""

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_RANK_PREFIX = re.compile(r"\[(?:rank|default)(\d{1,7})\]:? ?")
_CPP_PREFIX = re.compile(r"\[[A-Z]\d+ [^]]*\] ?")
_ENTRY = re.compile(rf"{PREFIX}([a-z][a-z-]{{1,60}})")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line (\d{1,9}), in (.+)')
_ERROR = re.compile(r"((?:\w+\.)*)([A-Z]\w*)(?:: (.*))?$")
_FAILED_RANK = re.compile(r"\s+rank\s+: (\d{1,7}) \(local_rank: \d+\)")
_EXIT_CODE = re.compile(r"\s+exitcode\s*: (?:killed by \w+ \()?(-?\d{1,9})")
_RECORD = re.compile(r"\s+traceback\s*: (.*)")
_END_OF_RECORD = re.compile(r"={5}|-{5}|\[\d+\]:")
_FIRST_FAILURE = ("Root Cause (first observed failure):", "the job failed; first failure:")
_LAUNCHED = re.compile(
    r"torchdist_ref\.launch: rank (\d{1,7}) \(process \d+\) (?:was killed by (\w+)|exited with code)"
)
_WATCHDOG = re.compile(
    r"(?:\[PG (?:ID )?(.{1,80}?) Rank \d+\] .*?)?\[?(?:Rank (\d{1,7})\] )?Watchdog caught collective operation "
    r"timeout: \w+\(SeqNum=(\d{1,18}), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?"
)
_ENQUEUED = re.compile(r"Rank (\d{1,7})\].* last enqueued (?:NCCL )?work: (-?\d{1,18})")
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_STALLED = re.compile(r"(ranks? [\d, and]+?) did not arrive within| has waited [\d.]+ s for (ranks? [\d, and]+)")
_ON_RANK = re.compile(r" on rank (\d{1,7}) of group ")
_SIDE = re.compile(r"rank (\d{1,7}): (.*?)(?=; rank \d+: |\. )")
_TORCHS_SIDE = re.compile(r"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((.*?)TensorDeviceTypes")

# Errors by what they say of the rank that raises them. A launcher raises the last ones.
_MISMATCHES = re.compile(r"MismatchError: |.*Detected mismatch between collectives on ranks")
_DEATHS = re.compile(r"RankDiedError: ")
_WAITS = re.compile(
    r"RankStalledError: |KeyboardInterrupt|StoreTimeoutError: |.*Timed out waiting \d+ms for|.*wait timeout after|"
    r".*Socket Timeout|.*failed to pass monitoredBarrier"
)
_CONSEQUENCES = re.compile(
    r"GroupAbortedError: |DistNetworkError: |.*(Connection (closed|reset) by peer|Broken pipe|NCCL (error|communicat)|"
    r"recvValue failed|failed to recv, got 0 bytes|successfully reached monitoredBarrier|Read error \[)"
)
_OF_LAUNCHERS = ("ChildFailedError", "SignalException", "ProcessRaisedException", "ProcessExitedException")
_STOPPED_BY_LAUNCHER = (-signal.SIGTERM, -signal.SIGINT)
_DUMPS = (
    "To see the call of each rank, set TORCH_FR_BUFFER_SIZE=2000 (NCCL: TORCH_NCCL_TRACE_BUFFER_SIZE=2000) and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and read the dumps"
)


@dataclass(frozen=True)
class LoggedError:
    """Error of a rank in a log.

    Attributes:
        line: Number of its line in the log, from 1.
        rank: The rank; None if the log does not show it.
        text: Type and message.
        where: File, line and function of the program; empty if the log does not show it.
        entry: Id of its entry of the error index; empty if it has none.
    """

    line: int
    rank: int | None
    text: str
    where: str = ""
    entry: str = ""


@dataclass(frozen=True)
class Timeout:
    """Call that NCCL's watchdog reports: its group, its number, and the call as text."""

    group: str
    number: int
    call: str


@dataclass
class JobLog:
    """Content of a log.

    Attributes:
        errors: The ranks' errors, in order.
        exits: Exit code of each rank that the launcher reports; the negative number of a signal.
        ranks: All ranks that occur.
        first: The rank that failed first, as the launcher reports; None if it does not.
        timeouts: Of each rank the first call that NCCL's watchdog reports.
        enqueued: Of each rank the number of the last call that NCCL's watchdog reports as enqueued.
        hints: Ranks that did not arrive, as a barrier or a waiting rank reports, each with the line of the log.
    """

    errors: list[LoggedError] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    first: int | None = None
    timeouts: dict[int, Timeout] = field(default_factory=dict)
    enqueued: dict[int, int] = field(default_factory=dict)
    hints: dict[int, str] = field(default_factory=dict)

    def of_kind(self, kind: re.Pattern[str]) -> list[LoggedError]:
        """Return the errors whose text a pattern matches."""
        return [error for error in self.errors if kind.match(error.text)]


class _Tracebacks:
    """Tracebacks of one stream, in which those of several ranks may be mixed."""

    def __init__(self) -> None:
        self._open, self._mixed = 0, False
        self._frames: list[Frame] = []

    def read(self, line: str) -> tuple[str, str] | None:
        """Return text and place of the error that a line ends a traceback with, or None."""
        if line.startswith(_TRACEBACK):
            self._open += 1
            self._mixed = self._open > 1
            self._frames = []
        elif found := _FRAME.match(line):
            self._frames.insert(0, (found[3], found[1], int(found[2])))
            del self._frames[64:]
        elif self._open and not line.startswith(PREFIX) and (error := _ERROR.match(line)):
            frames = user_frames(self._frames)
            where = frame_text(frames[0]) if frames and not self._mixed else ""
            self._open -= 1
            return f"{error[2]}: {error[3]}" if error[3] else error[2], where
        return None


def read_log(text: str) -> JobLog:
    """Return what a log shows of the ranks.

    >>> lines = ["Traceback (most recent call last):", '  File "train.py", line 8, in step', "ValueError: bad batch"]
    >>> read_log(chr(10).join(f"[rank1]: {line}" for line in lines)).errors
    [LoggedError(line=3, rank=1, text='ValueError: bad batch', where='train.py:8 in step', entry='')]
    """
    log, streams = JobLog(), dict[object, _Tracebacks]()
    failed, in_record, is_first = None, False, False
    for number, raw in enumerate(text.splitlines(), 1):
        line = _COLOR.sub("", raw[:MAX_LINE]).rstrip()
        prefix = _RANK_PREFIX.search(line[:200])
        rank = int(prefix[1]) if prefix else None
        line = line[prefix.end() :] if prefix else line
        if rank is not None and len(log.ranks) < MAX_FOUND:
            log.ranks.add(rank)
        is_first |= line.endswith(_FIRST_FAILURE)
        if found := _FAILED_RANK.match(line):
            failed = int(found[1])
            log.ranks.add(failed)
            log.first = failed if is_first else log.first
        elif failed is not None and (found := _EXIT_CODE.match(line)):
            log.exits[failed] = int(found[1])
        elif failed is not None and (found := _RECORD.match(line)):
            in_record, line = True, f"  {found[1]}"
        elif _END_OF_RECORD.match(line):
            in_record = False
        if in_record:
            rank, line = failed, line[2:]
        error = streams.setdefault(rank, _Tracebacks()).read(line) if len(streams) < MAX_FOUND else None
        if error is not None:
            _add_error(log, number, rank, *error)
        elif log.errors and (found := _ENTRY.fullmatch(line)):
            log.errors[-1] = replace(log.errors[-1], entry=found[1])
        _read_other(log, line, rank)
    return log


def _add_error(log: JobLog, number: int, rank: int | None, text: str, where: str) -> None:
    if text.partition(":")[0] in _OF_LAUNCHERS or len(log.errors) == MAX_FOUND:
        return
    if rank is None and (found := _ON_RANK.search(text)):
        rank = int(found[1])
        log.ranks.add(rank)
    log.errors.append(LoggedError(number, rank, text, where))


def _read_other(log: JobLog, line: str, rank: int | None) -> None:
    """Read a line that is not part of a traceback: of a launcher, of NCCL's watchdog, or on a rank that is missing."""
    if "Watchdog caught" in line and (found := _WATCHDOG.search(line)):
        group, group_rank, seq, op, *sizes = found.groups()
        call = f"{op} of {sizes[0]} elements" if sizes[0] else op
        if (one := rank if rank is not None else int(group_rank or -1)) >= 0:
            log.ranks.add(one)
            log.timeouts.setdefault(one, Timeout(group or "", int(seq), call))
    elif "last enqueued" in line and (found := _ENQUEUED.search(line)):
        log.enqueued.setdefault(int(found[1]) if rank is None else rank, int(found[2]))
    elif found := _LAUNCHED.match(line):
        log.ranks.add(int(found[1]))
        log.first = int(found[1]) if log.first is None else log.first
        if found[2] in signal.Signals.__members__:
            log.exits.setdefault(int(found[1]), -signal.Signals[found[2]])
    if found := _BARRIER.search(line) or _STALLED.search(line):
        absent = next(filter(None, found.groups()))
        text = _CPP_PREFIX.sub("", line.strip())
        log.hints |= {int(one): text for one in re.findall(r"\d{1,7}", absent) if int(one) not in log.hints}


def find_verdict_in_log(log: JobLog) -> Verdict:
    """Return the conclusion from a log; the kinds are those of `verdict`."""
    for find in (_mismatch, _killed, _raised, _absent, _watchdog, _found_dead, _aborted, _waited, _closed, _exited):
        if (found := find(log)) is not None:
            return found
    return Verdict("nothing", (), "The log has no traceback of a rank, no report of a launcher and no time-out.")


def _at(error: LoggedError) -> str:
    return f" at {error.where}" if error.where else ""


def _odd(sides: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that differ from most others; all ranks if there is no such majority.

    >>> _odd({0: "a", 1: "b", 2: "a"}), _odd({0: "a", 1: "b"})
    ((1,), (0, 1))
    """
    counted = Counter(sides.values()).most_common()
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        return tuple(sorted(sides))
    return tuple(sorted(rank for rank, side in sides.items() if side != counted[0][0]))


def _sides(sides: Mapping[int, str], verb: str) -> str:
    together: dict[str, list[int]] = {}
    for rank, side in sorted(sides.items()):
        together.setdefault(side, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} {verb} {side}" for side, ranks in together.items())


def _mismatch(log: JobLog) -> Verdict | None:
    """Return the verdict on the first error that reports different calls."""
    errors = log.of_kind(_MISMATCHES)
    if not errors:
        return None
    sides = {int(rank): call for error in errors for rank, call in _SIDE.findall(error.text)}
    for error in errors:
        for rank, call in _TORCHS_SIDE.findall(error.text):
            sides[int(rank)] = re.sub(r"SequenceNumber=\d+, ?|OpType=|Tensor", "", call).rstrip(", ")
    if len(set(sides.values())) < 2:
        ranks = tuple(sorted({error.rank for error in errors if error.rank is not None}))
        return Verdict("mismatch", ranks, f"Ranks made different calls{_at(errors[0])}: {quoted(errors[0].text)}")
    odd, places = _odd(sides), {error.rank: error.where for error in errors if error.where}
    sides = {rank: call + (f" at {places[rank]}" if rank in places else "") for rank, call in sides.items()}
    other = "made different calls" if len(odd) == len(sides) else "made another call than the others"
    return Verdict("mismatch", odd, f"{capitalized(ranks_text(odd))} {other}: {_sides(sides, 'made')}.")


def _killed(log: JobLog) -> Verdict | None:
    """Return the verdict on a rank that a signal ended before the others failed."""
    code = log.exits.get(-1 if log.first is None else log.first, 0)
    if log.first is None or code >= 0 or code in (*_STOPPED_BY_LAUNCHER, -signal.SIGABRT):
        return None
    return _death(log.first, code)


def _death(rank: int, code: int) -> Verdict:
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    cause = {
        "SIGKILL": ". If no process has sent the signal, memory was short: see the kernel's log",
        "SIGSEGV": ". Run the script with 'python -X faulthandler' to see where",
        "SIGBUS": ". /dev/shm may be full",
        "SIGABRT": ". A library of C++ has ended it: see the last lines of its output",
    }.get(name, "")
    return Verdict("died", (rank,), f"Rank {rank} died: {name} killed it{cause}.")


def _raised(log: JobLog) -> Verdict | None:
    """Return the verdict on the first exception that no other rank has caused."""
    kinds = (_MISMATCHES, _DEATHS, _WAITS, _CONSEQUENCES)
    own = [error for error in log.errors if not any(kind.match(error.text) for kind in kinds)]
    if not own:
        return None
    error = next((e for e in own if e.rank is not None and e.rank == log.first), own[0])
    same = [e for e in own if e.text == error.text]
    # A launcher repeats the error of a rank whose own traceback has no prefix.
    rank = next((e.rank for e in same if e.rank is not None), None)
    where = next((e for e in same if e.where), error)
    who = "A rank" if rank is None else f"Rank {rank}"
    return Verdict("raised", () if rank is None else (rank,), f"{who} raised{_at(where)}: {quoted(error.text)}")


def _absent(log: JobLog) -> Verdict | None:
    """Return the verdict on the ranks that a barrier or a waiting rank reports as missing."""
    if not log.hints:
        return None
    # A rank that others wait for may itself wait for a third one.
    waiting = {error.rank for error in log.of_kind(_WAITS)}
    absent = tuple(sorted(set(log.hints) - waiting)) or tuple(sorted(log.hints))
    reports = [e for e in log.of_kind(_WAITS) if _BARRIER.search(e.text) or _STALLED.search(e.text)]
    reporter = next((e for e in reports if e.where), reports[0] if reports else None)
    text = quoted(reporter.text if reporter else log.hints[absent[0]])
    verb = "is" if len(absent) == 1 else "are"
    where = f": others wait for {'it' if len(absent) == 1 else 'them'}{_at(reporter)}" if reporter else ""
    sentence = f"{capitalized(ranks_text(absent))} {verb} behind{where}: {text}"
    return Verdict("behind", absent, sentence)


def _watchdog(log: JobLog) -> Verdict | None:
    """Return the verdict on the calls that NCCL's watchdog reports."""
    if not log.timeouts:
        return None
    waiting = ranks_text(log.timeouts)
    last = max(timeout.number for timeout in log.timeouts.values())
    late = tuple(sorted(rank for rank, number in log.enqueued.items() if number < last and rank not in log.timeouts))
    absent = late or tuple(sorted(log.ranks - set(log.timeouts)))
    verb = "waits" if len(log.timeouts) == 1 else "wait"
    if absent:
        call = next(timeout for timeout in log.timeouts.values() if timeout.number == last)
        be = "is" if len(absent) == 1 else "are"
        sentence = (
            f"{capitalized(ranks_text(absent))} {be} behind: {waiting} {verb} in call {last}, {call.call}, for which "
            f"the log shows no time-out of {ranks_text(absent)}."
        )
        return Verdict("behind", absent, sentence, number=(last, 0))
    if len({timeout.group for timeout in log.timeouts.values()}) == 1:
        sides = {rank: f"call {timeout.number}, {timeout.call}" for rank, timeout in log.timeouts.items()}
        if len(set(sides.values())) > 1:
            odd = _odd(sides)
            behind = [rank for rank, timeout in log.timeouts.items() if timeout.number < last]
            kind, ranks = ("behind", tuple(sorted(behind))) if behind else ("mismatch", odd)
            words = "did not make the later calls" if behind else "made another call"
            return Verdict(
                kind, ranks, f"{capitalized(ranks_text(ranks))} {words}: {_sides(sides, 'timed out in')}.",
                number=(last, 0),
            )  # fmt: skip
    timeout = log.timeouts[min(log.timeouts)]
    sentence = (
        f"{capitalized(waiting)} timed out in call {timeout.number}, {timeout.call}, and the log has no other rank. A "
        f"rank whose output is not in this log is behind, or the network between them fails. {_DUMPS}."
    )
    return Verdict("pending", tuple(sorted(log.timeouts)), sentence, number=(timeout.number, 0))


def _found_dead(log: JobLog) -> Verdict | None:
    """Return the verdict on a rank that others found dead."""
    errors = log.of_kind(_DEATHS)
    if not errors:
        return None
    dead = re.search(r": rank (\d{1,7}) died", errors[0].text)
    ranks = (int(dead[1]),) if dead else ()
    who = f"Rank {ranks[0]}" if ranks else "A rank"
    return Verdict("died", ranks, f"{who} died, and others failed{_at(errors[0])}: {quoted(errors[0].text)}")


def _aborted(log: JobLog) -> Verdict | None:
    """Return the verdict on a rank that ended with SIGABRT or another signal, though not as the first."""
    for rank, code in sorted(log.exits.items(), key=lambda each: each[0] != log.first):
        if code < 0 and code not in _STOPPED_BY_LAUNCHER:
            return _death(rank, code)
    return None


def _waited(log: JobLog) -> Verdict | None:
    """Return the verdict on the lines at which ranks waited until a time-out, or until they were interrupted."""
    waits = {error.rank: error.where for error in log.of_kind(_WAITS) if error.rank is not None}
    if not waits:
        return None
    absent = log.ranks - {error.rank for error in log.errors if error.rank is not None}
    places = _sides({rank: where or "an unknown line" for rank, where in waits.items()}, "waited at")
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        sentence = (
            f"{capitalized(ranks_text(absent))} {verb} behind: {places}, and {ranks_text(absent)} printed no error "
            "until the launcher stopped the job."
        )
        return Verdict("behind", tuple(sorted(absent)), sentence)
    if len(set(waits.values())) > 1:
        odd = _odd(waits)
        return Verdict("mismatch", odd, f"Ranks waited at different lines, in calls that do not match: {places}.")
    sentence = f"{capitalized(places)}, and the log has no other rank: one whose output is not here is behind."
    return Verdict("pending", tuple(sorted(waits)), sentence)


def _closed(log: JobLog) -> Verdict | None:
    """Return the verdict on errors that all follow from the end of a rank which the log does not show."""
    errors = log.of_kind(_CONSEQUENCES)
    if not errors:
        return None
    ranks = {error.rank for error in errors if error.rank is not None}
    silent = tuple(sorted(log.ranks - ranks))
    who = f"{capitalized(ranks_text(silent))} printed no error" if silent else "The log has no error of the rank"
    sentence = f"{who}, but the others failed because a rank ended{_at(errors[0])}: {quoted(errors[0].text)}"
    return Verdict("failed", silent, sentence)


def _exited(log: JobLog) -> Verdict | None:
    """Return the verdict on a rank that only the launcher's report names."""
    if log.first is None:
        return None
    code = log.exits.get(log.first)
    how = "" if code is None else f" with exit code {code}"
    sentence = f"Rank {log.first} ended first{how}, and the log has no traceback of it: read its own output."
    return Verdict("failed", (log.first,), sentence)


def errors_of(log: JobLog) -> Iterator[tuple[str, ...]]:
    """Yield a row for each error of a log: its line, its rank, its text and its place in the program."""
    for error in log.errors:
        yield str(error.line), "" if error.rank is None else str(error.rank), quoted(error.text), error.where


def merged(logs: Iterable[JobLog]) -> JobLog:
    """Return one log of several, such as the files of the ranks."""
    whole = JobLog()
    for log in logs:
        whole.errors += log.errors
        whole.exits |= log.exits
        whole.ranks |= log.ranks
        whole.first = log.first if whole.first is None else whole.first
        whole.timeouts |= log.timeouts
        whole.enqueued |= log.enqueued
        whole.hints |= log.hints
    return whole
