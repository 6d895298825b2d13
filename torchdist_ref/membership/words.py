"""Words: the sentences about endings and failures, and the errors that have them as messages.

All English about failures of ranks is in the table `SENTENCES`. No culprit is chosen by a sentence: code that needs to
know what an error reports reads its attribute ``failure`` (`events`). A test holds that by replacing each sentence by
its key. Texts are still searched where a sentence would repeat a name or an advice that it has already. Do not add
choices of a culprit here: they belong to `blame`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchdist_ref.errors import (
    DistBackendError,
    DistError,
    GroupAbortedError,
    MismatchError,
    RankDiedError,
    RankStalledError,
    RendezvousError,
)
from torchdist_ref.membership.events import (
    ABORTED,
    DIED,
    LEFT,
    MISMATCH,
    PROGRAM_ENDED,
    RENDEZVOUS,
    STALLED,
    STOPPED,
    Ending,
    Failure,
)

SENTENCES = {
    "exited": "pid {pid} on {host} exited with code {number}",
    "killed": "pid {pid} on {host} was killed by {signal}",
    "ended": "pid {pid} on {host} has ended",
    "replaced": (
        "pid {pid} on {host} lives, but has started another program (exec), or closed the descriptors of this library"
    ),
    "disconnected": "its connection to {address} has ended",
    "lost": "its process (pid {pid} on {host}) has ended, or lost its connection to the store",
    "stopped": "Its process (pid {pid} on {host}) is stopped: continue it with 'kill -CONT {pid}'.",
    "rank died": "{ranks} died",
    "rank aborted": "{ranks} aborted: {reason}",
    "rank failed": "rank {publisher} failed: {reason}",
    "rank left": "{ranks} destroyed the group",
    "program ended": "the program of {ranks} ended without destroying the group",
    "reason of an ended program": "its program ended without destroying the group",
    "reason to continue": "it continues in another group: {text}",
    "last call": "; it {last}.",
    "see its output": " See the output and the exit code of that rank.",
    "left after": " It left after: {after}",
    "absent, has left": "destroyed the group",
    "absent, program ended": "ended its program without destroying the group",
    "absent, stopped": "is stopped",
    "meanwhile": " Meanwhile {deaths}.",
    "this rank left": "this rank destroyed the group meanwhile.",
    "start from a checkpoint": (
        "The call may have completed on some ranks. Destroy the group and start again from a checkpoint."
    ),
    "start again": "Start again.",
    "waits for": "It waits for {ranks} of group {group!r}.",
    "did not arrive": (
        "{ranks} did not arrive within {seconds:g} s{through}. {stopped}Other ranks: {others}. "
        "Inspect that rank, or pass a longer timeout to init_process_group or new_group.{meanwhile}"
    ),
    "for which it waits": ", for which {ranks} waits",
}
"""Each sentence, or part of one, by its key."""

_CLASSES: dict[str, type[DistBackendError | RendezvousError]] = {
    DIED: RankDiedError,
    ABORTED: GroupAbortedError,
    PROGRAM_ENDED: GroupAbortedError,
    LEFT: GroupAbortedError,
    STALLED: RankStalledError,
    MISMATCH: MismatchError,
    RENDEZVOUS: RendezvousError,
}


def say(key: str, **values: Any) -> str:
    """Return a sentence with its values."""
    return SENTENCES[key].format(**values)


def names(ranks: Sequence[int], members: Sequence[int] | None = None) -> str:
    """Return global ranks as text, with the group ranks among `members` where they differ.

    >>> names([0, 4, 6], [0, 4]), names([4])
    ('ranks 0, 1 (global 4), 6 (global)', 'rank 4')
    """
    texts = [_name(rank, members) for rank in ranks]
    return ("rank " if len(texts) == 1 else "ranks ") + ", ".join(texts)


def _name(rank: int, members: Sequence[int] | None) -> str:
    if members is None or rank not in members:
        return f"{rank}" if members is None else f"{rank} (global)"
    position = members.index(rank)
    return f"{rank}" if position == rank else f"{position} (global {rank})"


def ending_text(ending: Ending) -> str:
    """Return how a process ended.

    >>> ending_text(Ending("killed", 71, "node3", 9))
    'pid 71 on node3 was killed by SIGKILL'
    """
    text = f"signal {ending.number}"
    with suppress(ValueError):
        text = signal.Signals(ending.number).name
    known = ending.how if ending.how in SENTENCES else "ended"
    return say(known, signal=text, **ending.__dict__)


def _endings(failure: Failure) -> str:
    """Return the endings in parentheses; an empty text if none is known."""
    text = "; ".join(ending_text(ending) for ending in failure.endings if ending.how != STOPPED)
    return f" ({text})" if text else ""


def reason_of(failure: Failure) -> str:
    """Return why a rank failed: the text of its exception, or how its program ended."""
    if failure.kind == PROGRAM_ENDED:
        return say("reason of an ended program") + _endings(failure)
    if failure.publisher is not None and failure.endings and not failure.text:
        return "; ".join(map(ending_text, failure.endings))
    text = say("reason to continue", text=failure.text) if failure.continues else failure.text
    where = f"{failure.error} in {failure.call}" if failure.call else failure.error
    return f"{where}: {text}" if where and text else where or text


def sentence(failure: Failure, members: Sequence[int] | None = None) -> str:
    """Return the sentence about a failure, without the call and the rank that report it.

    Args:
        failure: The failure.
        members: Global ranks of the group whose ranks the sentence names; None to name global ranks.

    >>> sentence(Failure(DIED, (4,), (Ending("killed", 71, "node3", 9),)), [0, 4])
    'rank 1 (global 4) died (pid 71 on node3 was killed by SIGKILL)'
    """
    if failure.is_of_all_ranks:
        return failure.text
    if failure.publisher is not None:
        return say("rank failed", publisher=failure.publisher, reason=reason_of(failure))
    ranks = names(failure.ranks, members)
    if failure.kind == DIED:
        return say("rank died", ranks=ranks) + _endings(failure)
    if failure.kind not in (LEFT, PROGRAM_ENDED):
        return say("rank aborted", ranks=ranks, reason=reason_of(failure))
    has_ended = failure.kind == PROGRAM_ENDED
    text = say("program ended" if has_ended else "rank left", ranks=ranks) + _endings(failure)
    if failure.last:
        text += say("last call", last=failure.last)
    if has_ended:
        text = text.removesuffix(".") + "." + say("see its output")
    return text.removesuffix(".") + "." + say("left after", after=failure.after) if failure.after else text


def error_of(
    failure: Failure, context: str, members: Sequence[int] | None = None, advice: str = ""
) -> DistBackendError | RendezvousError:
    """Return the error that reports a failure.

    Args:
        failure: The failure.
        context: Beginning of the message: the call, the rank and the group that report it.
        members: See `sentence`.
        advice: Key of the sentence that follows on a death.
    """
    text = sentence(failure, members)
    if failure.kind == DIED and failure.publisher is None and advice:
        text = f"{text}. {say(advice)}"
    kind = _CLASSES.get(failure.kind, DistBackendError)
    error = kind(text if failure.is_of_all_ranks else f"{context}: {text}")
    if isinstance(error, DistBackendError):
        error.reporting(failure)
    if isinstance(error, GroupAbortedError) and failure.kind in (ABORTED, PROGRAM_ENDED):
        error.culprit, error.reason = names(failure.ranks, members), reason_of(failure)
    return error


def absence_of(failure: Failure) -> str:
    """Return why a rank for which others wait does not come, as the end of a sentence; empty if it may come."""
    if failure.kind == LEFT:
        return say("absent, has left")
    if failure.kind == PROGRAM_ENDED:
        return say("absent, program ended") + _endings(failure)
    return say("absent, stopped") if any(ending.how == STOPPED for ending in failure.endings) else ""


def deaths(failure: Failure | None, members: Sequence[int]) -> str:
    """Return the ranks that have died, as a sentence that follows another one; an empty text if there are none."""
    return "" if failure is None else say("meanwhile", deaths=sentence(failure, members))


def stop_text(failure: Failure) -> str:
    """Return that the process of a rank is stopped, with the blank after it; an empty text if it runs."""
    return "".join(f"{ending_text(ending)} " for ending in failure.endings if ending.how == STOPPED)


def stalled(
    failure: Failure, context: str, members: Sequence[int], seconds: float, chain: Sequence[int], others: str, dead: str
) -> DistError:
    """Return the error for a rank that lives and did not arrive.

    Args:
        failure: The failure, which names that rank.
        context: See `error_of`.
        members: See `sentence`.
        seconds: Duration of the wait.
        chain: Global ranks through which this rank waits for that one, the nearest last.
        others: State of all other ranks, in words.
        dead: See `deaths`.
    """
    text = say(
        "did not arrive",
        ranks=names(failure.ranks, members),
        seconds=seconds,
        through="".join(say("for which it waits", ranks=names([rank], members)) for rank in chain),
        stopped=stop_text(failure),
        others=others,
        meanwhile=dead,
    )
    return RankStalledError(f"{context}: {text}").reporting(failure)


def size_mismatch(sizes: Mapping[int, int]) -> MismatchError:
    """Return the error for ranks whose world sizes differ."""
    text = ", ".join(f"rank {rank} has {size}" for rank, size in sorted(sizes.items()))
    return MismatchError(f"init_process_group: world sizes differ: {text}. Give all ranks the same WORLD_SIZE.")


def backend_mismatch(operation: str, one: tuple[int, str], other: tuple[int, str]) -> MismatchError:
    """Return the error for two ranks whose backends differ; a backend without a name is the default."""
    (rank, name), (second, its_name) = sorted((one, other))
    sides = f"rank {rank} uses backend {name!r}, rank {second} uses {its_name!r}"
    return MismatchError(f"{operation}: {sides}. All ranks must use the same backend.")


def both_sides(one: tuple[int, str], other: tuple[int, str]) -> str:
    """Return what two ranks pass to an operation, as a text that does not depend on which of them came first.

    >>> both_sides((1, "members [0,1]"), (0, "members [1,0]"))
    'rank 0 passes members [1,0], rank 1 passes members [0,1]'
    """
    return ", ".join(f"rank {rank} passes {what}" for rank, what in sorted((one, other)))
