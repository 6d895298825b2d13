"""Verdicts: each kind of failure on real ranks, whose dumps must name the right rank, call and line."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.debug import failing_programs as programs
from tests.debug.failing_programs import (
    another_operation,
    blocked_in_the_system,
    calls_in_order,
    chain,
    comes_late,
    dies,
    dies_and_survivors_raise_their_own,
    dies_in_a_subgroup,
    ends,
    fails_outside,
    gives_up_and_raises_its_own,
    leaves,
    leaves_before_the_last_call,
    others_wait,
    raises,
    raises_without_a_dump,
    wait_for_file,
    waits_for_an_excluded_rank,
    waits_in_a_ring,
    waits_in_the_store,
)
from torchdist_ref.debug import flight_recorder
from torchdist_ref.debug.dumps import Dumps, Event, GroupCalls, RankDump, read_directory
from torchdist_ref.debug.frames import user_frames
from torchdist_ref.debug.verdict import JobGroup, Verdict, find_verdict
from torchdist_ref.errors import explain_type
from torchdist_ref.membership.events import (
    ABORTED,
    DIED,
    EXITED,
    KILLED,
    PROGRAM_ENDED,
    STALLED,
    STOPPED,
    Ending,
    Failure,
)
from torchdist_ref.processes import failure_record
from torchdist_ref.testing import RankError, fill, run

# A rank that another one fails has to write its dump before it is stopped.
# Groups are made with it too, and several ranks have to wait before it is over: a busy machine needs some of it.
SOON = programs.SOON

RECORDED, RECORD = Path(__file__).parent / "recorded", "RECORD_DUMPS"
"""Directory of recorded dumps, and the variable with which the tests run their programs and record them again."""

Diagnose = Callable[..., Verdict]


def verdict_on(
    program: Callable[[int], None], size: int, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str = "ref"
) -> Verdict:
    """Run a program that fails on ranks that dump their failures, and return the verdict."""
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(folder))

    def with_one_good_call(rank: int) -> None:
        dist.all_reduce(fill(rank, (3,)))
        program(rank)

    with suppress(RankError):
        run(with_one_good_call, size, ranks="processes", backend=backend)
    return find_verdict(read_directory(folder))


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Diagnose:
    """Return the verdict on the recorded dumps of a program; arguments as of `verdict_on`, which records them."""
    file = RECORDED / f"{re.sub(r'[^a-z0-9]+', '_', request.node.name.lower()).strip('_')}.json"

    def diagnose(
        program: Callable[[int], None], size: int, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str = "ref"
    ) -> Verdict:
        if RECORD in os.environ:
            found = verdict_on(program, size, folder, monkeypatch, backend)
            dumps = {path.name: portable(json.loads(path.read_text())) for path in sorted(folder.iterdir())}
            file.write_text(json.dumps(dumps, separators=(",", ":")) + "\n")
            return found
        folder.mkdir(exist_ok=True)
        for name, content in json.loads(file.read_text()).items():
            (folder / name).write_text(json.dumps(content))
        return find_verdict(read_directory(folder))

    return diagnose


def portable(content: Any, key: str = "") -> Any:
    """Return the content of a dump without names of this machine, and without frames outside of the tests."""
    if key == "frames" or (key == "stacks" and content and isinstance(content[0][0], str)):
        return [[name, f"/home/me/{Path(file).name}", line] for name, file, line in user_frames(content)]
    if isinstance(content, dict):
        return {name: portable(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [
            portable(each, key) for each in content if not (isinstance(each, dict) and each.get("program") is False)
        ]
    return content.replace(os.uname().nodename, "node") if isinstance(content, str) else content


def line_of(function: Callable[..., object], text: str) -> str:
    """Return the place of the line of a function that holds a text, as verdicts show it."""
    lines, first = inspect.getsourcelines(function)
    [offset] = [number for number, line in enumerate(lines) if text in line]
    return f"{Path(inspect.getsourcefile(function) or '').name}:{first + offset} in {function.__name__}"


# ---- a rank behind, in other code


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_in_other_code_is_named_with_its_line(
    culprit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    folder = tmp_path / "dumps"
    program = partial(others_wait, culprit, folder, os.pipe(), tmp_path / "pid")
    found = recorded(program, 3, folder, monkeypatch)
    assert (found.kind, found.ranks, found.number, found.group) == ("behind", (culprit,), (0, 0), "group 1")
    others = " and ".join(str(rank) for rank in range(3) if rank != culprit)
    assert found.sentence == (
        f"Rank {culprit} is behind: ranks {others} wait for it in call 0, all_reduce(reduction=max) of float32 [2, 5], "
        f"of group 'group 1' at {line_of(others_wait, '# where they wait')}; rank {culprit} has made no call on it and "
        f"is at {line_of(blocked_in_the_system, '# where it hangs')}."
    )


def test_the_end_of_a_chain_of_waits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    folder = tmp_path / "dumps"
    found = recorded(partial(chain, folder, os.pipe(), tmp_path / "pid"), 4, folder, monkeypatch)
    assert (found.kind, found.ranks) == ("behind", (3,))
    assert "rank 2 waits for it in recv(src=3, tag=0) of float32 [4]" in found.sentence
    assert line_of(blocked_in_the_system, "# where it hangs") in found.sentence


def test_ranks_that_wait_for_each_other_are_a_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(waits_in_a_ring, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("deadlock", (0, 1, 2))
    where = line_of(waits_in_a_ring, "# the ring")
    for rank in range(3):
        peer = (rank + 1) % 3
        text = f"rank {rank} waits in recv(src={peer}, tag=0) of float32 [3] at {where} for rank {peer}"
        assert text in found.sentence


# ---- different calls


def test_the_rank_with_another_call_is_named_with_both_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(another_operation, 4, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number) == ("mismatch", (2,), (1, 0))
    usual, other = (line_of(another_operation, f"# the {which} call") for which in ("usual", "other"))
    assert found.sentence == (
        "Rank 2 made another call than the others as call 1 of group 'world': ranks 0, 1 and 3 made "
        f"all_reduce(reduction=sum) of float32 [5] at {usual}, rank 2 made broadcast(root=1) of float32 [5] at {other}."
    )


DIFFERENT: dict[str, Callable[[int], torch.Tensor]] = {
    "[6]": lambda rank: fill(rank, (6 if rank == 1 else 5,)),
    "float64": lambda rank: fill(rank, (5,)).to(torch.float64 if rank == 1 else torch.float32),
}


@pytest.mark.parametrize("text", DIFFERENT)
def test_the_rank_with_another_size_or_dtype_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(lambda rank: dist.all_reduce(DIFFERENT[text](rank)), 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number) == ("mismatch", (1,), (1, 0))
    assert text in found.sentence.partition("rank 1 made ")[2].partition(" at ")[0]


def test_two_ranks_that_differ_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(lambda rank: dist.all_reduce(fill(rank, (2 + rank,))), 2, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number) == ("mismatch", (0, 1), (1, 0))


ORDERS = {
    "bac": ("swapped", "Rank 1 made calls 1 and 2 in the other order in group 'world': "),
    "bc": ("skipped", "Rank 1 left out call 1 in group 'world': "),
    "babc": ("skipped", "Rank 1 made an additional call 1 in group 'world': "),
}


@pytest.mark.parametrize("order", ORDERS)
def test_calls_in_another_order_left_out_or_added_are_recognized(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    def program(rank: int) -> None:
        with suppress(dist.DistBackendError):
            calls_in_order({1: order}, rank)
        flight_recorder.dump()

    kind, words = ORDERS[order]
    found = recorded(program, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number) == (kind, (1,), (1, 0))
    assert found.sentence.startswith(words)


def test_two_sides_of_a_mismatch_without_the_third_rank_are_not_judged() -> None:
    calls = {rank: {"world": [call_of(f"[{rank}]", 0)]} for rank in (1, 2)}
    found = find_verdict(job(calls, 3))
    assert (found.kind, found.ranks) == ("mismatch", (1, 2)) and found.sentence.endswith("; rank 0 left no dump.")


def call_of(compared: str, number: int) -> Event:
    return Event((number, 0), "all_reduce", f"all_reduce of {compared}", compared, "started", number + 1, 0)


def test_another_call_among_equal_ones_is_no_additional_one() -> None:
    calls = {rank: [call_of("[9]" if (rank, n) == (2, 3) else "[4]", n) for n in range(6)] for rank in range(3)}
    found = find_verdict(job({rank: {"world": of_rank} for rank, of_rank in calls.items()}, 3))
    assert (found.kind, found.ranks, found.number) == ("mismatch", (2,), (3, 0))
    assert found.sentence.startswith("Rank 2 made another call than the others as call 3 of group 'world': ")


# ---- deaths and exceptions


def test_a_dead_rank_is_named_with_its_end_and_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict_on(dies, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number) == ("died", (1,), (2, 0))
    start = (
        "Rank 1 died: ranks 0 and 2 failed in call 2 of group 'world', all_reduce(reduction=sum) of float32 [7] at "
        f"{line_of(dies, '# where it is missed')} (pid "
    )
    assert found.sentence.startswith(start) and found.sentence.endswith("was killed by SIGKILL).")


def test_a_death_is_named_though_survivors_raised_their_own_exceptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    """Once the verdict was that a survivor raised RuntimeError."""
    found = recorded(dies_and_survivors_raise_their_own, 3, tmp_path, monkeypatch)
    assert read_directory(tmp_path).ranks[0].error == "RuntimeError: step 2 failed"
    assert (found.kind, found.ranks, found.number) == ("died", (1,), (2, 0))


def test_a_rank_that_others_stopped_waiting_for_is_behind_though_they_raised_their_own_exceptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the verdict was that rank 0 raised ValueError: the call itself had not failed."""
    found = verdict_on(partial(gives_up_and_raises_its_own, tmp_path), 3, tmp_path, monkeypatch)
    assert "ValueError: step 1 failed" in {dump.error for dump in read_directory(tmp_path).ranks.values()}
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), (1, 0)), found.sentence


