"""Plugin of pytest that records each test as it starts and ends, and ends the process if one test hangs.

`parts` runs pytest with it, again and again until no test is left: a test that was started before is not run again, so
a crash or a hang costs one test. It stands in for pytest-timeout where that is not installed.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
from pathlib import Path

import pytest

from tests.gpu.supervise import Events

EVENTS, SECONDS = "TORCHDIST_REF_GPU_EVENTS", "TORCHDIST_REF_GPU_TEST_SECONDS"
REASON_CHARACTERS = 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accept the setting that pyproject.toml has for pytest-timeout."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "ignored: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Record to the file that the environment names."""
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): ignored: pytest-timeout is not installed")
    config.pluginmanager.register(Recorder(Events(Path(os.environ[EVENTS])), float(os.environ[SECONDS])))


def stack_of(events: Events) -> Path:
    """Return the file with the stack of the test that hung; empty if none did."""
    return events.path.with_suffix(".stack")


class Recorder:
    """Record of each test.

    Args:
        events: File.
        seconds: Time after which a test ends the process.
    """

    def __init__(self, events: Events, seconds: float) -> None:
        self._events, self._seconds = events, seconds
        # pytest captures standard error.
        self._stack = stack_of(events).open("w")
        self._outcome, self._reason, self._taken = "passed", "", 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out tests that were started before."""
        before = {event["name"] for event in self._events.read() if event["event"] == "start"}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the start of a test."""
        self._outcome, self._reason, self._taken = "passed", "", 0.0
        self._events.write(event="start", name=nodeid)
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stack)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test's set-up, call or end."""
        self._taken += report.duration
        if report.failed or (report.skipped and self._outcome == "passed"):
            self._outcome = report.outcome
            skip = report.longrepr if report.skipped else None
            self._reason = skip[2] if isinstance(skip, tuple) else report.longreprtext[-REASON_CHARACTERS:]

    def pytest_unconfigure(self) -> None:
        """Close the file of the stack."""
        self._stack.close()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record the end of a test."""
        faulthandler.cancel_dump_traceback_later()
        taken = round(self._taken, 3)
        self._events.write(event="end", name=nodeid, outcome=self._outcome, seconds=taken, reason=self._reason)
