"""Ranks of a notebook: order of output, failures by rank, interrupts, and no rank left when the notebook ends.

One rank server, with torch loaded, serves most tests; it forks ranks in a few milliseconds. Cells that wait never
end by themselves: the end of the test shows that they were interrupted.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest
import torch

from tests.process_ends import all_ended
from torchdist_ref.errors import ArgumentError, DistError
from torchdist_ref.notebook import (
    Bar,
    CellError,
    CellInterrupted,
    Drawing,
    PoolError,
    RankPool,
    RankServer,
    timelines,
)
from torchdist_ref.notebook.magic import SpmdMagics, SpmdUsageError
from torchdist_ref.simulation import RankError, one_run
from torchdist_ref.testing import fill
from torchdist_ref.timeouts import Clock

ROOT = Path(__file__).parent.parent
BEGIN = "import os, signal, sys\nrank = int(os.environ['RANK'])"
WAIT = "while True: signal.pause()"
AWAIT_USER = "signal.sigwait({signal.SIGUSR1})"
Shown = list[tuple[int, Any]]
LONG_SECONDS = 600.0


class UserClock(Clock):
    """Clock that tests move on, or slow down."""

    def __init__(self) -> None:
        self.skipped, self.rate = 0.0, 1.0

    def now(self) -> float:
        return super().now() * self.rate + self.skipped


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    process = psutil.Process(server.pid)
    server.close()
    assert not process.is_running()


@pytest.fixture
def clock() -> UserClock:
    return UserClock()


@pytest.fixture
def pool(server: RankServer, clock: UserClock) -> Iterator[RankPool]:
    with RankPool(3, server, clock) as pool:
        pool.run(BEGIN)
        yield pool
    assert psutil.Process(server.pid).children() == []


def shown(pool: RankPool, source: str, **options: Any) -> Shown:
    """Return the output of the ranks in the order of display, values as plain text."""
    items: Shown = []
    pool.run(source, show=lambda rank, item: items.append((rank, item)), **options)
    return [(rank, item if isinstance(item, str) else item["text/plain"]) for rank, item in items]


def marked_wait(folder: Path) -> str:
    """A line of a cell that waits, and leaves a file of its rank's number in a folder."""
    return f"while True: os.close(os.open(f'{folder}/{{rank}}', os.O_CREAT)) or signal.pause()"


def have_marked(folder: Path, ranks: set[int]) -> bool:
    return {int(path.name) for path in folder.iterdir()} >= ranks


def once_others_have_answered(clock: UserClock, late: set[int], folder: Path, skips: int = 1) -> dict[str, Any]:
    """Return options of a request whose time is over once these ranks wait, and the others have answered."""

    reports = itertools.count()
    # The request sees that its time is over after the next report.
    due = [2 * skip for skip in range(skips)]

    def progress(activities: dict[int, str]) -> None:
        waiting = {rank for rank, text in activities.items() if not text.startswith("done")}
        if waiting == late and have_marked(folder, late) and next(reports) in due:
            clock.skipped += LONG_SECONDS

    return {"timeout": LONG_SECONDS, "progress": progress, "interval": 0.02}


def failing(pool: RankPool, source: str, **options: Any) -> tuple[CellError, Shown]:
    items: Shown = []
    with pytest.raises(CellError) as caught:
        pool.run(source, show=lambda rank, item: items.append((rank, item)), **options)
    return caught.value, items


