"""Logs: the matrix of the two variables, the ranks that log, and programs that configure logging themselves."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

import torchdist_ref as dist
from torchdist_ref.debug import logs
from torchdist_ref.testing import run

ROOT = logging.getLogger("torchdist_ref")
# TORCH_CPP_LOG_LEVEL, TORCH_DISTRIBUTED_DEBUG, effective level: the table of torch's page.
MATRIX = [
    ("ERROR", "OFF", "ERROR"),
    ("ERROR", "DETAIL", "ERROR"),
    ("WARNING", "OFF", "WARNING"),
    ("WARNING", "INFO", "WARNING"),
    ("INFO", "OFF", "INFO"),
    ("INFO", "INFO", "DEBUG"),
    ("INFO", "DETAIL", "TRACE"),
    ("0", "DETAIL", "TRACE"),
    ("info", "INFO", "DEBUG"),
    ("2", "INFO", "ERROR"),
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    level, handlers, debug = ROOT.level, list(ROOT.handlers), dist.get_debug_level()
    yield
    ROOT.setLevel(level)
    ROOT.handlers[:] = handlers
    dist.set_debug_level(debug)


@pytest.mark.parametrize(("cpp", "debug", "effective"), MATRIX)
def test_the_two_variables_set_the_level_together(
    cpp: str, debug: str, effective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, cpp)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    dist.set_debug_level_from_env()
    run(lambda rank: None, 1)
    assert logging.getLevelName(ROOT.getEffectiveLevel()) == effective
    assert logging.getLevelName(logging.getLogger("torchdist_ref.stores").getEffectiveLevel()) == effective


def test_without_the_variables_pythons_defaults_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.LEVEL_VARIABLE, raising=False)
    run(lambda rank: None, 1)
    assert ROOT.level == logging.NOTSET and logs.handler not in ROOT.handlers


def written(monkeypatch: pytest.MonkeyPatch, configured: bool) -> str:
    """Return what three ranks write to stderr, in a program that has configured logging or not."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if configured else [])

    def program(rank: int) -> None:
        logging.getLogger("torchdist_ref.stores").info("message of %d", rank)
        logging.getLogger("torchdist_ref.stores").debug("not this of %d", rank)

    run(program, 3)
    return stream.getvalue()


def test_chosen_ranks_log_with_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "INFO")
    monkeypatch.setenv(logs.RANKS_VARIABLE, "0, 2")
    lines = written(monkeypatch, configured=False).splitlines()
    mine = sorted(line.partition(" INFO ")[2] for line in lines if "message of" in line)
    assert mine == [f"torchdist_ref.stores [rank {rank}] message of {rank}" for rank in (0, 2)]
    assert not any("not this" in line for line in lines)


def test_all_ranks_log_if_the_list_of_ranks_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "INFO")
    for text in ("", "0;2"):
        monkeypatch.setenv(logs.RANKS_VARIABLE, text)
        assert written(monkeypatch, configured=False).count("message of") == 3


def test_programs_that_configure_logging_get_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "INFO")
    assert written(monkeypatch, configured=True) == ""
