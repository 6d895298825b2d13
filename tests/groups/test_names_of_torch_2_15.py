"""Functions and arguments that torch has had since 2.14 and 2.15, on every torch: values, groups, errors."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from tests.torch_versions import needs_torch, torch_has
from torchdist_ref.backends.base import Backend
from torchdist_ref.backends.ref import Ref
from torchdist_ref.testing import fill, run

BACKENDS = ["ref", "gloo"]


def raised(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Return what a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the callers compare
        call()
    return caught.type, str(caught.value)


# gather_single


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_single_fills_one_tensor_on_the_destination(backend: str, dtype: torch.dtype) -> None:
    def program(rank: int) -> Any:
        found = []
        for root in range(3):
            flat, stacked = torch.zeros(18, dtype=dtype), torch.zeros(3, 2, 3, dtype=dtype)
            # Ignored on the other ranks, whatever it is.
            dist.gather_single(fill(rank, (2, 3), dtype), flat if rank == root else torch.zeros(1), root)
            work = dist.gather_into_tensor(
                fill(rank + 3, (2, 3), dtype), stacked if rank == root else None, group_dst=root, async_op=True
            )
            assert work is not None and work.wait()
            found.append((flat, stacked))
        return found

    values = run(program, 3, backend=backend)
    for rank, found in enumerate(values):
        for root, (flat, stacked) in enumerate(found):
            blocks, others = ([fill(each + more, (2, 3), dtype) for each in range(3)] for more in (0, 3))
            assert torch.equal(flat, torch.cat(blocks).flatten() if rank == root else torch.zeros_like(flat))
            assert torch.equal(stacked, torch.stack(others) if rank == root else torch.zeros_like(stacked))


def test_gather_single_in_place_in_strides_and_in_a_group() -> None:
    def program(rank: int) -> Any:
        whole = torch.full((4,), -1.0)
        whole[2:] = fill(rank, (2,))
        dist.gather_single(whole[2:], whole if rank == 1 else None, 1)
        columns = torch.zeros(2, 4)
        dist.gather_single(fill(rank, (2,)), columns[:, ::2] if rank == 0 else None)
        group = dist.new_group([1, 0], sort_ranks=False)
        reversed_ = torch.zeros(2, 2)
        dist.gather_single(fill(rank, (2,)), reversed_ if rank == 0 else None, 0, group)
        return whole, columns, reversed_

    (_, columns, reversed_), (whole, *_) = run(program, 2)
    zero, one = fill(0, (2,)), fill(1, (2,))
    assert torch.equal(whole, torch.cat([zero, one]))
    assert torch.equal(columns[:, ::2], torch.stack([zero, one])) and not columns[:, 1::2].any()
    assert torch.equal(reversed_, torch.stack([one, zero]))


def test_gather_single_refuses_what_torch_refuses_with_its_types() -> None:
    def program(rank: int) -> Any:
        tensor, output = torch.ones(3), torch.zeros(3)
        calls = [
            lambda: dist.gather_single(tensor, None),
            lambda: dist.gather_single(tensor, torch.zeros(5)),
            lambda: dist.gather_single(tensor, torch.zeros(3, dtype=torch.float64)),
            lambda: dist.gather_single(tensor, [output]),  # type: ignore[arg-type]
            lambda: dist.gather_single(tensor, output, 0, group_dst=0),
            lambda: dist.gather_into_tensor(5, output),  # type: ignore[arg-type]
        ]
        return [raised(call) for call in calls]

    (found,) = run(program, 1)
    expected = [
        (ValueError, "gather_single: gather_tensor must be specified on the destination rank"),
        (RuntimeError, "'gather_tensor' must be a tensor of 3 elements"),
        (ValueError, "Invalid usage of tensors with different dtypes"),
        (TypeError, "Expected parameter `gather_tensor` of type torch.Tensor"),
        (ValueError, "Can't specify both"),
        (TypeError, "gather_into_tensor: Invalid function argument. Expected parameter `tensor`"),
    ]
    assert all(issubclass(kind, wanted) for (kind, _), (wanted, _) in zip(found, expected, strict=True))
    assert all(words in text for (_, text), (_, words) in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_method_gathers_as_the_function_does(backend: str) -> None:
    """torch's `gather_single` calls it on its groups."""

    def program(rank: int) -> Any:
        group: Any = dist.group.WORLD
        opts = theirs.distributed_c10d.GatherOptions()
        opts.rootRank = 1
        output = torch.zeros(2, 3) if rank == 1 else torch.zeros(0)
        group.gather_single(output, fill(rank, (3,)), opts).wait()
        again = torch.zeros(6) if rank == 1 else torch.zeros(0)
        group.gather_into_tensor(again, fill(rank, (3,)), root=1).wait()
        return output, again

    (none, _), (output, again) = run(program, 2, backend=backend)
    assert not none.numel() and torch.equal(output, torch.stack([fill(0, (3,)), fill(1, (3,))]))
    assert torch.equal(again, output.flatten())


