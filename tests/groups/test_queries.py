"""Available backends, registered backends, ranks in the environment, group counts, reduction properties."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from tests.torchs_world import start_torch
from torchdist_ref.backends import base, registry
from torchdist_ref.backends.ref import Ref
from torchdist_ref.testing import fill, run


def test_backend_names_are_torchs() -> None:
    for name in ("GLOO", "NCCL", "MPI", "UCC", "XCCL", "FAKE", "UNDEFINED"):
        assert getattr(dist.Backend, name) == getattr(theirs.Backend, name)
    assert dist.Backend("GlOo") == theirs.Backend("GlOo") == "gloo"
    assert dist.Backend("Somebodys") == theirs.Backend("Somebodys") == "somebodys"
    assert isinstance(dist.Backend("ref"), str) and dist.Backend.REF == "ref"


@pytest.mark.parametrize("name", ["gloo", "nccl", "mpi", "ucc", "xccl"])
def test_available_backends_are_those_that_init_can_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = getattr(dist, f"is_{name}_available")
    assert asked() == dist.is_backend_available(name.upper())
    if name not in registry.names():
        assert not asked()
        monkeypatch.setitem(registry.registered, name, "somewhere")
        installed = {"gloo": theirs.is_gloo_available(), "nccl": theirs.is_nccl_available(), "ucc": True, "xccl": True}
        assert name == "mpi" or asked() == installed[name]


def test_backends_by_device_must_all_be_available() -> None:
    assert dist.is_available() and dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo") and dist.is_backend_available("cpu:ref,cuda:gloo")
    assert not dist.is_backend_available("cpu:gloo,cuda:smoke")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3", torch.device("cpu"), "xpu", "mps"])
def test_default_backends_are_torchs(device: str | torch.device) -> None:
    assert dist.get_default_backend_for_device(device) == theirs.get_default_backend_for_device(device)


def test_a_device_without_a_backend_raises() -> None:
    with pytest.raises(ValueError, match=r"'device'.*cpu, cuda.*'meta'.*not registered"):
        dist.get_default_backend_for_device("meta")


def test_device_types_of_backends_are_torchs_or_what_ours_support() -> None:
    ours, torchs = dist.Backend.backend_capability, theirs.Backend.backend_capability
    assert ours["ref"] == ["cpu", "cuda"] and ours["mpi"] == ["cpu"]
    names = ("gloo", "nccl", "xccl", "ucc")
    assert {name: ours[name] for name in names} == {name: torchs[name] for name in names}
    # torch adds xpu to this list where there is one.
    assert set(torchs["fake"]) - {"xpu"} <= set(ours["fake"])


@pytest.mark.parametrize("devices", ["cpu", ["cuda", "cpu"], None])
def test_registration_adds_the_device_types_of_a_backend(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "CAPABLE", "capable", raising=False)
    monkeypatch.setattr(theirs.Backend, "CAPABLE", "capable", raising=False)
    for library in (dist, theirs):
        monkeypatch.setattr(library.Backend, "backend_capability", dict(library.Backend.backend_capability))
        monkeypatch.setattr(
            library.Backend, "default_device_backend_map", dict(library.Backend.default_device_backend_map)
        )
    for table in ("_plugins", "backend_type_map"):
        monkeypatch.setattr(theirs.Backend, table, dict(getattr(theirs.Backend, table)))
    monkeypatch.setattr(theirs.Backend, "backend_list", list(theirs.Backend.backend_list))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in (dist, theirs):
            library.Backend.register_backend("Capable", Ref, devices=devices)
    torchs = theirs.Backend.backend_capability["capable"]
    assert dist.Backend.backend_capability["capable"] == [kind for kind in torchs if kind != "xpu"]


def counted(calls: list[tuple[object, ...]], *arguments: Any) -> Ref:
    calls.append(arguments)
    store, rank, size, timeout = arguments
    return Ref(base.Membership(store, rank, tuple(range(size)), "mine", timeout.total_seconds()))


def total(rank: int) -> list[float]:
    tensor = fill(rank, (5,))
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_a_registered_backend_runs_calls() -> None:
    calls: list[tuple[object, ...]] = []
    dist.Backend.register_backend("OurOwn", lambda *arguments: counted(calls, *arguments), devices=["fpga"])
    try:
        assert run(total, 2, backend="OUROWN") == [(fill(0, (5,)) + fill(1, (5,))).tolist()] * 2
        assert sorted(str(call[1:3]) for call in calls) == ["(0, 2)", "(1, 2)"]
        assert all(isinstance(call[3], timedelta) for call in calls)
        assert dist.Backend.OUROWN == "ourown"  # type: ignore[attr-defined]
        assert dist.Backend.default_device_backend_map.pop("fpga") == "ourown"
        assert dist.Backend.backend_capability.pop("ourown") == ["fpga"]
    finally:
        del dist.Backend.OUROWN  # type: ignore[attr-defined]


def test_a_factory_that_returns_no_backend_is_refused() -> None:
    with pytest.warns(UserWarning, match="this replaces the library's backend 'gloo'") as caught:
        dist.Backend.register_backend("gloo", lambda membership, options: "a backend", extended_api=True)
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match=r"'func'.*backends.base.Backend, got 'a backend' \(on rank 0\).*'gloo'"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


class Nameless(base.Backend):
    def submit(self, *arguments: Any) -> Any: ...
    def close(self) -> None: ...
    def abort(self, reason: str) -> None: ...


class Unrecorded(Nameless):
    name = "mine"


def named(name: str, membership: base.Membership) -> Ref:
    made = Ref(membership)
    made.name = name
    return made


@pytest.mark.parametrize(
    ("factory", "extended", "words"),
    [
        (
            named,
            False,
            r"'func' must be callable as func\(store, .* func\(membership, options\) with extended_api=True",
        ),
        (
            lambda store, rank, size, timeout: None,
            True,
            r"'func' must be callable as func\(membership, options\) with extended_api=True",
        ),
        (lambda m, _: Nameless(), True, "backend 'mine', Nameless: argument 'name' must be a str, got None"),
        (lambda m, _: named(3, m), True, "backend 'mine', Ref: argument 'name' must be a str, got 3"),  # type: ignore[arg-type]
        (lambda m, _: named("b", m), True, "argument 'name' must be 'mine', under which it is registered, got 'b'"),
        (
            lambda m, _: Unrecorded(),
            True,
            "backend 'mine', Unrecorded: argument 'recorder' must be a Recorder, got None",
        ),
    ],
    ids=["no extended_api", "extended_api", "no name", "number", "other name", "no recorder"],
)
def test_a_backend_with_wrong_parts_is_refused(
    factory: Any, extended: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These raised errors of Python, or named only the wrong name."""
    monkeypatch.setattr(dist.Backend, "MINE", "mine", raising=False)
    dist.Backend.register_backend("mine", factory, extended_api=extended)
    with pytest.raises((TypeError, ValueError), match=words):
        dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