class TestCells:
    def test_output_in_rank_order(self, pool: RankPool) -> None:
        source = "print('python', rank)\nos.system(f'echo child {rank}')\nprint('error', rank, file=sys.stderr)\n"
        assert shown(pool, source + "rank**2") == [
            (rank, text)
            for rank in range(3)
            for text in (f"python {rank}", f"child {rank}", f"error {rank}", str(rank**2))
        ]

    def test_output_of_the_first_unfinished_rank_is_live(self, pool: RankPool) -> None:
        received: Shown = []

        def listen(rank: int, item: Any) -> None:
            received.append((rank, item))
            if item == "waiting":
                # Rank 0 continues only after its output has been received.
                os.kill(pool.pids[0], signal.SIGUSR1)

        pool.run("print('early') if rank else signal.pthread_sigmask(0, [signal.SIGUSR1]);", show=listen)
        source = f"if rank == 0:\n  print('waiting')\n  {AWAIT_USER}\nprint('done')"
        pool.run(source, show=listen)
        assert received == [(1, "early"), (2, "early"), (0, "waiting"), (0, "done"), (1, "done"), (2, "done")]

    def test_variables_persist_from_cell_to_cell(self, pool: RankPool) -> None:
        pool.run("def square():\n    return rank**2 + offset\noffset = 10 * rank")
        assert shown(pool, "square()") == [(0, "0"), (1, "11"), (2, "24")]

    @pytest.mark.parametrize(
        ("source", "value"),
        [
            ("1 + 1", "2"),
            ("1 + 1;", None),
            ("a = 1", None),
            ("None", None),
            ("", None),
            ("# only this", None),
            ("'é'; 3 # end", "3"),
            ("if True:\n  5", None),
            ("_spam = 2\n_spam  ; # quiet", None),
        ],
    )
    def test_display_of_the_last_lines_value(self, pool: RankPool, source: str, value: str | None) -> None:
        assert shown(pool, source) == [(rank, value) for rank in range(3) if value is not None]

    def test_much_output_and_unfinished_lines(self, pool: RankPool) -> None:
        [*_, (rank, text)] = shown(pool, "print('x' * 300_000, end='' if rank == 2 else None)")
        assert (rank, text) == (2, "x" * 300_000)

    def test_last_state_of_a_progress_bar(self, pool: RankPool) -> None:
        assert shown(pool, "if rank == 0: print('10 %\\r50 %\\r100 %')") == [(0, "100 %")]

    def test_classes_of_a_cell_can_be_pickled(self, pool: RankPool) -> None:
        pool.run("import pickle\nclass Point:\n    x = rank")
        assert shown(pool, "pickle.loads(pickle.dumps(Point())).x") == [(0, "0"), (1, "1"), (2, "2")]

    def test_collectives_between_the_ranks(self, pool: RankPool) -> None:
        pool.run("import torchdist_ref as dist\nfrom torchdist_ref.testing import fill\ndist.init_process_group('ref')")
        pool.run("tensor = fill(rank, (4,)); dist.all_reduce(tensor)")
        total = fill(0, (4,)) + fill(1, (4,)) + fill(2, (4,))
        assert all(torch.equal(pool.pull("tensor", rank), total) for rank in range(3))
        # Once more: the store outlives the group.
        pool.run("dist.destroy_process_group(); dist.init_process_group('gloo'); dist.all_reduce(tensor)")
        assert torch.equal(pool.pull("tensor", 1), total * 3)
        pool.run("dist.destroy_process_group()")

    def test_environment_is_the_launchers(self, pool: RankPool) -> None:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
        pool.push("names", names)
        for rank in range(3):
            values = [str(rank), str(rank), "3", "3", "127.0.0.1"]
            assert pool.pull("[os.environ[name] for name in names]", rank) == values

    def test_cuda_is_not_initialized(self, pool: RankPool) -> None:
        assert shown(pool, "'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized()") == [
            (rank, "False") for rank in range(3)
        ]

    def test_numpy_random_numbers_differ_between_ranks(self, pool: RankPool) -> None:
        pool.run("import numpy; drawn = numpy.random.rand()")
        assert len({pool.pull("drawn", rank) for rank in range(3)}) == 3


class TestProgress:
    """What every rank is doing is seen while a cell runs. The reports themselves let the ranks go on."""

    def test_bars_of_all_ranks_are_seen_as_they_move(self, pool: RankPool) -> None:
        pool.run("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]);")
        source = (
            "print('epoch 1')\n"
            f"for percent in (10, 10 * rank + 50):\n  print(f'\\r{{percent}} %', end='', flush=True)\n  {AWAIT_USER}\n"
        )
        awaited = [["10 %"] * 3, ["50 %", "60 %", "70 %"]]

        def progress(activities: dict[int, str]) -> None:
            reports.append(activities)
            ends = [activity.rpartition(": ")[2] for activity in activities.values()]
            if awaited and ends == awaited[0]:
                del awaited[0]
                for pid in pool.pids:
                    os.kill(pid, signal.SIGUSR1)

        reports: list[dict[int, str]] = []
        items: Shown = []
        pool.run(source, show=lambda rank, item: items.append((rank, item)), progress=progress, interval=0.01)
        assert not awaited and reports[-1] == {}
        assert items == [(rank, text) for rank in range(3) for text in ("epoch 1", f"{10 * rank + 50} %")]

    def test_a_rank_that_waits_is_said_to_wait_and_where(self, pool: RankPool) -> None:
        # Blocked before the group starts threads, which inherit that.
        pool.run("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nimport torch, torchdist_ref as dist")
        pool.run("dist.init_process_group('ref')")
        source = (
            f"x = torch.tensor([rank + 1])\nif rank == 1:\n  {AWAIT_USER}\ndist.all_reduce(x)\nprint('sum', x.item())"
        )
        waits = r"line 4, waits for \d+ s in all_reduce of group 'world'"

        def progress(activities: dict[int, str]) -> None:
            reports.append(activities)
            if activities and re.fullmatch(waits, activities[0]) and re.fullmatch(waits, activities[2]):
                os.kill(pool.pids[1], signal.SIGUSR1)

        reports: list[dict[int, str]] = []
        items: Shown = []
        pool.run(source, show=lambda rank, item: items.append((rank, item)), progress=progress, interval=0.01)
        assert items == [(rank, "sum 6") for rank in range(3)]
        # Rank 1 is in a function of C, which no signal's handler interrupts: it cannot say where it is.
        # A report has the position of the one before and the newest output, so it may show both "line 3" and "sum 6".
        positions = {report[1].removesuffix(": sum 6") for report in reports if report}
        assert positions <= {"running", "line 1", "line 3", "line 4", "line 5"}
        pool.run("dist.destroy_process_group()")

    def test_requests_do_not_reach_forked_children_or_a_rank_between_cells(self, pool: RankPool) -> None:
        for pid in pool.pids:
            os.kill(pid, signal.SIGURG)
        source = (
            "child = os.fork()\nif not child:\n"
            "  os.kill(os.getpid(), signal.SIGURG)\n  os._exit(rank + 3)\n"
            "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
        )
        assert shown(pool, source) == [(rank, str(rank + 3)) for rank in range(3)]

    def test_an_error_of_the_report_is_raised_once_all_ranks_have_answered(self, pool: RankPool) -> None:
        pool.run("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]);")

        def progress(activities: dict[int, str]) -> None:
            for pid in pool.pids:
                os.kill(pid, signal.SIGUSR1)
            raise ValueError("cannot be published")

        with pytest.raises(ValueError, match="cannot be published"):
            pool.run(AWAIT_USER, progress=progress, interval=0.01)
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]


