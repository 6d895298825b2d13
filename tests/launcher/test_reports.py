"""Events, metrics and timers: torch's handlers and clients see from our launcher what they see from torch's."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.launcher.api as theirs
import torchdist_ref.elastic.metrics
from torch.distributed.elastic import events, metrics, timer
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tests.launcher import jobs
from torchdist_ref.errors import ArgumentError
from torchdist_ref.launcher import api as ours
from torchdist_ref.launcher.local_workers import LocalWorkers, WorkerSettings
from torchdist_ref.launcher.timers import TimerServer

ENDS = ("SUCCEEDED", "FAILED", "TERMINATED")


class Handler(logging.Handler, metrics.MetricHandler):
    """Handler of events and of metrics that keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.metrics: Counter[tuple[str, int]] = Counter()

    def emit(self, given: Any) -> None:
        if isinstance(given, metrics.MetricData):
            self.metrics[given.name, given.value] += 1
        else:
            self.events.append(events.Event.deserialize(given.getMessage()))


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handler]:
    made = Handler()
    monkeypatch.setitem(handlers._log_handlers, "kept", made)
    torchdist_ref.elastic.metrics.configure(made)
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    former = {signum: signal.getsignal(signum) for signum in signals}
    yield made
    metrics.configure(metrics.NullMetricHandler())
    logging.getLogger("torchelastic-events-kept").removeHandler(made)
    events._events_loggers.pop("kept", None)
    for signum, each in former.items():
        signal.signal(signum, each)


def summary(event: Any) -> tuple[Any, ...]:
    """Return what two launchers have to report alike; ids, host names and times differ."""
    found = dict(event.metadata)
    more = json.loads(found.pop("metadata"))
    error = json.loads(found["raw_error"])["message"] if found["raw_error"] else ""
    text = error["message"] if isinstance(error, dict) else error
    keys = tuple(sorted(found)), tuple(sorted(more))
    values = [found[name] for name in ("global_rank", "group_rank", "role", "state", "agent_restarts", "run_id")]
    return event.name, event.source, keys, *values, text, more.get("local_rank"), more.get("role_rank")


@pytest.mark.parametrize("good_after", [1, 9])
def test_events_and_metrics_equal_torchs(good_after: int, handler: Handler, tmp_path: Path) -> None:
    found = []
    for name, module in (("theirs", theirs), ("ours", ours)):
        folder = tmp_path / name
        folder.mkdir()
        config = module.LaunchConfig(
            1,
            1,
            2,
            run_id="7",
            role="trainer",
            max_restarts=2,
            monitor_interval=0.01,
            start_method="fork",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            logs_specs=DefaultLogsSpecs(str(folder / "logs")),
            event_log_handler="kept",
        )
        try:
            module.launch_agent(config, jobs.fail, [str(folder), 1, good_after])
        except ChildFailedError:
            assert good_after == 9
        # torch also reports each start and its own steps.
        ends = [summary(event) for event in handler.events if event.name.rpartition(".")[2] in ENDS]
        words = ("flakiness", "run_")
        counts = {key: count for key, count in handler.metrics.items() if any(word in key[0] for word in words)}
        found.append((sorted(map(str, ends)), {key: n for key, n in counts.items() if key[0].startswith("workers.")}))
        handler.events, handler.metrics = [], Counter()
    assert found[0] == found[1]
    events_of_ours, metrics_of_ours = found[1]
    assert len(events_of_ours) == 3 and len(metrics_of_ours) == 6


def test_an_unknown_handler_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    config = ours.LaunchConfig(1, 1, 1, event_log_handler="no such", start_method="fork")
    with pytest.raises(ArgumentError, match="no such handler; give console"):
        ours.launch_agent(config, jobs.fail, [str(tmp_path), 0, 0])
    assert not list(tmp_path.iterdir())


def wait_too_long(folder: str) -> int:
    """Let a timer expire on rank 1 of the first attempt."""
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=1000, scope="outer"), timer.expires(after=2000):
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if count == 0 and os.environ["RANK"] == "1":
            with timer.expires(after=0.05, scope="step"):
                signal.pause()
        elif count == 0:
            signal.pause()
    return count


def test_a_timer_ends_a_worker_of_our_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    config = ours.LaunchConfig(1, 1, 2, max_restarts=1, start_method="fork", shutdown_timeout=5)
    assert ours.launch_agent(config, wait_too_long, [str(tmp_path)]) == {0: 1, 1: 1}
    lines = [record.getMessage() for record in caplog.records]
    assert any("the timer 'step' of process" in line and "sent SIGKILL" in line for line in lines)
    assert any(line.startswith("rank 1 ") and "was killed by SIGKILL" in line for line in lines)
    assert "restarting all ranks (1 of 1)" in lines


def test_nonsense_and_released_timers_end_nobody(tmp_path: Path) -> None:
    lines: queue.Queue[str] = queue.Queue()
    path, ahead = str(tmp_path / "timers"), 0.0
    # The server's clock: this process may take any time to release its timer.
    server = TimerServer(path, lines.put, lambda: time.time() + ahead)
    with open(path, "w", buffering=1) as file:
        file.write("nonsense\n[1, 2]\n")
        for pid, signum in ((-5, 9), (10**30, 9), (1, 10**30)):
            file.write(f'{{"pid": {pid}, "scope_id": "", "expiration_time": 0, "signal": {signum}}}\n')
    assert "b'nonsense'" in lines.get(timeout=10) and "b'[1, 2]'" in lines.get(timeout=10)
    assert all("a malformed request for a timer" in lines.get(timeout=10) for _ in range(3))
    client = timer.FileTimerClient(path, signal.SIGCONT)
    client.acquire("released", time.time() + 1000)
    client.release("released")
    # More milliseconds than poll(2) takes.
    client.acquire("far", time.time() + 1e8)
    with open(path, "w") as file:
        file.write("all are read\n")
    assert "b'all are read'" in lines.get(timeout=10)
    ahead = 2000.0
    # SIGCONT does no harm to this process.
    client.acquire("late", time.time() + 2000.1)
    assert "'late'" in lines.get(timeout=10)
    server.close()
    assert lines.empty() and not os.path.exists(path)


@pytest.mark.parametrize(
    ("path", "reason"), [("none/timers", "No such file"), ("folder", "Is a dir"), ("file/timers", "Not a dir")]
)
def test_a_pipe_of_timers_that_cannot_be_created(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it ended the launcher with a traceback, and a program with a process and a folder more."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / path))
    message = f"pipe of timers {tmp_path}/{path}: {reason}.* in TORCHELASTIC_TIMER_FILE"
    with pytest.raises(ArgumentError, match=message):
        LocalWorkers(WorkerSettings(os.getenv, ["RANK"]))
    assert not list((tmp_path / "temporary").iterdir())
