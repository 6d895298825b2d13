"""Call sites: the lines of the program at which the ranks make one call, compared at debug level DETAIL.

Two tensors of one shape and dtype that a rank reduces in the wrong order give wrong numbers and no error, on every
backend. But the two calls are at different lines of the program, so the lines of the ranks differ. A program may call
from different lines on purpose, for example in the two branches of `if rank == 0`. So a difference is logged and never
raised:

- as a warning, once for each pair of lines, if ranks that have the same part in the call are at different lines;
- as an error, if a rank makes a call at the line at which another rank made an earlier one: they are swapped.

Barriers are left out, since they have no tensor, and so is the line of a root, which is often in a branch of its own.
Do not add other comparisons here: they belong to `backends.detail_level`.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from torchdist_ref.calls import Call, Number
from torchdist_ref.debug.frames import frame_text, user_frames
from torchdist_ref.errors import DistError, MismatchError
from torchdist_ref.recorder import Entry, Frame, Recorder, frames_of
from torchdist_ref.stores import Store

STACKS_VARIABLE = "TORCH_SHOW_CPP_STACKTRACES"
# Calls at different lines that are remembered, to recognize a later one at the same lines.
REMEMBERED_CALLS = 64

_SEPARATOR = "\x1f"

log = logging.getLogger("torchdist_ref.debug")


warned_of: dict[str, object] = {}
"""Operations of which `warn_of_autograd` has warned, each with the warning."""


def warn_of_autograd(operation: str, written: Sequence[Any]) -> None:
    """Log the first call of an operation, in this process, that has written a tensor which requires a gradient.

    Autograd does not learn of it, and does not show which tensors it has saved for the backward pass.
    """
    warning = object()
    # Ranks that are threads share the table: one of them warns.
    if any(t.requires_grad for t in written) and warned_of.setdefault(operation, warning) is warning:
        log.warning(
            "%s wrote a tensor that requires a gradient. Autograd is not told: a backward pass that uses the tensor "
            "gets the new values, and its gradient is that of the former ones. Use torchdist_ref.nn.functional for a "
            "collective that autograd differentiates, or .detach() to say that none is wanted.",
            operation,
        )


def record_stacks(recorder: Recorder) -> None:
    """Let a recorder record the caller's stack with each call; takes microseconds a call."""
    append = recorder.record

    def record(entry: Entry) -> None:
        entry.append(frames_of(sys._getframe(1)))  # noqa: SLF001, the documented way to the caller's frame
        append(entry)

    recorder.record = record


class CallSites:
    """Call sites of the ranks of one group, compared call by call.

    Args:
        name: The group's name.
        members: Global ranks, in group order.

    Attributes:
        members: Global ranks, in group order.

    >>> from torchdist_ref.calls import AllReduce
    >>> sites, call = CallSites("world", (0, 1)), AllReduce()
    >>> a, b = "a.py:3 in f", "a.py:4 in f"
    >>> sites.difference(call, "all_reduce", (0, 0), [a, a])
    >>> level, text = sites.difference(call, "all_reduce", (1, 0), [a, b])
    >>> text.partition(". ")[0]
    "call 1 of group 'world', all_reduce, is at different lines: rank 0 at a.py:3 in f, rank 1 at a.py:4 in f"
    >>> level, text = sites.difference(call, "all_reduce", (2, 0), [b, a])
    >>> text.partition(":")[0]
    "calls 1 and 2 of group 'world', all_reduce, are swapped"
    """

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self._name, self.members = name, members
        self._differing: deque[tuple[Number, str, Sequence[str]]] = deque(maxlen=REMEMBERED_CALLS)
        self._reported: set[tuple[str, ...]] = set()

    @staticmethod
    def text(frames: Sequence[Frame]) -> str:
        """Return the program's frames of a stack as one line, as ranks exchange it."""
        places = (frame_text(frame) + _source(frame) for frame in user_frames(frames))
        return _SEPARATOR.join(place.replace("\n", " ").replace(_SEPARATOR, " ") for place in places)

    def sides(self, sites: Sequence[str]) -> str:
        """Return the line of every rank in words; from the innermost frame on, the first that differs."""
        stacks = [site.split(_SEPARATOR) for site in sites]
        depth = next((d for d in range(min(map(len, stacks))) if len({s[d] for s in stacks}) > 1), 0)
        pairs = zip(self.members, stacks, strict=True)
        return ", ".join(f"rank {member} at {stack[depth] or 'an unknown place'}" for member, stack in pairs)

    def compare(self, call: Call, text: str, number: Number, sites: Sequence[str]) -> None:
        """Log a difference between the ranks' call sites."""
        found = self.difference(call, text, number, sites)
        if found is not None:
            log.log(*found)

    def difference(self, call: Call, text: str, number: Number, sites: Sequence[str]) -> tuple[int, str] | None:
        """Return the level and the text of a message on the ranks' call sites, or None.

        Args:
            call: The call.
            text: The call in words, with shapes: only calls with the same text can be swapped.
            number: Number of the call.
            sites: `text` of each rank's stack, in group order; empty if it is not known.
        """
        if len(set(sites)) < 2 or call.op == "barrier" or "" in sites:
            return None
        earlier = next((e for e in self._differing if e[1] == text and _crossed(sites, e[2])), None)
        self._differing.append((number, text, sites))
        label = f"group {self._name!r}, {text},"
        if earlier is not None:
            return logging.ERROR, (
                f"calls {earlier[0][0]} and {number[0]} of {label} are swapped: the first was "
                f"{self.sides(earlier[2])}; the second is {self.sides(sites)}. If these lines pass different "
                f"tensors, the results are wrong."
            )
        root = getattr(call, "root", None)
        if len({site for rank, site in enumerate(sites) if rank != root}) < 2 or tuple(sites) in self._reported:
            return None
        self._reported.add(tuple(sites))
        return logging.WARNING, (
            f"call {number[0]} of {label} is at different lines: {self.sides(sites)}. If these lines pass tensors that "
            f"do not belong together, the results are wrong."
        )