def test_exceptions_that_are_tied_into_a_ring_have_no_cause() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    assert flight_recorder.caused_by_another_rank(first) is None
    second.__cause__ = dist.RankStalledError("rank 1 did not arrive")
    assert flight_recorder.caused_by_another_rank(first) is second.__cause__


def test_an_exception_that_ended_the_group_is_named_before_those_that_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("no data")
        try:
            dist.all_reduce(fill(rank, (7,)))
        except dist.GroupAbortedError:
            flight_recorder.dump_failure(RuntimeError("step 1 failed"))
            raise

    found = recorded(program, 2, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("raised", (1,)) and "no data" in found.sentence


def test_a_dead_sender_is_named_and_ranks_without_dumps_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    def program(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            dist.recv(torch.zeros(7), 1)

    found = recorded(program, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number) == ("died", (1,), None)
    assert found.sentence.startswith("Rank 1 died: rank 0 failed in recv(src=1, tag=0) of float32 [7] at ")


def test_a_rank_that_raised_is_named_before_those_that_it_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(raises, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("raised", (2,))
    assert found.sentence.startswith(f"Rank 2 raised at {line_of(raises, '# the cause')}: RuntimeError: ")


def test_a_rank_that_comes_after_the_time_out_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(comes_late, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks, found.number, found.group) == ("late", (1,), (0, 0), "group 1")


def test_a_late_rank_that_waited_in_vain_itself_is_not_among_those_before_it() -> None:
    """Once rank 1 came late, after ranks 0 and 1."""
    stalled = partial(collective, stalls(2))
    first = replace(stalled(start=1), end_ns=1_000_000_000)
    second = replace(stalled(start=3_000_000_001), end_ns=4_000_000_000)
    found = find_verdict(job({0: {"world": [first]}, 1: {"world": [second]}, 2: {}}, 3))
    assert (found.kind, found.ranks) == ("late", (1,))
    assert found.sentence.endswith(": 3 s after rank 0, whose time-out had passed.")


def test_an_error_is_quoted_in_one_line_after_the_place() -> None:
    """Once the place followed the last sentence of an error, as if it belonged to that."""
    error = "MismatchError: rank 1 gives 2.5 elements,\nand rank 0 expects 1. Nothing was written"
    frames = (("step", "/home/me/train.py", 4),)
    found = find_verdict(Dumps({0: RankDump(0, "rank0", (), error=error, error_frames=frames)}))
    assert found.sentence == (
        "Rank 0 raised at train.py:4 in step: MismatchError: rank 1 gives 2.5 elements, and rank 0 expects 1. Nothing "
        "was written."
    )


def test_a_long_error_is_cut_at_a_word() -> None:
    """No test of its text decides where: it may be a user's, or another version's."""
    dump = RankDump(0, "rank0", (), error="ValueError: " + "word " * 100)
    expected = "Rank 0 raised: ValueError:" + " word" * 57
    assert find_verdict(Dumps({0: dump})).sentence == f"{expected} …"


def test_the_verdict_on_a_wrong_type_says_which_type() -> None:
    """Once it ended after the words "Invalid function argument"."""
    error = f"ArgumentTypeError: {explain_type('all_reduce', 'tensor', 'torch.Tensor', str(list))}"
    frames = (("step", "/home/me/train.py", 4),)
    found = find_verdict(Dumps({0: RankDump(0, "rank0", (), error=error, error_frames=frames)}))
    assert found.sentence == (
        "Rank 0 raised at train.py:4 in step: ArgumentTypeError: all_reduce: Invalid function argument. Expected "
        "parameter `tensor` of type torch.Tensor but got <class 'list'> instead."
    )


def test_nothing_is_said_of_ranks_that_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(lambda rank: flight_recorder.dump() and None, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("nothing", ())
    (tmp_path / "rank2.json").unlink()
    found = find_verdict(read_directory(tmp_path))
    assert found.sentence == "No rank waits for another, and all calls agree, but rank 2 left no dump."


# ---- another backend


def test_a_mismatch_that_hangs_gloo_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    def program(rank: int) -> None:
        tensor = fill(rank, (4,))
        work = dist.all_reduce(tensor, async_op=True) if rank else dist.broadcast(tensor, 0, async_op=True)
        flight_recorder.dump()
        for other in range(3):
            wait_for_file(tmp_path / f"rank{other}.json")
        os._exit(work is None)

    found = recorded(program, 3, tmp_path, monkeypatch, backend="gloo")
    assert (found.kind, found.ranks, found.number) == ("mismatch", (0,), (1, 0))


def test_a_mismatch_that_gloo_accepts_is_named_by_the_dumps_of_ranks_that_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once ranks that had received garbage left without dumps."""

    def program(rank: int) -> None:
        dist.broadcast(fill(rank, (4,)).to(torch.int32 if rank == 2 else torch.float32), 0)
        dist.destroy_process_group()

    found = verdict_on(program, 3, tmp_path, monkeypatch, backend="gloo")
    assert (found.kind, found.ranks, found.number) == ("mismatch", (2,), (1, 0)), found.sentence


def test_a_rank_that_left_on_gloo_is_behind_and_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the verdict was that it died."""
    found = verdict_on(leaves_before_the_last_call, 3, tmp_path, monkeypatch, backend="gloo")
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), (1, 0)), found.sentence
    where = line_of(leaves_before_the_last_call, "# where it leaves")
    assert found.sentence.endswith(
        f"; rank 1 made call 0 last, all_reduce(reduction=sum) of float32 [3], and has left the world at {where}."
    )


def test_a_rank_behind_on_gloo_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose) -> None:
    def program(rank: int) -> None:
        work = dist.all_reduce(fill(rank, (4,)), async_op=True) if rank != 1 else None
        flight_recorder.dump()
        for other in range(3):
            wait_for_file(tmp_path / f"rank{other}.json")
        os._exit(work is None)

    found = recorded(program, 3, tmp_path, monkeypatch, backend="gloo")
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), (1, 0))
    assert "rank 1 made call 0 last, all_reduce(reduction=sum) of float32 [3]," in found.sentence