@needs_torch("2.14", "gather_single, get_backend_impl and set_timeout")
def test_torchs_functions_work_on_our_groups() -> None:
    def program(rank: int) -> Any:
        library: Any = theirs
        output = torch.zeros(2, 3) if rank == 1 else None
        library.gather_single(fill(rank, (3,)), output, dst=1)
        library.set_timeout(timedelta(seconds=9))
        objects = [None, None]
        library.all_gather_object(objects, {"rank": rank}, weights_only=True)
        return output, dist.group.WORLD.timeout, library.get_backend_impl() is dist.group.WORLD, objects  # type: ignore[union-attr]

    found = run(program, 2, ranks="processes")
    assert [each[1:] for each in found] == [(9.0, True, [{"rank": 0}, {"rank": 1}])] * 2
    assert torch.equal(found[1][0], torch.stack([fill(0, (3,)), fill(1, (3,))]))


# get_backend_impl


def test_the_implementation_is_the_object_that_runs_the_calls() -> None:
    def program(rank: int) -> Any:
        both = dist.new_group(backend="cpu:gloo,meta:fake")
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        checked = dist.new_group(backend="gloo")
        dist.set_debug_level(dist.DebugLevel.OFF)
        cpu, meta = torch.device("cpu"), torch.device("meta")
        assert dist.group.WORLD is not None
        kinds = [
            type(dist.get_backend_impl()),
            type(dist.get_backend_impl(dist.group.WORLD.group_name, cpu)),
            type(dist.get_backend_impl(both, cpu)),
            type(dist.get_backend_impl(both, meta)),
            type(dist.get_backend_impl(checked)),
        ]
        gone = dist.new_group()
        dist.destroy_process_group(gone)
        errors = [
            raised(lambda: dist.get_backend_impl(both)),
            raised(lambda: dist.get_backend_impl(device=meta)),
            raised(lambda: dist.get_backend_impl("no such group")),
            raised(lambda: dist.get_backend_impl(-100)),
            raised(lambda: dist.get_backend_impl(gone)),
            raised(lambda: dist.get_backend_impl(device="cpu")),  # type: ignore[arg-type]
        ]
        return [kind.__name__ for kind in kinds], errors

    for kinds, errors in run(program, 2, ranks="processes"):
        assert kinds == [Ref.__name__, Ref.__name__, "ProcessGroupGloo", "Fake", "ProcessGroupGloo"]
        wanted = [
            (ValueError, "multiple backend implementations; pass the device argument"),
            (RuntimeError, "No backend type associated with device type meta"),
            (RuntimeError, "Could not resolve the process group registered under the name 'no such group'"),
            (ValueError, "Invalid process group specified"),
            (ValueError, "was destroyed"),
            (TypeError, "a torch.device or None"),
        ]
        for (kind, text), (expected, words) in zip(errors, wanted, strict=True):
            # torch's sentence about several implementations goes on after the names.
            assert issubclass(kind, expected) and all(word in text for word in words.split("; ")), text


# set_timeout


def late(rank: int, call: Callable[[torch.Tensor], Any], over: threading.Event) -> str:
    """Return the error of a call that rank 1 never makes."""
    dist.barrier()
    dist.set_timeout(timedelta(seconds=0.3))
    if rank == 1:
        over.wait(20)
        return ""
    kind, _ = raised(lambda: call(torch.ones(1)))
    over.set()
    return kind.__name__


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "asynchronous": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),  # type: ignore[union-attr]
    "recv": lambda tensor: dist.recv(tensor, 1),
    "tagged": lambda tensor: dist.recv(tensor, None, tag=4),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_time_out_that_was_set_ends_calls_on_ref(name: str) -> None:
    assert run(late, 2, CALLS[name], threading.Event()) == ["RankStalledError", ""]


def test_a_time_out_that_was_set_ends_calls_on_gloo_and_reaches_torchs_object() -> None:
    def program(rank: int) -> Any:
        gloo = dist.new_group(backend="gloo")
        dist.set_timeout(timedelta(seconds=0.3), gloo)
        assert dist.group.WORLD is not None
        limits = gloo.timeout, dist.group.WORLD.timeout  # type: ignore[union-attr]
        error = raised(lambda: dist.all_reduce(torch.ones(1), group=gloo)) if rank == 0 else None
        dist.barrier()
        return limits, error and issubclass(error[0], dist.DistBackendError)

    found = run(program, 2, ranks="processes")
    assert all(limits[0] == 0.3 and limits[1] > 1 for limits, _ in found) and found[0][1]


def test_a_time_out_has_to_be_a_positive_duration_of_a_group_of_this_rank() -> None:
    def program(rank: int) -> Any:
        wrong: list[Any] = [5, None, timedelta(0), timedelta(seconds=-1)]
        found = [raised(lambda value=value: dist.set_timeout(value)) for value in wrong]  # type: ignore[misc]
        found.append(raised(lambda: dist.set_timeout(timedelta(seconds=1), -100)))
        dist.set_timeout(timedelta.max)
        dist.all_reduce(torch.ones(1))
        return found

    (found,) = run(program, 1)
    kinds = [TypeError, TypeError, ValueError, RuntimeError, ValueError]
    assert all(issubclass(kind, wanted) for (kind, _), wanted in zip(found, kinds, strict=True))
    assert "Expected timeout argument to be of type datetime.timedelta" in found[0][1]
    assert "Invalid process group specified" in found[4][1]


