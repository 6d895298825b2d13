"""Verdicts on logs: recorded outputs of `torchrun` and of our launcher, NCCL's reports, and logs that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchdist_ref.debug import __main__ as command
from torchdist_ref.debug.job_log import MAX_FOUND, find_verdict_in_log, merged, read_log

LOGS = Path(__file__).parent / "logs"
"""Outputs of `logged_job.py`, in which rank 1 fails."""

VERDICTS = {
    "torchrun_raise": ("raised", "Rank 1 raised at logged_job.py:32 in step: ValueError: bad batch 7."),
    "ours_raise": ("raised", "Rank 1 raised at logged_job.py:32 in step: ValueError: bad batch 7."),
    "torchrun_kill": ("died", "Rank 1 died: SIGKILL killed it."),
    "ours_kill": ("died", "Rank 1 died: SIGKILL killed it."),
    "torchrun_late": ("behind", "Rank 1 is behind: ranks 0 and 2 waited at logged_job.py:39 in step,"),
    "ours_late": ("behind", "Rank 1 is behind: others wait for it at logged_job.py:39 in step: RankStalledError: "),
    "torchrun_mismatch": (
        "mismatch",
        "Ranks waited at different lines, in calls that do not match: ranks 0 and 2 waited at logged_job.py:39 in "
        "step, rank 1 waited at logged_job.py:38 in step.",
    ),
    "torchrun_detail": (
        "mismatch",
        "Rank 1 made another call than the others: ranks 0 and 2 made ALLREDUCE, Shape=[4], Dtypes=Float at "
        "logged_job.py:39 in step, rank 1 made BROADCAST, Shape=[3], Dtypes=Float at logged_job.py:38 in step.",
    ),
    "ours_mismatch": ("mismatch", "Rank 1 made another call than the others: rank 0 made all_reduce(reduction=sum)"),
    "torchrun_barrier": ("behind", "Rank 1 is behind: others wait for it at logged_job.py:30 in step: RuntimeError:"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_rank_that_failed_is_named(name: str) -> None:
    found = find_verdict_in_log(read_log((LOGS / f"{name}.log").read_text()))
    kind, sentence = VERDICTS[name]
    assert (found.kind, found.ranks) == (kind, (1,))
    assert found.sentence.startswith(sentence)


def test_every_recorded_log_is_tested() -> None:
    assert {path.stem for path in LOGS.iterdir()} == set(VERDICTS)


def test_errors_have_their_line_their_rank_and_their_entry() -> None:
    text = (LOGS / "ours_late.log").read_text()
    errors = read_log(text).errors
    lines = text.splitlines()
    assert {error.rank for error in errors} == {0, 1, 2}
    assert all(error.text.partition(":")[0] in lines[error.line - 1] for error in errors)
    assert {error.entry for error in errors} == {"rank-left", "rank-did-not-arrive"}


# ---- NCCL


def timed_out(rank: int, number: int = 7, op: str = "ALLREDUCE", elements: int = 40) -> str:
    """Return the report of NCCL's watchdog on a call of one rank."""
    return (
        f"[rank{rank}]:[E1 00:00:00.1 ProcessGroupNCCL.cpp:1] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=6000) "
        "ran for 6003 milliseconds before timing out."
    )


def status(rank: int, enqueued: int, words: str = "last enqueued work") -> str:
    return (
        f"[rank{rank}]:[E1 00:00:00.2 ProcessGroupNCCL.cpp:2] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure "
        f"detected by watchdog at work sequence id: 7 PG status: {words}: {enqueued}, last completed work: 6"
    )