def test_a_dead_rank_on_gloo_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose) -> None:
    """Once the verdict was that a rank died."""
    found = recorded(dies, 5, tmp_path, monkeypatch, backend="gloo")
    assert (found.kind, found.ranks) == ("died", (1,))
    assert found.sentence.startswith("Rank 1 died: ") and "was killed by SIGKILL" in found.sentence


def test_a_rank_that_others_gave_up_on_gloo_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    """Once the verdict was that rank 0 raised torch's error on a time-out."""

    def program(rank: int) -> None:
        group = dist.new_group(timeout=SOON)
        if rank == 3:
            for other in (0, 1, 2, 4):
                wait_for_file(tmp_path / f"rank{other}.json")
            os._exit(flight_recorder.dump() is None)
        dist.all_reduce(fill(rank, (4,)), group=group)

    found = recorded(program, 5, tmp_path, monkeypatch, backend="gloo")
    assert (found.kind, found.ranks) == ("behind", (3,)), found.sentence


def test_a_death_that_may_be_gloos_answer_to_a_mismatch_is_explained() -> None:
    died = collective(Failure(DIED, (1,), (Ending(KILLED, 7, "here", signal.SIGABRT),)))
    for backend in ("gloo", "ref"):
        group = GroupCalls("world", (0, 1), (died,), backend=backend)
        found = find_verdict(Dumps({0: RankDump(0, "rank0.json", (group,))}))
        assert (found.kind, found.ranks) == ("died", (1,))
        assert ("TORCH_DISTRIBUTED_DEBUG=DETAIL" in found.sentence) == (backend == "gloo")


