"""Sentences about failures: how they read, and that no code of the library reads them back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import torchdist_ref as dist
from tests.debug import failing_programs as programs
from tests.debug.test_verdict import verdict_on
from torchdist_ref.membership import words
from torchdist_ref.membership.events import (
    ABORTED,
    DIED,
    EXITED,
    LEFT,
    LOST,
    MISMATCH,
    PROGRAM_ENDED,
    STALLED,
    Ending,
    Failure,
    failure_of,
)
from torchdist_ref.membership.words import SENTENCES, error_of, sentence
from torchdist_ref.testing import RankError, fill, run

EXIT = Ending(EXITED, 17, "node5", 3)
READ: dict[str, Failure] = {
    "ranks 1 (global 4), 2 (global 9) died (pid 17 on node5 exited with code 3)": Failure(DIED, (4, 9), (EXIT,)),
    "rank 1 (global 4) aborted: KeyError in barrier(): 'my bug'": Failure(
        ABORTED, (4,), error="KeyError", call="barrier()", text="'my bug'"
    ),
    "rank 1 (global 4) aborted: out of paper": Failure(ABORTED, (4,), text="out of paper"),
    "rank 1 (global 4) destroyed the group": Failure(LEFT, (4,)),
    "rank 1 (global 4) destroyed the group; it completed call 3.": Failure(LEFT, (4,), last="completed call 3"),
    "rank 2 (global 9) destroyed the group; it completed call 3. It left after: KeyError: x": Failure(
        LEFT, (9,), last="completed call 3", after="KeyError: x"
    ),
    "the program of rank 1 (global 4) ended without destroying the group (pid 17 on node5 exited with code 3); it "
    "completed call 3. See the output and the exit code of that rank.": Failure(
        PROGRAM_ENDED, (4,), (EXIT,), last="completed call 3"
    ),
    "rank 4 failed: OSError: no space": Failure(ABORTED, (4,), error="OSError", text="no space", publisher=4),
    "rank 4 failed: its program ended without destroying the group": Failure(PROGRAM_ENDED, (4,), publisher=4),
    "rank 4 failed: its process (pid 29 on node7) has ended, or lost its connection to the store": Failure(
        DIED, (4,), (Ending(LOST, 29, "node7"),), publisher=4
    ),
    "rank 4 failed: it continues in another group: shrink": Failure(
        ABORTED, (4,), text="shrink", publisher=4, continues=True
    ),
    "the sizes differ": Failure(MISMATCH, text="the sizes differ", publisher=4),
    "ranks 0, 7 (global) died": Failure(DIED, (0, 7)),
}


@pytest.mark.parametrize("text", READ)
def test_a_failure_reads(text: str) -> None:
    assert sentence(READ[text], [0, 4, 9]) == text


def test_an_error_carries_the_failure_that_it_reports() -> None:
    aborted = Failure(ABORTED, (4,), error="KeyError", call="barrier()", text="'my bug'")
    error = error_of(aborted, "all_reduce on rank 0", [0, 4])
    assert isinstance(error, dist.GroupAbortedError) and (error.failure, error.ranks) == (aborted, (4,))
    assert (error.culprit, error.reason) == ("rank 1 (global 4)", "KeyError in barrier(): 'my bug'")
    assert type(error_of(Failure(STALLED, (4,)), "x")) is dist.RankStalledError
    died = error_of(Failure(DIED, (4,)), "x", advice="start again")
    assert type(died) is dist.RankDiedError and str(died) == "x: rank 4 died. Start again."
    assert str(error_of(Failure(MISMATCH, text="the sizes differ"), "x")) == "the sizes differ"


@pytest.fixture
def keys_for_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each sentence by its key, which holds no rank, no process and no word of a sentence."""
    numbered = {key: f"sentence {number}" for number, key in enumerate(SENTENCES)}
    monkeypatch.setattr(words, "SENTENCES", numbered)


def aborts_in_a_chain(rank: int) -> None:
    """Rank 1 aborts and leaves no dump; rank 0 sees only rank 2, which passes that on."""
    if rank == 1:
        programs.raises_without_a_dump(rank)
    elif rank == 2:
        dist.recv(fill(2, (4,)), 1)
    else:
        dist.recv(fill(0, (4,)), 2)


DIAGNOSED: dict[str, tuple[Callable[[int], None], int, str, str, tuple[int, ...]]] = {
    "a death": (programs.dies, 3, "ref", "died", (1,)),
    "a death on Gloo": (programs.dies, 3, "gloo", "died", (1,)),
    "a death in a subgroup": (programs.dies_in_a_subgroup, 3, "ref", "died", (2,)),
    "a leave": (programs.leaves, 2, "ref", "behind", (1,)),
    "a leave on Gloo": (programs.leaves_before_the_last_call, 3, "gloo", "behind", (1,)),
    "the end of a program": (programs.ends, 2, "ref", "behind", (1,)),
    "an exception": (programs.raises, 3, "ref", "raised", (2,)),
    "an exception without a dump": (programs.raises_without_a_dump, 2, "ref", "raised", (1,)),
    "an abort that is passed on": (aborts_in_a_chain, 3, "ref", "raised", (1,)),
    "a deadlock": (programs.waits_in_a_ring, 3, "ref", "deadlock", (0, 1, 2)),
    "a late rank": (programs.comes_late, 3, "ref", "late", (1,)),
    "exceptions of survivors": (programs.dies_and_survivors_raise_their_own, 3, "ref", "died", (1,)),
}


@pytest.mark.usefixtures("keys_for_sentences")
@pytest.mark.parametrize("name", DIAGNOSED)
def test_the_verdict_is_the_same_without_the_sentences(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, size, backend, kind, ranks = DIAGNOSED[name]
    found = verdict_on(program, size, tmp_path, monkeypatch, backend)
    assert (found.kind, found.ranks) == (kind, ranks), found.sentence


def culprits_of(call: Callable[[], object]) -> tuple[str, tuple[int, ...], str]:
    """Return the kind of failure that a call of this rank reports, the ranks that it names, and its message."""
    try:
        call()
    except dist.DistBackendError as error:
        failure = failure_of(error)
        return failure.kind if failure else "", error.ranks, str(error)
    return "", (), ""


BLAMED: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(fill(0, (3,))),
    "new_group": lambda: dist.new_group([0, 1, 2]),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=timedelta(seconds=20)),
}


def blames(rank: int, name: str) -> tuple[str, tuple[int, ...], str]:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return culprits_of(BLAMED[name])


@pytest.mark.usefixtures("keys_for_sentences")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("name", BLAMED)
def test_the_culprit_is_the_same_without_the_sentences(name: str, backend: str) -> None:
    with pytest.raises(RankError) as caught:
        run(blames, 3, name, ranks="processes", backend=backend)
    outcomes = [caught.value.outcomes[rank].value for rank in (0, 2)]
    assert [outcome[:2] for outcome in outcomes] == [(DIED, (1,))] * 2, outcomes
    assert all("sentence" in text and "died" not in text for _, _, text in outcomes)