def _source(frame: Frame) -> str:
    """Return the source of a frame's line in parentheses, if it can be read."""
    line = linecache.getline(frame[1], frame[2]).strip()
    return f" ({line[:100]})" if line else ""


def _crossed(sites: Sequence[str], earlier: Sequence[str]) -> bool:
    """Return whether a rank is where another one was earlier, when the two were at different lines."""
    size = len(sites)
    return any(
        sites[one] == earlier[other] and earlier[one] != earlier[other] and sites[one] != sites[other]
        for one in range(size)
        for other in range(size)
    )


def log_stack(error: MismatchError, frames: Sequence[Frame]) -> None:
    """Log the whole stack of a call that differs from the other ranks', if TORCH_SHOW_CPP_STACKTRACES asks for it."""
    if os.environ.get(STACKS_VARIABLE, "0").lower() in ("", "0", "false", "no", "off", "n"):
        return
    lines = "\n".join(f'  File "{file}", line {line}, in {function}' for function, file, line in reversed(frames))
    log.error("Collective desynchronization: %s\nStack (most recent call last):\n%s", error, lines)


class SiteComparingExecutor:
    """Executor of `ref` that also compares the ranks' call sites, through the store, once a call has run.

    Args:
        executor: The executor that runs the calls.
        recorder: The group's recorder, with stacks.
        store: Store of the group.
        rank: This rank in the group.
        sites: The comparison.
    """

    def __init__(self, executor: Any, recorder: Recorder, store: Store, rank: int, sites: CallSites) -> None:
        self._executor, self._recorder, self._store, self._sites = executor, recorder, store, sites
        self._rank, self._previous = rank, ""
        self.name, self.compile = executor.name, executor.compile

    def run(self, program: Any, tensors: Sequence[Any], number: Number) -> None:
        """Run a program; the other ranks have written their call sites once it has run."""
        # None if more calls have been made since than the recorder keeps.
        event = self._recorder.find(number)
        frames = event.frames if event is not None else ()
        prefix = f"sites/{number[0]}.{number[1]}"
        own = f"{prefix}/{self._rank}"
        self._write(own, CallSites.text(frames))
        try:
            self._executor.run(program, tensors, number)
        except MismatchError as error:
            sites = self._read(prefix)
            text = f"{error} Call sites: {self._sites.sides(sites)}." if sites else str(error)
            described = MismatchError(text)
            log_stack(described, frames)
            raise described from None
        plan = getattr(program, "plan", program)
        warn_of_autograd(plan.op, tensors[plan.inputs :])
        sites = self._read(prefix)
        # All ranks have begun this call, so all have read the sites of the previous one.
        if self._previous not in ("", own):
            self._delete(self._previous)
        self._previous = own
        if sites and event is not None:
            self._sites.compare(event.call, event.text, number, sites)

    def close(self) -> None:
        """Release what the executor holds."""
        self._executor.close()

    # A store that has gone must not fail a call that has not.

    def _write(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except DistError as error:
            log.debug("call sites: %r", error)

    def _read(self, prefix: str) -> list[str]:
        keys = [f"{prefix}/{rank}" for rank in range(len(self._sites.members))]
        try:
            return [value.decode() for value in self._store.multi_get(keys)] if self._store.check(keys) else []
        except DistError as error:
            log.debug("call sites: %r", error)
            return []

    def _delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except DistError as error:
            log.debug("call sites: %r", error)
