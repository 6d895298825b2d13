"""Proof that a schedule is right, without data: it runs on symbols, for all ranks at once.

A symbol is an expression: contributions of ranks, combined in some order. Three things make the proof:

* contributions are **counted** (none, once, more than once). A set or a flag cannot see a value that is
  added twice, which one broken schedule in five does;
* the expressions of all replicas are **compared**. Reductions commute but do not associate in floating point,
  so ``a + b`` equals ``b + a`` here but ``(a + b) + c`` does not equal ``a + (b + c)``: a schedule that passes
  gives all ranks the same bits;
* the **rules** of rounds are checked, by name:

  - *chunks*: the buffer of an operation that moves data has no slot;
  - *rank*: a move names a rank outside the world;
  - *size*: a move goes between slots of different sizes: where the buffer does not divide evenly, they differ;
  - *writable*: a move writes a slot that the operation does not have on that rank;
  - *unwritten*: a move reads, or reduces into, a slot without a value;
  - *clobber*: in one round a slot is replaced after it was already written (so the same copy twice, too);
  - *repeat*: a move that carries a signal is listed twice in one round;
  - *result*: a slot does not have the value of the operation's `contract` at the end;
  - *replicas*: it does, but combined in another order than on another rank;
  - *tree*: it does, but not combined along the `reduction_tree`. Only this rule does not make a schedule wrong:
    `violations` and `verify` check it where ``tree`` is given, and `choose` picks no schedule that breaks it.

Do not add here: anything numeric. The tests have an executor with numbers, to check this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchdist_ref.calls import IN_PLACE
from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules.contract import Contract, Contribution, contract
from torchdist_ref.schedules.reduction_tree import combined
from torchdist_ref.schedules.schedule import Move, Round, Schedule, Slot, slot_name

MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """Error in a schedule.

    Args:
        rule: name of the rule broken, as listed in the module.
        rank: rank of the slot.
        slot: slot of that rank.
        expected: the right value, as text.
        got: the value found, as text.
        round: number of the round, from 1; 0 for the state at the end.
    """

    rule: str
    rank: int
    slot: Slot
    expected: str
    got: str
    round: int = 0

    def __str__(self) -> str:
        when = f"round {self.round}" if self.round else "at the end"
        where = f"rank {self.rank}, {slot_name(self.slot)}, {when}"
        return f"{self.rule}: {where}: expected {self.expected}, got {self.got}"


def _sum(terms: Sequence[Contribution], repeated: Collection[Contribution] = ()) -> str:
    """Return a sum as text: terms that occur more than once come first and are marked; at most a few are listed."""
    order = sorted(terms, key=lambda term: term not in repeated)
    shown = (f"{r}.{slot_name(s)}" + (" more than once" if (r, s) in repeated else "") for r, s in order[:MAX_SHOWN])
    return " + ".join(shown) + (f" + {len(terms) - MAX_SHOWN} more" if len(terms) > MAX_SHOWN else "")


class Symbols:
    """Expressions, each with a number: equal numbers are equal expressions up to commutativity.

    ``once`` and ``many`` have, as bits of an integer, the contributions that an expression has at least once and
    more than once. No other counting is needed, and it is cheap for thousands of contributions.
    """

    def __init__(self) -> None:
        self.leaves: list[Contribution] = []
        self.once: list[int] = []
        self.many: list[int] = []
        self._numbers: dict[object, int] = {}

    def _number(self, key: object, once: int, many: int) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.once)
            self.once.append(once)
            self.many.append(many)
        return self._numbers[key]

    def leaf(self, contribution: Contribution) -> int:
        """Return the symbol of the value of a rank's slot at the start."""
        if contribution not in self._numbers:
            self.leaves.append(contribution)
        return self._number(contribution, 1 << (len(self.leaves) - 1), 0)

    def combine(self, a: int, b: int) -> int:
        """Return the symbol of a reduction of two symbols, in either order."""
        once, both = self.once[a] | self.once[b], self.once[a] & self.once[b]
        return self._number((a, b) if a < b else (b, a), once, self.many[a] | self.many[b] | both)

    def mask(self, contributions: Iterable[Contribution]) -> int:
        """Return the bits of these contributions."""
        return sum(self.once[self.leaf(c)] for c in contributions)

    def show(self, symbol: int | None) -> str:
        """Return the contributions of a symbol as text: at most a few are listed."""
        if symbol is None:
            return "nothing"
        once, many = self.once[symbol], self.many[symbol]
        held = [(i, c) for i, c in enumerate(self.leaves) if once >> i & 1]
        return _sum([c for _, c in held], {c for i, c in held if many >> i & 1})


