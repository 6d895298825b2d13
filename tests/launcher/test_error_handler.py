"""Error handlers of workers: names, successes and additions that torch has had since 2.15; older ones still work."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from torchdist_ref.launcher import error_handler
from torchdist_ref.launcher.child_failures import ChildFailedError, ProcessFailure
from torchdist_ref.launcher.record import record


class Handler(error_handler.ErrorHandler):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def initialize(self) -> None:
        self.told.append(("initialize", self._fn_name))

    def record_exception(self, e: BaseException) -> None:
        self.told.append(("exception", str(e), self._fn_name))

    def record_success(self) -> None:
        self.told.append(("success", self._fn_name))


def test_record_tells_the_handler_the_function_and_its_success() -> None:
    handler = Handler()

    def entry(value: int) -> int:
        return value + 1

    assert record(entry, handler)(4) == 5
    name = entry.__qualname__
    assert handler.told == [("initialize", name), ("success", name)] and error_handler.ErrorHandler._fn_name is None


@pytest.mark.parametrize("end", [ValueError("broken"), SystemExit(3), SystemExit(0)], ids=repr)
def test_an_exception_is_no_success(end: BaseException) -> None:
    handler = Handler()

    def entry() -> None:
        raise end

    recorded = record(entry, handler)
    if isinstance(end, SystemExit) and not end.code:
        assert recorded() is None
    else:
        with pytest.raises(type(end)):
            recorded()
    assert [each[0] for each in handler.told] == ["initialize", *["exception"] * isinstance(end, ValueError)]


def test_what_a_success_raises_is_no_failure_of_the_function() -> None:
    class Broken(Handler):
        def record_success(self) -> None:
            raise OSError("no telemetry")

    handler = Broken()
    with pytest.raises(OSError, match="no telemetry"):
        record(lambda: 1, handler)()
    assert [each[0] for each in handler.told] == ["initialize"]


def test_a_handler_of_an_older_torch_is_used_as_before() -> None:
    class Older:
        def __init__(self) -> None:
            self.told: list[str] = []

        def initialize(self) -> None:
            self.told.append("initialize")

    handler: Any = Older()
    assert record(lambda: 7, handler)() == 7 and handler.told == ["initialize"]


@pytest.mark.parametrize(("exitcode", "calls"), [(-9, 1), (1, 0)])
def test_a_handler_adds_to_the_message_for_a_killed_worker(
    exitcode: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Enriching(error_handler.ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
            asked.append((message, error_file))
            return f"{message}\ndevice 3 has faulted"

    monkeypatch.setattr(error_handler, "get_error_handler", Enriching)
    failure = ProcessFailure(0, 11, exitcode, "/nonexistent")
    text = ChildFailedError("job", {0: failure}).format_msg()
    assert asked[:1] == [(failure.message, failure.error_file)] * calls
    assert ("device 3 has faulted" in text) is bool(calls) and "device" not in failure.message


def test_a_handler_that_fails_leaves_the_message_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(error_handler.ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
            raise OSError("no log")

    monkeypatch.setattr(error_handler, "get_error_handler", Broken)
    with caplog.at_level(logging.WARNING):
        text = str(ChildFailedError("job", {0: ProcessFailure(0, 11, -9, "/nonexistent")}))
    assert "Signal 9 (SIGKILL) received by PID 11" in text and "cannot add to the message" in caplog.text