def test_a_backend_that_cannot_change_its_time_out_warns() -> None:
    def program(rank: int) -> Any:
        both = dist.new_group(backend="cpu:ref,meta:plain")
        with pytest.warns(UserWarning, match="'plain' does not support changing its time-out"):
            dist.set_timeout(timedelta(seconds=2), both)
        return both.backend.backends["cpu"].link.timeout  # type: ignore[union-attr]

    class Plain(Ref):
        name = "plain"

        def set_timeout(self, seconds: float) -> None:
            Backend.set_timeout(self, seconds)

    dist.Backend.register_backend("plain", lambda membership, _: Plain(membership), extended_api=True)
    assert run(program, 2) == [2.0, 2.0]


# weights_only


def exchanged(rank: int, value: Any, other: Any, **kwargs: Any) -> list[Any]:
    """Return what a rank gets from each function on objects: from all ranks, from rank 0, and from the other rank."""
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, value, **kwargs)
    gathered: list[Any] | None = [None, None] if rank == 0 else None
    dist.gather_object(value, gathered, **kwargs)
    copied = [value if rank == 0 else None]
    dist.broadcast_object_list(copied, **kwargs)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [value, other] if rank == 0 else None, **kwargs)
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([value], 1, **kwargs)
        dist.recv_object_list(received, 1, **kwargs)
    else:
        dist.recv_object_list(received, 0, **kwargs)
        dist.send_object_list([value], 0, **kwargs)
    return [everyone, gathered, *copied, *scattered, *received]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_only_exchanges_plain_data_and_tensors(backend: str) -> None:
    values: list[Any] = [{"rank": rank, "tensor": [1.5 * rank, None], "text": ("a", b"b")} for rank in range(2)]
    found = run(lambda rank: exchanged(rank, values[rank], 2j, weights_only=True), 2, backend=backend)
    assert found == [[values, values, values[0], values[0], values[1]], [values, None, values[0], 2j, values[0]]]
    state = run(lambda rank: exchanged(rank, torch.nn.Linear(2, 1).state_dict(), 0, weights_only=True), 2)
    assert all(torch.equal(each[0][0]["weight"], each[2]["weight"]) for each in state)


CALLED: list[str] = []


class Hostile:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> Any:
        return CALLED.append, ("called",)


def one_hostile(rank: int, name: str) -> list[Any]:
    thing: Any = Hostile()
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_object": lambda: dist.all_gather_object([None, None], thing if rank else 1, weights_only=True),
        "gather_object": lambda: dist.gather_object(thing, [None, None] if rank == 0 else None, weights_only=True),
        "broadcast_object_list": lambda: dist.broadcast_object_list([thing], weights_only=True),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [1, thing], weights_only=True),
        "send_object_list": lambda: (
            dist.recv_object_list([None], 0, weights_only=True)
            if rank
            else dist.send_object_list([thing], 1, weights_only=True)
        ),
    }
    kind, text = raised(calls[name])
    total = torch.ones(1)
    dist.all_reduce(total)
    return [issubclass(kind, pickle.UnpicklingError), "Weights only load failed" in text, total.item()]


@pytest.mark.parametrize(
    "name", ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"]
)
def test_weights_only_refuses_other_objects_on_all_ranks_and_runs_no_code(name: str) -> None:
    assert run(one_hostile, 2, name) == [[True, True, 2.0]] * 2 and not CALLED


def test_torchs_loader_refuses_a_frozenset() -> None:
    saved = io.BytesIO()
    torch.save(frozenset({1, 2}), saved)
    saved.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(saved, weights_only=True)


def test_a_pickle_from_a_rank_without_weights_only_is_not_loaded() -> None:
    def program(rank: int) -> Any:
        found: list[Any] = [None]
        if rank == 0:
            return dist.send_object_list([Hostile()], 1)
        kind, text = raised(lambda: dist.recv_object_list(found, 0, weights_only=True))
        return issubclass(kind, pickle.UnpicklingError), "Weights only load failed" in text, found

    assert run(program, 2)[1] == (True, True, [None]) and not CALLED


# init_process_group and experiments


def test_a_group_may_ask_for_the_reconfiguration_that_no_backend_has() -> None:
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    try:
        group: Any = dist.group.WORLD
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
        assert not (group.supports_reconfigure or group.supports_window or group.supports_completion_hooks)
        private: Any = dist
        if torch_has("2.15"):
            assert not private._supports_reconfigure() and not private._supports_window()
            with pytest.raises(dist.UnsupportedError, match="'ref' does not support new_window"):
                private._new_window()
        for call in (group.new_window, group.get_reconfigure_handle, lambda: group.reconfigure(None)):
            with pytest.raises(dist.UnsupportedError, match="'ref' does not support"):
                call()
    finally:
        dist.destroy_process_group()