def test_a_rank_without_a_dump_that_gloo_may_have_ended_is_explained() -> None:
    """The others sent it more than it expected, and completed the call: none of them met its death."""
    for backend in ("gloo", "ref"):
        group = GroupCalls("world", (0, 1), (collective(),), backend=backend)
        found = find_verdict(Dumps({0: RankDump(0, "rank0.json", (group,))}))
        assert (found.kind, found.ranks) == ("nothing", (1,)) and "but rank 1 left no dump" in found.sentence
        assert ("whether SIGABRT ended it; Gloo does that" in found.sentence) == (backend == "gloo"), found.sentence


# ---- dumps made by hand: times decide here, and real ranks differ in them


def message(op: str, rank: int, peer: int | None, failure: Failure, start: int = 1) -> Event:
    return Event((-1, 0), op, f"{op} of {rank}", op, "failed", start, start + 10, "DistError: x", failure, peer)


def collective(failure: Failure | None = None, start: int = 1) -> Event:
    state, error = ("failed", "DistError: x") if failure else ("completed", "")
    return Event((0, 0), "all_reduce", "all_reduce", "all_reduce", state, start, start + 10, error, failure)


def dies_of(*ranks: int) -> Failure:
    return Failure(DIED, ranks)


def stalls(*ranks: int, stopped: bool = False) -> Failure:
    return Failure(STALLED, ranks, (Ending(STOPPED, 7, "here"),) if stopped else ())