class TestDisplay:
    def test_representations_of_a_value(self, pool: RankPool) -> None:
        pool.run(
            "class Picture:\n  _repr_svg_ = lambda s: '<svg/>'\n  _repr_png_ = lambda s: b'png'\n"
            "  __repr__ = lambda s: 'a picture'\n  _repr_html_ = lambda s: None"
        )
        items: Shown = []
        pool.run("Picture() if rank == 1 else None", show=lambda rank, item: items.append((rank, item)))
        png = base64.b64encode(b"png").decode()
        assert items == [(1, {"text/plain": "a picture", "image/svg+xml": "<svg/>", "image/png": png})]

    def test_repr_mimebundle(self, pool: RankPool) -> None:
        items: Shown = []
        source = "class Own:\n  def _repr_mimebundle_(s, include, exclude): return {'text/x': 'y'}, {}\nOwn()"
        pool.run(source, show=lambda rank, item: items.append(item))
        assert [item["text/x"] for item in items] == ["y"] * 3

    def test_order_of_display_and_print(self, pool: RankPool) -> None:
        assert shown(pool, "if rank == 0:\n  print('a', end='')\n  display([1], 'b')\n  print('c')") == [
            (0, "a"),
            (0, "[1]"),
            (0, "'b'"),
            (0, "c"),
        ]

    def test_figures_are_displayed_closed_and_reproducible(self, pool: RankPool) -> None:
        # Slow, a second or two: one rank imports matplotlib.
        pool.run("if rank == 0:\n  from matplotlib import pyplot as plt")
        items: list[Any] = []
        for ending in ("", "; plt.show(); print('after')"):
            pool.run(f"if rank == 0: plt.plot([1, 4, 9]){ending}", show=lambda rank, item: items.append(item))
        first, second, after = items
        assert first["image/svg+xml"] == second["image/svg+xml"] and "<svg" in first["image/svg+xml"]
        assert after == "after"
        assert pool.pull("plt.get_fignums()") == []