MISUSE: list[tuple[Any, type[Exception], str]] = [
    (lambda: dist.Backend(3), ValueError, "Backend.*'name'.*got 3"),  # type: ignore[arg-type]
    (lambda: dist.Backend.register_backend(3, total), TypeError, "'name'.*got 3"),  # type: ignore[arg-type]
    (lambda: dist.Backend.register_backend("a", 4), TypeError, "'func'.*callable, got 4"),  # type: ignore[arg-type]
    (lambda: dist.is_backend_available(None), TypeError, "'backend'.*None"),  # type: ignore[arg-type]
    (lambda: dist.supports_complex("sum"), TypeError, "supports_complex.*'op'.*'sum'"),
    (lambda: dist.reduce_op.MEAN, AttributeError, "'MEAN'.*SUM"),
]


@pytest.mark.parametrize(("call", "kind", "words"), MISUSE, ids=[case[2] for case in MISUSE])
def test_misuse_raises_a_clear_error(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_the_local_rank_is_the_launchers_then_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank(7) == theirs.get_node_local_rank(7) == 3
    monkeypatch.setenv("LOCAL_RANK", "third")
    with pytest.raises(ValueError, match=r"'LOCAL_RANK'.*'third'"):
        dist.get_node_local_rank()
    monkeypatch.delenv("LOCAL_RANK")
    assert dist.get_node_local_rank(7) == 7
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK is not in the environment.*fallback_rank"):
        dist.get_node_local_rank()


def test_elastic_launchers_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched() and "TORCHELASTIC_RUN_ID" not in os.environ
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert dist.is_torchelastic_launched() and theirs.is_torchelastic_launched()


def counts(rank: int, path: str, size: int) -> tuple[list[int], list[int]]:
    start_torch(store=theirs.FileStore(path, size), rank=rank, world_size=size)
    found: tuple[list[int], list[int]] = ([], [])
    for mine, library in zip(found, (dist, theirs), strict=True):
        mine.append(library.get_pg_count())
        library.new_group([0])
        group = library.new_group()
        library.destroy_process_group(group)
        mine.append(library.get_pg_count())
        # A rank that ends here would break the connections of another that still makes its group.
        dist.barrier()
    theirs.destroy_process_group()
    dist.destroy_process_group()
    found[0].append(dist.get_pg_count())
    found[1].append(theirs.get_pg_count())
    return found


def test_groups_are_counted_as_torch_counts_them(tmp_path: Any) -> None:
    for ours, oracle in run(counts, 2, str(tmp_path / "store"), 2, ranks="processes"):
        assert ours == oracle == [1, 3, 0]


def test_supports_complex_is_torchs_list() -> None:
    for name, member in theirs.ReduceOp.RedOpType.__members__.items():
        assert dist.supports_complex(member) == theirs.supports_complex(member), name
    assert dist.supports_complex(dist.ReduceOp(dist.ReduceOp.SUM))


def test_deprecated_reduce_op_works_and_warns() -> None:
    with pytest.warns(FutureWarning, match="reduce_op is deprecated"):
        assert dist.reduce_op.PRODUCT is dist.ReduceOp.PRODUCT
    assert dist.reduce_op.__members__ == theirs.ReduceOp.RedOpType.__members__


def worlds(rank: int, path: str) -> list[bool]:
    start_torch(store=theirs.FileStore(path, 2), rank=rank, world_size=2)
    found = []
    for library in (dist, theirs):
        everybody = library.new_group()
        found += [library.group.WORLD is library.GroupMember.WORLD, everybody is not library.group.WORLD]
        found.append(library.get_process_group_ranks(library.group.WORLD) == [0, 1])
        # As above.
        dist.barrier()
    theirs.destroy_process_group()
    dist.destroy_process_group()
    return [*found, dist.group.WORLD is None, theirs.group.WORLD is None]


def test_the_world_is_a_handle_as_in_torch(tmp_path: Any) -> None:
    assert run(worlds, 2, str(tmp_path / "store"), ranks="processes") == [[True] * 8] * 2
    assert dist.default_pg_timeout == theirs.default_pg_timeout == timedelta(minutes=30)


def test_rendezvous_works_in_any_import_order(tmp_path: Any) -> None:
    store, rank, size = next(iter(dist.rendezvous(f"file://{tmp_path}/meet?rank=0&world_size=1")))
    assert (rank, size) == (0, 1) and isinstance(store, dist.Store)