def job(events: dict[int, dict[str, list[Event]]], size: int, **more: Any) -> Dumps:
    """Return dumps of ranks, each with the events of its groups, which have all ranks as members."""
    groups = {
        rank: tuple(GroupCalls(name, tuple(range(size)), tuple(calls)) for name, calls in of_rank.items())
        for rank, of_rank in events.items()
    }
    return Dumps({rank: RankDump(rank, f"rank{rank}.json", calls) for rank, calls in groups.items()}, **more)


def test_the_death_of_a_rank_that_gave_up_first_is_a_consequence() -> None:
    found = find_verdict(
        job(
            {
                0: {"world": [message("recv", 0, 1, dies_of(1), 2)]},
                1: {"world": [message("recv", 1, 2, stalls(2))]},
                2: {"world": []},
            },
            3,
        )
    )
    assert (found.kind, found.ranks) == ("behind", (2,)) and "rank 1 waits for it" in found.sentence


def test_a_rank_whose_process_is_stopped_is_named_as_such() -> None:
    """Once the verdict was that it left no dump. Only the first rank to time out saw the stop."""
    seen = collective(stalls(2, stopped=True))
    quoted = collective(Failure(ABORTED, (1,), error="RankStalledError", text="rank 2 did not arrive"))
    found = find_verdict(job({0: {"world": [quoted]}, 1: {"world": [seen]}}, 3))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert found.sentence.endswith("; rank 2 is stopped.")