NCCL = {
    "a rank that reports nothing": (
        [*map(timed_out, (0, 1, 3)), "[rank2]: step 6"], "behind", (2,), "Rank 2 is behind: ranks 0, 1 and 3 wait in "
        "call 7, ALLREDUCE of 40 elements, ",
    ),
    "a rank that has not enqueued the call": (
        [timed_out(0), timed_out(1), status(0, 7), status(1, 8), status(2, 6)], "behind", (2,), "Rank 2 is behind: ",
    ),
    "older words": (
        [timed_out(0), timed_out(1), status(2, 6, "last enqueued NCCL work")], "behind", (2,), "Rank 2 is behind: ",
    ),
    "a rank in another call": (
        [timed_out(0), timed_out(1), timed_out(2, op="BROADCAST")], "mismatch", (2,), "Rank 2 made another call: ranks "
        "0 and 1 timed out in call 7, ALLREDUCE of 40 elements, rank 2 timed out in call 7, BROADCAST of 40 elements.",
    ),
    "a rank with another size": (
        [timed_out(0), timed_out(1, elements=39), timed_out(2)], "mismatch", (1,), "Rank 1 made another call: ",
    ),
    "a rank in an earlier call": (
        [timed_out(0, 9), timed_out(1, 7), timed_out(2, 9)], "behind", (1,), "Rank 1 did not make the later calls: ",
    ),
    "all ranks in one call": (
        [timed_out(0), timed_out(1)], "pending", (0, 1), "Ranks 0 and 1 timed out in call 7, ALLREDUCE of 40 ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NCCL)
def test_reports_of_nccls_watchdog_are_compared(name: str) -> None:
    lines, kind, ranks, sentence = NCCL[name]
    found = find_verdict_in_log(read_log("\n".join(lines)))
    assert (found.kind, found.ranks) == (kind, ranks)
    assert found.sentence.startswith(sentence)


# ---- other logs


def test_a_warning_of_a_rank_that_waits_names_the_other() -> None:
    text = "WARNING torchdist_ref [rank 0] barrier() of group 'world' has waited 60 s for ranks 1 and 4, which"
    found = find_verdict_in_log(read_log(text))
    assert (found.kind, found.ranks) == ("behind", (1, 4))


def test_an_interrupted_job_shows_where_its_ranks_were() -> None:
    lines = []
    for rank, line in ((0, 12), (1, 12), (2, 30)):
        lines += [
            f"[rank{rank}]: Traceback (most recent call last):",
            f'[rank{rank}]:   File "/home/me/train.py", line {line}, in step',
            f"[rank{rank}]: KeyboardInterrupt",
        ]
    found = find_verdict_in_log(read_log("\n".join(lines)))
    assert (found.kind, found.ranks) == ("mismatch", (2,)) and "rank 2 waited at train.py:30 in step" in found.sentence


def test_consequences_alone_are_said_to_be_consequences() -> None:
    lines = [
        "[rank0]: Traceback (most recent call last):",
        "[rank0]: RuntimeError: Connection closed by peer",
        "[rank3]: x",
    ]
    found = find_verdict_in_log(read_log("\n".join(lines)))
    assert (found.kind, found.ranks) == ("failed", (3,)) and found.sentence.startswith("Rank 3 printed no error, but")


def test_logs_of_the_ranks_are_read_together() -> None:
    parts = [read_log(timed_out(rank)) for rank in (0, 1)]
    assert find_verdict_in_log(merged([*parts, read_log(timed_out(2, 6))])).ranks == (2,)


NO_LOGS = {
    "nothing": "",
    "prose": "The quick brown fox: it jumps.\nError: no traceback before it",
    "one long line": "[rank0]: " + "Traceback (most recent call last): " * 100_000,
    "brackets": "[" * 100_000,
    "ranks": "\n".join(f"[rank{rank}]: Traceback (most recent call last):" for rank in range(3 * MAX_FOUND)),
    "control characters": "\x00\x1b[31m\x07" * 1000,
    "numbers": "[rank99999999999999999999]: x\n  exitcode  : 99999999999999999\n  rank      : 1 (local_rank: 2)",
}  # fmt: skip


@pytest.mark.parametrize("name", NO_LOGS)
def test_text_that_is_no_log_has_no_verdict(name: str) -> None:
    assert find_verdict_in_log(read_log(NO_LOGS[name])).kind == "nothing"


def test_many_errors_are_bounded() -> None:
    lines = ["Traceback (most recent call last):", "ValueError: x"] * (MAX_FOUND + 5)
    assert len(read_log("\n".join(lines)).errors) == MAX_FOUND


def test_the_command_explains_a_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main([str(LOGS / "torchrun_raise.log")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == VERDICTS["torchrun_raise"][1]
    assert "line 10, rank 1: ValueError: bad batch 7. (logged_job.py:32 in step)" in shown
    (tmp_path / "empty.log").touch()
    assert command.main([str(tmp_path / "empty.log")]) == 1
