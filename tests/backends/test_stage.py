"""A half of a stage is laid out again only when the readers of all that was laid out before have freed it.

Seen on the executor itself: between real ranks the fault would show only when one of them happens to be late.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torchdist_ref.backends.executor import Executor
from torchdist_ref.backends.plan import RoundCode

PLAN: Any = SimpleNamespace(doing="a call")


class Reader:
    """A reader's token, which writes down that it was waited for."""

    def __init__(self, name: str, seen: list[str], ready: bool) -> None:
        self.name, self.seen, self.ready = name, seen, ready

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self.ready:
            self.seen.append(self.name)
        return self.ready


def executor_with(last: int, ready: bool) -> tuple[Executor, list[str]]:
    """Both halves are being read, by one reader each; half `last` was laid out last."""
    seen: list[str] = []

    def wait(token: Reader, peer: int, doing: str) -> None:
        seen.append(f"waited for {token.name}")

    line = SimpleNamespace(said=(b"", b""), words=[0] * 4, announce=lambda *_: None)
    link: Any = SimpleNamespace(line=line, lines=(), peers=(), wait=wait)
    executor = Executor(link)
    executor._readers = [((Reader(f"reader of half {half}", seen, ready), 1),) for half in (0, 1)]
    executor._staged_last = last
    return executor, seen


def test_in_turn_only_the_readers_of_that_half_are_waited_for() -> None:
    executor, seen = executor_with(last=1, ready=True)
    executor._make_room(0, PLAN)
    assert seen == ["reader of half 0"]
    assert [len(readers) for readers in executor._readers] == [0, 1]


def test_out_of_turn_the_readers_of_the_other_half_come_first() -> None:
    executor, seen = executor_with(last=0, ready=True)
    executor._make_room(0, PLAN)
    assert seen == ["reader of half 1", "reader of half 0"]
    assert [len(readers) for readers in executor._readers] == [0, 0]


def test_a_reader_that_is_not_done_is_waited_for() -> None:
    executor, seen = executor_with(last=0, ready=False)
    executor._make_room(0, PLAN)
    assert seen == ["waited for reader of half 1", "waited for reader of half 0"]


def test_nothing_is_laid_out_before_the_readers_are_done() -> None:
    executor, seen = executor_with(last=1, ready=False)
    stage = torch.zeros(3)
    at_the_wait: list[float] = []
    wait = executor.link.wait

    def look(token: Any, peer: int, doing: str) -> None:
        at_the_wait.extend(stage.tolist())
        wait(token, peer, doing)

    def lay(tensors: Sequence[torch.Tensor], begin: int) -> None:
        stage.copy_(tensors[0])

    executor.link.wait = look  # type: ignore[method-assign,assignment]
    code = RoundCode(stage=(lay,), posts=(), waits=(), steps=(), frees=(), readers=())
    rounds = {"windows": (0,), "first": ((code,), (code,)), "code": None}
    plan: Any = SimpleNamespace(**rounds, record=None, doing="a call", fits=None, inputs=0, nbytes=12)
    executor.prepared(plan).run([torch.tensor([1.0, 2.0, 3.0])], (0, 0))
    assert seen == ["waited for reader of half 0"]
    assert at_the_wait == [0.0, 0.0, 0.0]
    assert stage.tolist() == [1.0, 2.0, 3.0]