def test_a_stopped_rank_is_named_as_such_by_a_program_that_gave_up_its_wait() -> None:
    """Once the verdict was that it left no dump: the call itself goes on, and has no error."""
    running = replace(collective(), state="started")
    dumps = job({rank: {"world": [running]} for rank in (0, 1)}, 3)
    failure = stalls(2, stopped=True)
    gave_up = replace(dumps.ranks[1], error="RankStalledError: not done", failure=failure, cause=failure)
    found = find_verdict(Dumps({0: dumps.ranks[0], 1: gave_up}))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert found.sentence.endswith("; rank 2 is stopped.")


def test_receives_from_any_rank_are_a_deadlock() -> None:
    found = find_verdict(job({rank: {"world": [message("recv", rank, None, stalls())]} for rank in range(3)}, 3))
    assert found.kind == "deadlock" and "recv of 0 for ranks 1 and 2" in found.sentence


def test_a_rank_that_sends_after_the_time_out_is_behind_and_no_part_of_a_deadlock() -> None:
    found = find_verdict(
        job(
            {
                0: {"world": [message("recv", 0, 1, stalls())]},
                1: {"world": [message("send", 1, 0, dies_of(0), 20)]},
            },
            2,
        )
    )
    assert (found.kind, found.ranks) == ("behind", (1,))


def test_a_deadlock_of_two_groups_names_both() -> None:
    stalled = collective(stalls())
    found = find_verdict(job({0: {"a": [stalled], "b": []}, 1: {"a": [], "b": [stalled]}}, 2))
    assert found.kind == "deadlock"
    assert "rank 0 waits in all_reduce of group 'a' for rank 1" in found.sentence
    assert "rank 1 waits in all_reduce of group 'b' for rank 0" in found.sentence


def test_a_rank_whose_dump_cannot_be_read_is_no_evidence() -> None:
    stalled, broken = {"world": [collective(stalls())]}, {"rank1.json": "truncated"}
    found = find_verdict(job({0: stalled, 2: {"world": []}}, 3, skipped=broken))
    assert (found.kind, found.ranks) == ("behind", (2,))
    found = find_verdict(job({0: stalled, 2: stalled}, 3, skipped=broken))
    assert (found.kind, found.ranks) == ("behind", (1,))
    assert "; the dump of rank 1 could not be read; to see where, run 'python -m torchdist_ref.debug " in found.sentence
    died = {"world": [collective(dies_of(2))]}
    assert find_verdict(job({0: died}, 3, skipped=broken)).ranks == (2,)
    assert find_verdict(job({0: {"world": [collective(dies_of())]}}, 3, skipped=broken)).ranks == ()