State = dict[tuple[int, Slot], int]


def violations(schedule: Schedule, op: str, root: int = 0, *, tree: bool = False) -> Iterator[Violation]:
    """Find the errors of a schedule for an operation.

    Args:
        schedule: to check.
        op: operation that it should do, such as ``"all_reduce"``.
        root: for rooted operations (default 0).
        tree: whether each result must be combined along the `reduction_tree` (default False).

    Returns:
        An iterator over violations; empty for a correct schedule.
    """
    promise = contract(op, schedule.world, schedule.chunks, root)
    if op == "barrier":
        yield from _notified(schedule)
        return
    if schedule.chunks < 1:
        yield Violation("chunks", 0, ("data", 0), "at least 1 slot", str(schedule.chunks))
        return
    symbols, state = Symbols(), State()
    for rank in range(schedule.world):
        state.update({(rank, slot): symbols.leaf((rank, slot)) for slot in promise.before(rank)})
    writable = {(rank, slot) for rank in range(schedule.world) for slot in promise.writable(rank)}
    for number, moves in enumerate(schedule.rounds, 1):
        if op in IN_PLACE:
            yield from _sizes(moves, number, schedule.chunks)
        yield from _round(moves, number, schedule.world, writable, state, symbols)
    yield from _results(promise, schedule.world, state, symbols, tree)


