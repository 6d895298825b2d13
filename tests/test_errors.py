"""Each class of error is of the type that torch, or Python below it, raises for the same misuse."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from tests.torchs_world import start_torch
from torchdist_ref.calls import Barrier
from torchdist_ref.errors import message_of
from torchdist_ref.recorder import ERROR, Recorder
from torchdist_ref.testing import run


def local() -> Any:
    return lambda: None


ALONE: Any = {"rank": 0, "world_size": 1}
# What goes wrong, on either library, and what ours is called.
BEFORE = [
    (lambda d: d.destroy_process_group(), dist.NotInitializedError),
    (lambda d: d.all_reduce(torch.ones(2)), dist.NotInitializedError),
    (lambda d: d.init_process_group("gloo", "tcp://127.0.0.1:1", store=d.HashStore(), **ALONE), dist.UsageError),
    (lambda d: d.init_process_group("gloo", store=d.HashStore()), dist.UsageError),
    (lambda d: d.init_process_group("gloo", store=d.HashStore(), world_size=1), dist.UsageError),
    (lambda d: d.init_process_group("smoke", store=d.HashStore(), **ALONE), dist.UsageError),
    (lambda d: d.init_process_group(5, store=d.HashStore(), **ALONE), dist.ArgumentError),
]
WITHIN = [
    (lambda d: d.all_gather_object([None], local()), dist.PicklingError),
    (lambda d: d.all_gather_object([None], threading.Lock()), dist.PicklingError),
    (lambda d: d.broadcast_object_list([local()], 0), dist.PicklingError),
    (lambda d: d.all_gather_object([], 1), dist.EntryError),
    (lambda d: d.batch_isend_irecv([]), dist.EntryError),
    (lambda d: d.init_process_group("gloo", store=d.HashStore(), **ALONE), dist.ArgumentError),
]


def raised(call: Any, library: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        call(library)
    return caught.value


def left() -> None:
    for library in (dist, theirs):
        if library.is_initialized():
            library.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Device capability of smoke:UserWarning")
@pytest.mark.parametrize("number", range(len(BEFORE)))
def test_errors_before_a_group_have_no_rank(number: int) -> None:
    call, name = BEFORE[number]
    try:
        ours, torchs = raised(call, dist), raised(call, theirs)
    finally:
        left()
    assert type(ours) is name and isinstance(ours, type(torchs))


@pytest.mark.parametrize("number", range(len(WITHIN)))
def test_errors_in_a_group_have_the_rank(number: int) -> None:
    call, name = WITHIN[number]
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), **ALONE)
        start_torch(store=theirs.HashStore(), **ALONE)
        ours, torchs = raised(call, dist), raised(call, theirs)
    finally:
        left()
    assert type(ours) is name and isinstance(ours, type(torchs)) and ours.definite


def test_pickling_error_has_all_types_that_pickle_raises() -> None:
    for thing, kind in ((local(), (AttributeError, pickle.PicklingError)), (threading.Lock(), TypeError)):
        with pytest.raises(kind):
            pickle.dumps(thing)
        assert issubclass(dist.PicklingError, kind)


def test_a_renamed_error_keeps_its_old_name_with_a_warning() -> None:
    for home in (dist, dist.errors):
        with pytest.warns(DeprecationWarning, match="EngineArgumentError is now called BackendArgumentError"):
            assert home.EngineArgumentError is dist.BackendArgumentError
    with pytest.raises(AttributeError):
        _ = dist.errors.NoSuchError


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


def test_every_error_has_a_text_that_can_be_sent() -> None:
    assert message_of(OSError("no \udce9.pt")) == r"OSError: no \udce9.pt"
    assert message_of(AssertionError()) == "AssertionError"
    assert message_of(Unprintable()) == "Unprintable: its text cannot be read: LookupError"


@pytest.mark.parametrize("error", [ValueError("no \udce9.pt"), Unprintable()])
def test_a_call_that_fails_without_a_text_is_recorded_and_ends_the_group(error: BaseException) -> None:
    def fail(rank: int, told: threading.Event) -> str:
        link: Any = getattr(dist.group.WORLD.backend, "link")  # noqa: B009 - of `ref` alone
        if rank == 1:
            recorder = Recorder()
            recorder.fail(entry := recorder.begin((0, 0), Barrier(), ((), ())), error)
            link.abort(error, "a call")
            assert told.wait(20) and entry[ERROR][0] == message_of(error)
            return ""
        with pytest.raises(dist.GroupAbortedError) as caught:
            dist.barrier()
        told.set()
        return str(caught.value)

    text = run(fail, 2, threading.Event(), timeout=20)[0]
    assert f"rank 1 aborted: {type(error).__name__} in a call: " in text