def test_the_members_of_a_large_group_are_listed_once_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []
    original = JobGroup.absent
    monkeypatch.setattr(JobGroup, "absent", lambda *of: listed.append(1) or original(*of))
    calls = [replace(collective(stalls()), number=(number, 0)) for number in range(50)]
    found = find_verdict(job({0: {"world": calls}}, 300))
    assert len(listed) == 1 and len(found.ranks) == 299 and found.sentence.count("--request PID") == 1
    assert found.sentence.startswith("Ranks 1, 2, 3,") and " and 236 others are behind" in found.sentence


# ---- what the errors of real ranks name


def test_a_dead_rank_of_a_subgroup_has_its_global_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(dies_in_a_subgroup, 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("died", (2,)) and found.sentence.startswith("Rank 2 died: rank 1 failed in ")


def test_a_rank_that_destroyed_the_group_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(leaves, 2, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("behind", (1,)) and found.sentence.endswith("; rank 1 destroyed the group.")


def test_a_rank_whose_program_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(ends, 2, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("behind", (1,))
    # The exit code follows if the kernel knows it by then.
    assert "; rank 1 ended its program without destroying the group" in found.sentence


def test_a_rank_whose_program_ended_has_not_aborted() -> None:
    """Once the verdict depended on which rank saw it: "Rank 2 aborted: its program ended without destroying …"."""
    quoted = collective(Failure(PROGRAM_ENDED, (2,), (Ending(EXITED, 7, "here", 3),)))
    found = find_verdict(job({0: {"world": [quoted]}, 1: {"world": [quoted]}}, 3))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert found.sentence.endswith(
        "; rank 2 ended its program without destroying the group (pid 7 on here exited with code 3)."
    )


def test_the_line_of_an_earlier_failed_call_is_not_made_up() -> None:
    """Once it was the line that the rank executed when it was asked for a dump."""
    failed = {
        rank: replace(collective(), state="failed", error="MismatchError: no", compared=str(rank // 2))
        for rank in range(3)
    }
    frames = (("step", "/home/me/train.py", 4),)
    later = replace(collective(start=2), number=(1, 0), state="started")
    calls = {0: (failed[0],), 1: (failed[1], later), 2: (failed[2],)}
    errors = {2: "ValueError: step 1 failed"}
    found = find_verdict(
        Dumps(
            {
                rank: RankDump(
                    rank, "", (GroupCalls("world", (0, 1, 2), events),), error=errors.get(rank, ""), program=frames
                )
                for rank, events in calls.items()
            }
        )
    )
    assert (found.kind, found.ranks) == ("mismatch", (2,))
    assert found.sentence.endswith(": ranks 0 and 1 made all_reduce, rank 2 made all_reduce at train.py:4 in step.")


def test_a_rank_that_raised_and_left_no_dump_is_named_with_its_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(raises_without_a_dump, 2, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("raised", (1,))
    assert found.sentence == (
        "Rank 1 aborted, and rank 0 failed in barrier() of group 'world' at "
        f"{line_of(raises_without_a_dump, '# where it fails')}: its program ended with KeyError: 'my bug'."
    )


def test_a_rank_that_is_missing_in_a_call_that_is_not_recorded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(fails_outside, 2, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("failed", (1,))
    where = line_of(fails_outside, "dump_failure(")
    assert found.sentence.startswith(f"Rank 0 failed at {where}: RankStalledError: get: rank 1 set")


# ---- calls that meet in the store

IN_STORE: dict[str, tuple[str, Callable[[], object]]] = {
    "monitored_barrier": ("monitored_barrier()", lambda: dist.monitored_barrier(timeout=SOON)),
    "new_group": ("new_group(ranks=[0, 1, 2])", lambda: dist.new_group(timeout=SOON)),
    "new_group of members": (
        "new_group(ranks=[0, 1, 2])",
        lambda: dist.new_group([2, 1, 0], use_local_synchronization=True, timeout=SOON),
    ),
    "split_group": (
        "split_group(split_ranks=[[0, 1, 2]])",
        lambda: dist.split_group(split_ranks=[[2, 0, 1]], timeout=SOON),
    ),
}


# Each costs its time-out, two seconds: CI has two.
@pytest.mark.parametrize(
    "name",
    [
        "monitored_barrier",
        "new_group of members",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("new_group", "split_group")),
    ],
)
def test_a_rank_that_is_missing_in_a_call_through_the_store_is_named_with_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, call = IN_STORE[name]
    folder = tmp_path / "dumps"
    program = partial(waits_in_the_store, call, folder, os.pipe(), tmp_path / "pid")
    found = verdict_on(program, 3, folder, monkeypatch)
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), (1, 0))
    start, _, end = found.sentence.partition(" at test_verdict.py:")
    assert start == f"Rank 1 is behind: ranks 0 and 2 wait for it in {text}"
    op, where = text.partition("(")[0], line_of(blocked_in_the_system, "# where it hangs")
    assert end.endswith(f"; rank 1 has called {op} only once; it is at {where}.")


def test_a_rank_that_waits_in_another_call_than_the_store_is_part_of_a_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Diagnose
) -> None:
    found = recorded(partial(waits_for_an_excluded_rank, tmp_path), 3, tmp_path, monkeypatch)
    assert (found.kind, found.ranks) == ("deadlock", (0, 2))
    assert "rank 0 waits in shrink_group(ranks_to_exclude=[1]) at failing_programs.py:" in found.sentence
    assert "rank 2 waits in recv(src=0, tag=0) of float32 [3] at failing_programs.py:" in found.sentence


def in_store(rank: int, awaited: tuple[int, ...], state: str, number: int = 0, text: str = "new_group(…)") -> Event:
    return Event((number, 0), "new_group", text, text, state, 100 + rank, awaited=awaited)


def test_a_rank_outside_the_new_group_is_not_waited_for() -> None:
    events = {rank: {"new_group": [in_store(rank, (0, 1, 2), "started")]} for rank in (0, 1)}
    assert find_verdict(job({**events, 2: {"new_group": []}, 3: {"new_group": []}}, 4)).ranks == (2,)
    alone = {0: {"new_group": [in_store(0, (), "started")]}, 1: {"new_group": []}}
    assert find_verdict(job(alone, 2)).kind == "nothing"


def test_the_call_that_a_missing_rank_is_in_is_named() -> None:
    receive = Event((-1, 0), "recv", "recv(src=2)", "recv", "started", 100, peer=2)
    events = {0: {"calls": [in_store(0, (0, 1), "started")]}, 1: {"calls": [], "world": [receive]}, 2: {"calls": []}}
    found = find_verdict(job(events, 3))
    assert (found.kind, found.ranks) == ("behind", (2,)), "rank 1 waits for rank 2"
    early = replace(receive, state="scheduled", peer=0)
    found = find_verdict(job({**events, 1: {"calls": [], "world": [early]}}, 3))
    assert (found.kind, found.ranks) == ("deadlock", (0, 1))


def test_different_arguments_of_a_call_through_the_store_are_a_mismatch() -> None:
    texts = ["new_group(ranks=[0, 1])", "new_group(ranks=[0, 1])", "new_group(ranks=[0, 2])"]
    events = {rank: {"calls": [in_store(rank, (0, 1), "started", text=text)]} for rank, text in enumerate(texts)}
    found = find_verdict(job(events, 3))
    assert (found.kind, found.ranks) == ("mismatch", (2,)) and "new_group(ranks=[0, 2])" in found.sentence


def test_groups_of_one_description_are_two_groups(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        first, second = (dist.new_group(group_desc="pair") for _ in range(2))
        dist.barrier(first)
        dist.all_reduce(fill(rank, (1,)), group=second)
        flight_recorder.dump(tmp_path)

    run(program, 2, ranks="processes")
    for dump in read_directory(tmp_path).ranks.values():
        calls = {group.name: [event.op for event in group.events] for group in dump.groups if not group.is_in_store}
        assert calls == {"world": [], "pair (group/1)": ["barrier"], "pair (group/2)": ["all_reduce"]}