class TestFailures:
    def test_failure_of_one_rank(self, pool: RankPool) -> None:
        source = "def divide():\n    return 1 / (rank - 1)\nprint('before')\ndivide()\nprint('after')"
        error, items = failing(pool, source)
        assert str(error) == "rank 1 failed with ZeroDivisionError: division by zero"
        assert items == [(0, "before"), (0, "after"), (1, "before"), (2, "before"), (2, "after")]
        assert error.report.failures.keys() == {1} and error.report.values.keys() == {0, 2}
        [text] = error._render_traceback_()
        # Python 3.13 also marks the calls, in lines of carets.
        lines = [line for line in text.splitlines() if line.removeprefix("[rank 1]").strip(" ~^")]
        assert lines[:5] == [
            "[rank 1] Traceback (most recent call last):",
            '[rank 1]   File "<spmd cell 2>", line 4, in <module>',
            "[rank 1]     divide()",
            '[rank 1]   File "<spmd cell 2>", line 2, in divide',
            "[rank 1]     return 1 / (rank - 1)",
        ]
        assert text.endswith(
            "\nCellError: rank 1 failed with ZeroDivisionError: division by zero\nSee: function-raised"
        )
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]

    def test_equal_failures_share_a_traceback(self, pool: RankPool) -> None:
        error, _ = failing(pool, "1 +")
        assert str(error).startswith("ranks 0, 1, 2 failed with SyntaxError: invalid syntax")
        [text] = error._render_traceback_()
        assert text.splitlines()[0] == '[ranks 0, 1, 2]   File "<spmd cell 2>", line 1'

    def test_traceback_of_causes_omits_library_frames(self, pool: RankPool) -> None:
        error, _ = failing(pool, "try:\n  {}['key']\nexcept KeyError as lost:\n  raise ValueError('no') from lost")
        trace = error.report.failures[0].trace
        assert "KeyError: 'key'" in trace and "ValueError: no" in trace
        assert "torchdist_ref" not in trace

    def test_traceback_keeps_the_last_library_frame(self, pool: RankPool) -> None:
        error, _ = failing(pool, "import torchdist_ref as dist\nimport torch\ndist.all_reduce(torch.ones(1))")
        assert str(error).startswith("ranks 0, 1, 2 failed with NotInitializedError: ")
        lines = error.report.failures[0].trace.splitlines()
        files = [line.split('"')[1] for line in lines if line.startswith("  File")]
        assert files[0].startswith("<spmd cell") and len(files) == 2 and "torchdist_ref" in files[1]

    @pytest.mark.parametrize("source", ["sys.exit(3)", "raise KeyboardInterrupt", "exit(3)"])
    def test_a_cell_cannot_end_its_rank(self, pool: RankPool, source: str) -> None:
        failing(pool, source)
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]

    def test_grace_time_of_the_others_after_a_failure(self, pool: RankPool, tmp_path: Path) -> None:
        pool.run("import time")
        source = (
            f"if rank == 1:\n  while len(os.listdir('{tmp_path}')) < 2: time.sleep(0.001)\n"
            f"  raise ValueError('boom')\n{marked_wait(tmp_path)}"
        )
        error, _ = failing(pool, source, grace=0.1)
        assert str(error).splitlines() == [
            "rank 1 failed with ValueError: boom",
            "ranks 0, 2 did not answer within 0.1 s after rank 1 had ended: interrupted",
        ]
        assert f"[ranks 0, 2]     {marked_wait(tmp_path)}\n" in error.report.traces()
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]

    def test_timeout_interrupts_and_names_unfinished_ranks(
        self, pool: RankPool, clock: UserClock, tmp_path: Path
    ) -> None:
        options = once_others_have_answered(clock, {0, 2}, tmp_path)
        error, items = failing(pool, f"print('begun')\nif rank != 1:\n  {marked_wait(tmp_path)}", **options)
        assert str(error) == "ranks 0, 2 did not answer within 600 s: interrupted"
        assert error.report.late == {0, 2} and error.report.silent == set()
        assert items == [(0, "begun"), (1, "begun"), (2, "begun")]
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]

    def test_ranks_that_ignore_an_interrupt(self, pool: RankPool, clock: UserClock, tmp_path: Path) -> None:
        options = once_others_have_answered(clock, {2}, tmp_path, skips=2)
        source = f"if rank == 2:\n  signal.signal(signal.SIGINT, signal.SIG_IGN)\n  {marked_wait(tmp_path)}"
        error, _ = failing(pool, source, **options)
        assert str(error).startswith("rank 2 did not answer the interrupt. Stop the ranks (%spmd_stop), which kills")
        with pytest.raises(PoolError, match="rank 2 did not answer an earlier request: restart them"):
            pool.run("rank")

    def test_death_of_a_rank(self, server: RankServer, pool: RankPool) -> None:
        error, items = failing(pool, "print('last line')\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert str(error).startswith("rank 1 was killed by SIGKILL. Its variables are lost: stop the ranks (%spmd_stop")
        assert items == [(rank, "last line") for rank in range(3)]
        assert error._render_traceback_()[0].endswith("\nSee: rank-died")
        with pytest.raises(PoolError, match=r"rank 1 was killed by SIGKILL: restart them \(%spmd_stop, then"):
            pool.pull("rank", 0)
        pool.close()
        with RankPool(2, server) as restarted:
            assert shown(restarted, "5") == [(0, "5"), (1, "5")]

    def test_death_of_a_rank_between_cells(self, pool: RankPool) -> None:
        os.kill(pool.pids[0], signal.SIGTERM)
        assert all_ended(pool.pids[:1])
        error, items = failing(pool, "rank")
        assert "rank 0 was killed by SIGTERM" in str(error)
        assert [rank for rank, _ in items] == [1, 2]

    def test_ranks_die_with_their_server(self) -> None:
        # Spawned ranks, so that this server need not load torch.
        server = RankServer("spawn")
        with RankPool(2, server) as pool:
            pids = pool.pids
            os.kill(server.pid, signal.SIGKILL)
            error, _ = failing(pool, "import signal\n" + WAIT)
            assert "rank 0 was killed by SIGKILL" in str(error) and "rank 1 was killed by SIGKILL" in str(error)
            assert all_ended(pids)
        assert not server.alive
        server.close()


class TestInterrupt:
    def test_interrupt_reaches_every_rank(self, pool: RankPool, clock: UserClock) -> None:
        # Each line that is shown interrupts: those that come later must not give the ranks up.
        clock.rate = 1 / 60
        items: Shown = []

        def listen(rank: int, item: Any) -> None:
            items.append((rank, item))
            os.kill(os.getpid(), signal.SIGINT)

        pool.run("x = rank")
        with pytest.raises(CellInterrupted, match=r"^interrupted by you: ranks 0, 1, 2$") as caught:
            pool.run(f"print('waiting')\n{WAIT}", show=listen)
        assert isinstance(caught.value, KeyboardInterrupt)
        # Where each of them was is chance: waiting, still printing, or not begun.
        failures = caught.value.report.failures
        assert {r: failure.kind for r, failure in failures.items()} == dict.fromkeys(range(3), "KeyboardInterrupt")
        assert "] KeyboardInterrupt\n" in caught.value.report.traces()
        assert shown(pool, "x") == [(0, "0"), (1, "1"), (2, "2")]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_a_cell_handles_the_interrupt(self, server: RankServer) -> None:
        source = f"import signal\ntry:\n  print('waiting')\n  {WAIT}\nexcept KeyboardInterrupt:\n  x = 5"
        with RankPool(1, server) as pool:
            with pytest.raises(CellInterrupted, match=r"^interrupted by you: no rank was still running$"):
                pool.run(source, show=lambda rank, item: os.kill(os.getpid(), signal.SIGINT))
            assert shown(pool, "x") == [(0, "5")]

    def test_interrupt_of_idle_ranks(self, pool: RankPool) -> None:
        for pid in pool.pids:
            os.kill(pid, signal.SIGINT)
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]

    def test_interrupt_during_much_output(self, pool: RankPool, clock: UserClock) -> None:
        clock.rate = 1 / 60

        def listen(rank: int, item: Any) -> None:
            if item in ("100", "101", "102") and rank == 0:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(CellInterrupted):
            pool.run("import itertools\nfor i in itertools.count():\n  print(i); display(i)", show=listen)
        assert shown(pool, "rank") == [(0, "0"), (1, "1"), (2, "2")]


class TestVariables:
    def test_pull(self, pool: RankPool) -> None:
        pool.run("import torch; value = {'rank': rank, 'tensor': torch.arange(3) * rank}")
        value = pool.pull("value", 2)
        assert value["rank"] == 2 and value["tensor"].tolist() == [0, 2, 4]

    def test_push(self, pool: RankPool) -> None:
        pool.push("sent", {"tensor": fill(1, (3,)), "text": "x" * 2_000_000})
        assert [pool.pull("sent['tensor'].tolist(), len(sent['text'])", rank) for rank in range(3)] == [
            (fill(1, (3,)).tolist(), 2_000_000)
        ] * 3

    def test_values_that_cannot_be_pulled_or_pushed(self, pool: RankPool) -> None:
        with pytest.raises(CellError, match="rank 0 failed with NameError: name 'nothing' is not defined"):
            pool.pull("nothing")
        with pytest.raises(CellError, match="rank 1 failed with PicklingError"):
            pool.pull("lambda: 1", 1)
        with pytest.raises(ArgumentError, match="pull: argument 'rank' must be a rank from 0 to 2, got 3"):
            pool.pull("rank", 3)
        with pytest.raises(ArgumentError, match="push: argument 'name' must be a variable's name, got 'a b'"):
            pool.push("a b", 1)


class TestStartAndEnd:
    @pytest.mark.parametrize("size", [0, -1, "2", 1.5])
    def test_wrong_world_size(self, server: RankServer, size: Any) -> None:
        with pytest.raises(ArgumentError, match="argument 'world_size' must be a number of ranks, at least 1"):
            RankPool(size, server)

    def test_wrong_start_method(self) -> None:
        with pytest.raises(ArgumentError, match="argument 'method' must be 'fork' or 'spawn', got 'thread'"):
            RankServer("thread")

    def test_server_reports_a_failed_import(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(DistError, match=r"could not load what ranks need:\n(.*\n)*.*no torch today"):
            RankServer()

    def test_closed_pool(self, server: RankServer) -> None:
        pool = RankPool(1, server)
        pids = pool.pids
        pool.close()
        pool.close()
        assert all_ended(pids)
        with pytest.raises(PoolError, match="the ranks have been stopped"):
            pool.run("1")

    def test_close_kills_ranks_and_the_processes_they_started(self, server: RankServer) -> None:
        with RankPool(2, server) as pool:
            pool.run("import subprocess; child = subprocess.Popen(['sleep', '1000'])")
            pids = pool.pids + [pool.pull("child.pid", rank) for rank in range(2)]
        assert all_ended(pids)

    def test_start_method_spawn(self) -> None:
        server = RankServer("spawn")
        with RankPool(2, server) as pool:
            assert shown(pool, BEGIN + "\n'torch' in sys.modules, rank") == [(0, "(False, 0)"), (1, "(False, 1)")]
        server.close()

    # Slow for "fork", a second or two: its server imports torch.
    @pytest.mark.parametrize(
        ("method", "end"),
        [
            ("fork", "os.kill(os.getpid(), 9)"),
            ("spawn", "os.kill(os.getpid(), 9)"),
            ("spawn", "raise SystemExit"),
            ("spawn", "os._exit(0)"),
        ],
    )
    def test_ranks_die_with_their_kernel(self, method: str, end: str) -> None:
        script = (
            "import os\nfrom torchdist_ref.notebook import RankPool, RankServer\n"
            f"server = RankServer({method!r})\npool = RankPool(2, server)\n"
            f"print(server.pid, *pool.pids, flush=True)\n{end}"
        )
        result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
        pids = [int(word) for word in result.stdout.split()]
        assert len(pids) == 3 and all_ended(pids)


class Shell:
    """Part of IPython's shell that the magics use."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics: dict[str, Any] = {}
        self.display_pub: Any = None
        self.kernel: Any = None

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        self.magics[name] = function


@pytest.fixture
def shell(server: RankServer) -> Iterator[Shell]:
    shell = Shell()
    magics = SpmdMagics(shell, server)
    yield shell
    magics.stop()


class Displays(list[dict[str, Any]]):
    """Record of what a notebook's shell publishes."""

    def publish(self, **display: Any) -> None:
        self.append(display)


class TestMagics:
    def test_one_output_shows_the_progress_of_all_ranks(
        self, shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        displays = Displays()
        shell.display_pub, shell.kernel = displays, object()
        shell.magics["spmd"]("-n 2", BEGIN + "\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]);")
        shell.magics["spmd_get"]("os.getpid() --to pid --rank 1".replace("os.getpid()", "'os.getpid()'"))
        publish = displays.publish

        def release(**display: Any) -> None:
            publish(**display)
            os.kill(shell.user_ns["pid"], signal.SIGUSR1)

        monkeypatch.setattr(displays, "publish", release)
        # Slow, one second: the time after which a cell counts as long.
        shell.magics["spmd"]("", f"print('started', rank, flush=True)\nif rank: {AWAIT_USER}")
        assert capsys.readouterr().out.splitlines()[-2:] == ["[rank 0] started 0", "[rank 1] started 1"]
        first, *_, last = displays
        assert first["data"]["text/plain"].splitlines()[0] == "[rank 0] done: started 0"
        assert first["data"]["text/plain"].splitlines()[1] == "[rank 1] running: started 1"
        assert last["data"] == {"text/plain": ""} and [each["update"] for each in displays] == [False] + [True] * (
            len(displays) - 1
        )
        assert len({each["transient"]["display_id"] for each in displays}) == 1

    def test_prefix_of_each_line(self, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
        shell.magics["spmd"]("-n 2", BEGIN + "\nprint('a\\n\\nb'); rank")
        lines = [f"[rank {rank}]{text}" for rank in (0, 1) for text in (" a", "", " b", f" {rank}")]
        assert capsys.readouterr().out.splitlines() == lines
        shell.magics["spmd"]("--ranks 1", "print(rank)")
        assert capsys.readouterr().out == "[rank 1] 1\n"

    def test_a_cell_on_simulated_ranks_is_shown_in_rank_order_and_drawn(
        self, shell: Shell, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shell.display_pub = displays = Displays()
        shell.user_ns["offset"] = 100
        cell = (
            "import time, torch, torchdist_ref as dist\nrank = dist.get_rank()\nprint('begins\\nat', end=' ')\n"
            "print(time.monotonic())\ndist.all_reduce(tensor := torch.tensor([rank**2]))\ntime.sleep(1000 * rank)\n"
            "tensor.item() + rank + offset"
        )
        shell.magics["spmd"]("--simulated -n 64 --ranks 1,63 --to run --seed 2", cell)
        total = sum(rank**2 for rank in range(64))
        lines = [f"[rank {rank}] {text}" for rank in (1, 63) for text in ("begins", "at 0.0", f"{total + rank + 100}")]
        assert capsys.readouterr().out.splitlines() == lines
        assert shell.user_ns["run"].seed == 2 and shell.user_ns["run"].seconds == 63_000
        assert "rank" not in shell.user_ns and shell.user_ns["offset"] == 100
        [display] = displays
        assert display["data"]["text/plain"] == str(shell.user_ns["run"])
        assert display["data"]["image/svg+xml"].startswith("<svg")

    def test_the_output_before_a_failure_on_simulated_ranks_is_shown(
        self, shell: Shell, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shell.display_pub = Displays()
        with pytest.raises(RankError, match="rank 1 of 2 failed with ZeroDivisionError"):
            cell = "import torchdist_ref as dist\nprint('begins')\n1 / (1 - dist.get_rank())"
            shell.magics["spmd"]("--simulated -n 2", cell)
        assert capsys.readouterr().out.splitlines() == ["[rank 0] begins", "[rank 0] 1.0", "[rank 1] begins"]
        with pytest.raises(SpmdUsageError, match="--seed: it is for simulated ranks; add --simulated"):
            shell.magics["spmd"]("--seed 3", "")

    def test_a_long_run_of_simulated_ranks_shows_how_far_it_is(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        displays = Displays()
        shell.display_pub, shell.kernel, told = displays, object(), threading.Event()
        monkeypatch.setattr(one_run, "PROGRESS_SECONDS", 0.0)
        publish = displays.publish
        monkeypatch.setattr(displays, "publish", lambda **display: (publish(**display), told.set()))
        shell.user_ns["told"] = told
        cell = (
            "import time, torchdist_ref as dist\nrank = dist.get_rank()\ntime.sleep(50 * rank)\n"
            "while rank and not told.is_set(): pass"
        )
        shell.magics["spmd"]("--simulated -n 2", cell)
        first, *_, end, drawn = displays
        assert first["data"]["text/plain"] == "virtual time 50 s, 1 of 2 ranks have returned"
        assert end["data"]["text/plain"] == "" and "image/svg+xml" in drawn["data"]

    def test_get_put_and_stop(self, shell: Shell) -> None:
        shell.magics["spmd"]("-n 2", BEGIN)
        shell.user_ns["sent"] = 20
        shell.magics["spmd_put"]("sent")
        shell.magics["spmd_get"]("'sent + rank' --rank 1 --to got")
        assert shell.user_ns["got"] == 21
        shell.magics["spmd_stop"]("")
        shell.magics["spmd"]("-n 1", "fresh = 'rank' not in globals()")
        shell.magics["spmd_get"]("fresh")
        assert shell.user_ns["fresh"] is True

    @pytest.mark.parametrize(
        ("magic", "line", "message"),
        [
            ("spmd", "-n two", "argument -n/--nproc: invalid int value: 'two'"),
            ("spmd", "--ranks 0,x", "must be ranks with commas between them, such as 0,2, got '0,x'"),
            ("spmd", "--ranks 0,7", "there are ranks 0 to 0, got [0, 7]"),
            ("spmd", "-n 3", "%%spmd -n 3: 1 ranks are running. Leave out -n to use them, or end them with %spmd_stop"),
            ("spmd", "'", "No closing quotation"),
            ("spmd", "--fast", "unrecognized arguments: --fast"),
            ("spmd_get", "a+b", "'a+b' is not a name for a variable; add --to NAME"),
            ("spmd_put", "nothing", "this notebook has no variable 'nothing'"),
        ],
    )
    def test_wrong_options_are_reported(self, shell: Shell, magic: str, line: str, message: str) -> None:
        shell.magics["spmd"]("-n 1", "")
        with pytest.raises(SpmdUsageError) as caught:
            shell.magics[magic](line, *(["1"] if magic == "spmd" else []))
        assert message in str(caught.value)

    def test_magics_before_ranks_are_started(self, shell: Shell) -> None:
        with pytest.raises(SpmdUsageError, match="there are no ranks yet; a %%spmd cell starts them"):
            shell.magics["spmd_get"]("x")
        shell.magics["spmd_stop"]("")

    def test_help_of_the_magics(self, shell: Shell) -> None:
        assert all(option in shell.magics["spmd"].__doc__ for option in ("--nproc", "--ranks", "--timeout", "--start"))


class TestStreams:
    """Requests and their results stay together, whatever a cell or `show` does."""

    def test_an_exception_of_show_is_raised_once_all_ranks_have_answered(self, pool: RankPool) -> None:
        """Once each later request received the results of the one before."""
        received: Shown = []

        def show(rank: int, item: Any) -> None:
            received.append((rank, item))
            raise ValueError("cannot be published")

        with pytest.raises(ValueError, match="cannot be published"):
            pool.run("print('one'); print('two')", show=show)
        assert received == [(0, "one")]
        assert pool.pull("40 + rank", rank=2) == 42 and shown(pool, "'next'; rank * 3")[2] == (2, "6")

    def test_a_value_that_cannot_be_pickled_fails_its_own_cell(self, pool: RankPool) -> None:
        """Once the output of each later cell was shown one cell late."""
        pool.run("class Odd:\n    def _repr_mimebundle_(self, **options): return {'text/plain': (x for x in [])}")
        error, _ = failing(pool, "print('before'); Odd()")
        assert "cannot pickle 'generator' object" in str(error)
        assert shown(pool, "print('own', rank)") == [(rank, f"own {rank}") for rank in range(3)]

    def test_a_value_that_cannot_be_unpickled_is_named(self, pool: RankPool) -> None:
        pool.run(
            "class Text(str): pass\nclass Odd:\n    def _repr_mimebundle_(self, **options): return {'x/y': Text()}"
        )
        items: Shown = []
        pool.run("Odd(); display(Odd()) if rank == 1 else None", show=lambda rank, item: items.append((rank, item)))
        [(rank, bundle)] = items
        assert rank == 1 and re.search("cannot be unpickled: .*attribute 'Text'", bundle["text/plain"])
        assert shown(pool, "rank") == [(rank, str(rank)) for rank in range(3)]

    @pytest.mark.timeout(20)
    def test_values_are_displayed_while_a_cell_has_redirected_or_closed_its_output(self, pool: RankPool) -> None:
        """Once the notebook waited without end for a marker that had gone to /dev/null."""
        redirect = "saved = os.dup(1); null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 1); os.close(null)\n"
        items = shown(
            pool, f"{redirect}print('hidden', flush=True); display(rank + 7); os.dup2(saved, 1); print('seen')"
        )
        assert items == [(rank, text) for rank in range(3) for text in (str(rank + 7), "seen")]
        assert shown(pool, "os.close(1); display(rank); os.dup2(saved, 1);") == [(rank, str(rank)) for rank in range(3)]

    def test_other_signals_do_not_interrupt(self, pool: RankPool) -> None:
        received: list[int] = []
        former = signal.signal(signal.SIGUSR1, lambda signum, frame: received.append(signum))
        try:
            items = shown(pool, f"if rank == 1: os.kill({os.getpid()}, signal.SIGUSR1)\nprint('end', rank)")
        finally:
            signal.signal(signal.SIGUSR1, former)
        assert items == [(rank, f"end {rank}") for rank in range(3)] and received == [signal.SIGUSR1]

    @pytest.mark.timeout(20)
    def test_a_rank_that_died_is_missed_by_a_request_to_another(self, pool: RankPool, server: RankServer) -> None:
        """Once that request consumed the news, and the next one waited without end."""
        os.kill(pool.pids[1], signal.SIGKILL)
        assert server.connection.poll(20)
        assert pool.pull("rank", rank=2) == 2
        with pytest.raises(PoolError, match="rank 1 was killed by SIGKILL"):
            pool.run("rank")


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Slow, about five seconds: a kernel starts, and a rank server with torch.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        "%load_ext torchdist_ref.notebook",
        f"%%spmd -n 2\n{BEGIN}\nprint('hello')\nrank + 1",
        "%%spmd --ranks 1\nclass Picture:\n  _repr_svg_ = lambda s: '<svg/>'\nPicture()",
        "%%spmd\n1 / rank",
        f"%%spmd --timeout 0.2\n{WAIT}",
        f"%%spmd\nx = 5 - rank\n{marked_wait(tmp_path)}",
        "%spmd_get x --rank 1\nx",
        "%spmd_get [os.getppid(),os.getpid()] --to pids\npids",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    settings = {"allow_errors": True, "interrupt_on_timeout": True, "resources": {"metadata": {"path": str(ROOT)}}}
    client = nbclient.NotebookClient(notebook, timeout=60, iopub_timeout=60, **settings)

    def interrupt_waiting_ranks() -> None:
        """Do what the user's button does."""
        limit = time.monotonic() + 100
        while not have_marked(tmp_path, {0, 1}) and time.monotonic() < limit:
            time.sleep(0.01)
        os.killpg(client.km.provisioner.pgid, signal.SIGINT)

    with client.setup_kernel():
        user = threading.Thread(target=interrupt_waiting_ranks)
        user.start()
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        user.join()
    _, hello, rich, error, late, interrupted, fetched, pids = [cell.outputs for cell in notebook.cells]
    assert [output.text for output in hello] == ["[rank 0] hello\n[rank 0] 1\n[rank 1] hello\n[rank 1] 2\n"]
    assert rich[0].text == "[rank 1]\n" and rich[1].data["image/svg+xml"] == "<svg/>"
    assert [output.get("text") for output in error if "text" in output] == ["[rank 1] 1.0\n"]
    assert error[-1].ename == "CellError" and "[rank 0]     1 / rank\n" in error[-1].traceback[0]
    assert late[-1].evalue == "ranks 0, 1 did not answer within 0.2 s: interrupted"
    assert interrupted[-1].evalue == "interrupted by you: ranks 0, 1"
    assert fetched[0].data["text/plain"] == "4"
    assert all_ended([int(word) for word in pids[0].data["text/plain"].strip("[]").split(",")])


def test_a_drawing_is_as_large_as_its_content() -> None:
    """Nothing is cut off, also what is left of the first box or above it."""
    drawing = Drawing("boxes", "Two boxes with an arrow between them.")
    first, second = drawing.box(-30, -20, "a", "wider line"), drawing.box(200, 100, "b", width=60)
    drawing.arrow(first, second, "tensor")
    drawing.frame([first, second], "host")
    left, top, width, height = map(float, re.search(r"viewBox='([^']+)'", drawing.svg())[1].split())
    x, y = map(float, re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", drawing.svg()).groups())
    for box in (first, second):
        assert left <= box.x + x and box.x + box.width + x <= width
        assert top <= box.y + y and box.y + box.height + y <= height
    assert (
        first.edge(second.center)[0] == first.x + first.width or first.edge(second.center)[1] == first.y + first.height
    )


def test_bars_of_a_timeline_are_as_long_as_their_times() -> None:
    lanes = {"rank 0": [Bar(0.0, 0.25, "backward"), Bar(0.25, 1.0, "all_reduce", "communicate")], "rank 1": []}
    svg = timelines("a step", "One rank computes, then sends.", lanes, width=400)._repr_svg_()
    widths = [float(width) for width in re.findall(r"<rect [^>]*width='([\d.]+)'", svg)]
    assert widths == [99.0, 299.0] and "750 ms" in svg and "orange: communicates" in svg and "waits" not in svg