def verify(schedule: Schedule, op: str, root: int = 0, *, tree: bool = False) -> None:
    """Prove that a schedule keeps the contract of an operation, with the same bits on all replicas.

    Args:
        schedule: to check, for any world size (64 ranks take a few milliseconds to a few tenths of a second).
        op: operation that it should do, such as ``"all_reduce"``.
        root: for rooted operations (default 0).
        tree: prove also that each result is combined along the `reduction_tree`, so that it has the same bits by any
            other schedule of which that was proved (default False).

    Raises:
        ArgumentError: it does not; the message names rule, rank, slot, and the values expected and found.

    >>> from torchdist_ref import ArgumentError
    >>> from torchdist_ref.schedules import Move, Schedule, build, verify
    >>> verify(build("all_reduce", "ring", 64), "all_reduce")
    >>> data = ("data", 0)
    >>> try:
    ...     verify(Schedule("half", 2, ((Move(0, 1, data, data, True),),)), "all_reduce")
    ... except ArgumentError as error:
    ...     print(error)
    half is not an all_reduce of 2 ranks:
      result: rank 0, data[0], at the end: expected 0.data[0] + 1.data[0], got 0.data[0]
    """
    found = list(violations(schedule, op, root, tree=tree))
    if found:
        lines = [f"  {violation}" for violation in found[:MAX_SHOWN]]
        more = [f"  and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
        article = "an" if op[0] in "aeiou" else "a"
        head = f"{schedule.name} is not {article} {op} of {schedule.world} ranks:"
        raise ArgumentError("\n".join([head, *lines, *more]))


def _sizes(moves: Round, number: int, chunks: int) -> Iterator[Violation]:
    for move in moves:
        if (move.read[1] - move.write[1]) % chunks:
            expected = f"a slot of the size of {slot_name(move.read)}, its index apart by a multiple of {chunks}"
            yield Violation("size", move.dst, move.write, expected, str(move), number)


def _round(
    moves: Round, number: int, world: int, writable: set[tuple[int, Slot]], state: State, symbols: Symbols
) -> Iterator[Violation]:
    """Run one round: all reads from the old state, then all writes to the new one."""
    read = [state.get((m.src, m.read)) for m in moves]
    # The values that are combined in each slot that changes, each with the rank that it comes from.
    values: dict[tuple[int, Slot], list[tuple[int, int]]] = {}
    for move, value in zip(moves, read, strict=True):
        target = (move.dst, move.write)
        written, holds = target in values, target in values or target in state
        yield from _broken_rules(move, value, number, world, target in writable, written, holds)
        if not move.reduce:
            values[target] = []
        elif not written:
            values[target] = [(move.dst, state[target])] if target in state else []
        if value is not None:
            values[target].append((move.src, value))
    for target, found in values.items():
        if found:
            in_order = (value for _, value in sorted(found, key=lambda each: each[0]))
            state[target] = combined(in_order, symbols.combine)


def _broken_rules(
    move: Move, value: int | None, number: int, world: int, writable: bool, written: bool, holds: bool
) -> Iterator[Violation]:
    if not (0 <= move.src < world and 0 <= move.dst < world):
        yield Violation("rank", move.dst, move.write, f"ranks from 0 to {world - 1}", str(move), number)
    if not writable and (move.write[0] != "tmp" or move.write[1] < 0):
        yield Violation("writable", move.dst, move.write, "a slot that the operation has there", str(move), number)
    if value is None:
        yield Violation("unwritten", move.src, move.read, "a value to read", str(move), number)
    if move.reduce and not holds:
        yield Violation("unwritten", move.dst, move.write, "a value to reduce into", str(move), number)
    if written and not move.reduce:
        yield Violation("clobber", move.dst, move.write, "one replacement, before all reductions", str(move), number)


def _results(promise: Contract, world: int, state: State, symbols: Symbols, tree: bool) -> Iterator[Violation]:
    masks: dict[tuple[Contribution, ...], int] = {}
    first: dict[Slot, int] = {}
    for rank in range(world):
        for slot, wanted in promise.after(rank).items():
            if wanted not in masks:
                masks[wanted] = symbols.mask(wanted)
            got = state.get((rank, slot))
            if got is None or symbols.once[got] != masks[wanted] or symbols.many[got]:
                yield Violation("result", rank, slot, _sum(wanted), symbols.show(got))
            elif promise.replicated and first.setdefault(slot, got) != got:
                yield Violation("replicas", rank, slot, "the order of the ranks before", "another order of the same")
            elif tree and got != combined(map(symbols.leaf, wanted), symbols.combine):
                yield Violation("tree", rank, slot, "the order of the reduction tree", "another order of the same")


def _notified(schedule: Schedule) -> Iterator[Violation]:
    """Check a barrier: its messages have no content, so the check counts the ranks that each was notified by."""
    world, signal = schedule.world, ("tmp", 0)
    notified_by = [1 << rank for rank in range(world)]
    for number, moves in enumerate(schedule.rounds, 1):
        before = list(notified_by)
        for move, times in Counter(moves).items():
            if not (0 <= move.src < world and 0 <= move.dst < world):
                yield Violation("rank", move.dst, move.write, f"ranks from 0 to {world - 1}", str(move), number)
                continue
            if (move.read, move.write, move.reduce) != (signal, signal, False):
                yield Violation("writable", move.dst, move.write, "a signal, tmp[0] to tmp[0]", str(move), number)
            if times > 1:
                yield Violation("repeat", move.dst, move.write, "one signal", f"{times} times {move}", number)
            notified_by[move.dst] |= before[move.src]
    for rank, ranks in enumerate(notified_by):
        missing = [r for r in range(world) if not ranks >> r & 1]
        if missing:
            yield Violation(
                "result", rank, signal, "a notification from every rank", f"none from {missing[:MAX_SHOWN]}"
            )
