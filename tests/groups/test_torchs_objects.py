"""torch's own object collectives on our groups: a peer that is not authenticated runs no code, whatever the backend."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs
import torch.distributed.checkpoint as checkpoint
from torch.distributed import distributed_c10d as c10d

import torchdist_ref as dist
from torchdist_ref.backends.ref_in_torch import objects
from torchdist_ref.membership import trust as authentication
from torchdist_ref.testing import fill, run


class Attack:
    """Object whose unpickling creates a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def join(rank: int, folder: str, kind: str, authenticated: bool = False) -> Any:
    """Initialize two ranks "on several hosts" without a token, or on one host, and return a group of them.

    Args:
        rank: This rank.
        folder: Folder of the store.
        kind: Backend, then how to make a group: by nothing, by our function or by torch's; or a job that torch
            initializes.
        authenticated: Whether the ranks are on one host.
    """
    os.environ.pop(authentication.SECRET, None)
    if not authenticated:
        authentication._network = lambda: str(rank)  # type: ignore[assignment]
    backend, _, maker = kind.partition("-")
    if maker == "of_torch":
        theirs.init_process_group(backend, init_method=f"file://{folder}/torchs", rank=rank, world_size=2)
        return None
    dist.init_process_group(
        "ref" if maker else backend, store=dist.FileStore(f"{folder}/ours", 2), rank=rank, world_size=2
    )
    makers: dict[str, Callable[[], Any]] = {
        "": lambda: None,
        "by_us": lambda: dist.new_group([0, 1], backend=backend),
        "by_torch": lambda: theirs.new_group([0, 1], backend=backend),
    }
    return makers[maker]()


def leave() -> None:
    theirs.barrier()
    theirs.destroy_process_group()


def exchange(operation: str, rank: int, value: Any, group: Any) -> Any:
    """Call an object collective of torch in which rank 0 receives from rank 1; return its object."""
    own: list[Any] = [value]
    if operation == "all_gather_object":
        gathered: list[Any] = [None, None]
        theirs.all_gather_object(gathered, value, group)
        return gathered[1]
    if operation == "gather_object":
        gathered = [None, None]
        theirs.gather_object(value, gathered if rank == 0 else None, dst=0, group=group)
        return gathered[1]
    if operation == "broadcast_object_list":
        theirs.broadcast_object_list(own, src=1, group=group)
    elif operation == "scatter_object_list":
        theirs.scatter_object_list(own, [value, value] if rank == 1 else None, src=1, group=group)
    elif rank == 1:
        theirs.send_object_list(own, dst=0, group=group)
    else:
        theirs.recv_object_list(own, src=1, group=group)
    return own[0]


OPERATIONS = ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"]
KINDS = ["ref", "gloo", "gloo-by_us", "ref-by_torch", "gloo-by_torch", "ref-of_torch"]


def attacked(rank: int, folder: str, kind: str) -> list[str]:
    """Rank 1 stands for a process that has joined from elsewhere: it sends pickles, whatever was agreed."""
    group, found = join(rank, folder, kind), []
    for number, operation in enumerate(OPERATIONS):
        data = pickle.dumps(Attack(f"{folder}/ran{number}"))
        if rank == 1:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone(), torch.tensor([len(data)])
            c10d._object_to_tensor = lambda *_, sent=sent: sent  # type: ignore[assignment, misc]
            c10d._tensor_to_object = lambda *_: None  # type: ignore[assignment]
        try:
            found.append(repr(exchange(operation, rank, "own", group)))
        except ValueError as error:
            notes = "".join(getattr(error, "__notes__", ()))
            found.append(f"{type(error).__name__}: {error} {notes}")
    leave()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_pickle_runs_no_code(kind: str, tmp_path: Path) -> None:
    found = run(attacked, 2, str(tmp_path), kind, ranks="processes", init=False)[0]
    assert not list(tmp_path.glob("ran*")), "code of the sender ran"
    for text in found:
        assert text.startswith("NotPlainError") and authentication.SECRET_FILE in text, found


VALUE = {"loss": 0.5, "shape": (3, None), "words": ["ß", b"\0"], "state": OrderedDict(step=torch.tensor(2.5))}


def exchanged(rank: int, folder: str, kind: str) -> tuple[list[Any], list[str]]:
    group = join(rank, folder, kind)
    found = [exchange(operation, rank, [VALUE, rank, fill(rank, (rank + 2,))], group) for operation in OPERATIONS]
    errors = []
    for value in (Fraction(1, 3), [torch.nn.Linear(1, 1)]):
        try:
            theirs.all_gather_object([None, None], value, group)
        except dist.PicklingError as error:
            errors.append(str(error))
    leave()
    return found, errors


@pytest.mark.parametrize("kind", KINDS)
def test_plain_data_arrives_and_the_error_for_others_names_both_cures(kind: str, tmp_path: Path) -> None:
    by_rank = run(exchanged, 2, str(tmp_path), kind, ranks="processes", init=False)
    for value, source, tensor in by_rank[0][0]:
        assert value == VALUE and source == 1 and torch.equal(tensor, fill(1, (3,)))
    for rank, (found, errors) in enumerate(by_rank):
        assert len(found) == len(OPERATIONS) and len(errors) == 2
        for text, name in zip(errors, ("Fraction", "Linear"), strict=True):
            assert f"torch.distributed: rank {rank}'s object has a {name} in it" in text
            assert authentication.SECRET_FILE in text and f"{authentication.TRUST_NETWORK}=1" in text


def trusting(rank: int, folder: str, kind: str, trust: str) -> list[Any]:
    os.environ[authentication.TRUST_NETWORK] = trust
    group, found = join(rank, folder, kind), []
    for call in (
        lambda: exchange("all_gather_object", rank, Fraction(rank, 3), group),
        lambda: checkpoint.save({"weight": fill(rank, (2,))}, checkpoint_id=f"{folder}/saved") and "saved",
    ):
        try:
            found.append(call())
        except dist.PicklingError as error:
            found.append(type(error).__name__)
    leave()
    return found


@pytest.mark.parametrize("kind", ["gloo", "ref-of_torch"])
@pytest.mark.parametrize("trust", ["1", ""])
def test_where_the_user_trusts_the_network_torch_pickles(kind: str, trust: str, tmp_path: Path) -> None:
    expected = [Fraction(1, 3), "saved"] if trust else ["PicklingError"] * 2
    assert run(trusting, 2, str(tmp_path), kind, trust, ranks="processes", init=False) == [expected] * 2


def part_of_one_host(rank: int, folder: str) -> list[bool]:
    os.environ |= {"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}
    os.environ.pop(authentication.SECRET, None)
    authentication._network = lambda: str(rank)  # type: ignore[assignment]
    theirs.init_process_group("ref", init_method=f"file://{folder}/torchs", rank=rank, world_size=3)
    groups: list[Any] = [theirs.group.WORLD, theirs.new_group([0, 1])]
    found = [group.pickles_objects for group in groups[: 2 if rank < 2 else 1]]
    leave()
    return found


def test_a_group_of_torch_with_a_part_of_one_host_does_not_ask_the_store(tmp_path: Path) -> None:
    """A launcher reports that all ranks are on this host, and another user announces other networks in the store."""
    assert run(part_of_one_host, 3, str(tmp_path), ranks="processes", init=False) == [[True] * 2, [True] * 2, [True]]


def torchs_own(rank: int, folder: str) -> Any:
    """Make a group of ours, end it, and return what torch's Gloo gathers afterward."""
    join(rank, folder, "ref")
    leave()
    theirs.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    return exchange("all_gather_object", rank, Fraction(rank, 3), None)


def test_torchs_own_groups_pickle_as_before(tmp_path: Path) -> None:
    assert run(torchs_own, 2, str(tmp_path), ranks="processes", init=False) == [Fraction(1, 3)] * 2


SEALED = ["gloo", "gloo-by_us", "gloo-by_torch"]


def joined(rank: int, folder: str, kind: str) -> Any:
    """As `join`, for ranks that are authenticated; "ref-of_torch-gloo" is Gloo's group below torch's own default."""
    group = join(rank, folder, kind.removesuffix("-gloo"), authenticated=True)
    return theirs.new_group([0, 1], backend="gloo") if kind == "ref-of_torch-gloo" else group


def refused(operation: str, rank: int, group: Any) -> str:
    try:
        return repr(exchange(operation, rank, "own", group))
    except dist.AuthenticationError as error:
        return str(error)


def replaced(pickled: bytes) -> Callable[..., Any]:
    """Return a function that sends a pickle as torch does."""
    sent = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    return lambda *_: (sent.clone(), torch.tensor([len(pickled)]))


def intruded(rank: int, folder: str, kind: str) -> list[str]:
    """Rank 1 stands for a process that has got into the connections: it sends a pickle with no code, or a wrong one."""
    group, found = joined(rank, folder, kind), []
    for number, operation in enumerate(OPERATIONS):
        for begin in (b"", b"\0" * 32 + bytes(12)):
            if rank == 1:
                pickled = begin + pickle.dumps(Attack(f"{folder}/ran{number}"))
                c10d._object_to_tensor = replaced(pickled)  # type: ignore[assignment]
                c10d._tensor_to_object = lambda *_: None  # type: ignore[assignment]
            found.append(refused(operation, rank, group))
    leave()
    return found


@pytest.mark.parametrize("kind", [*SEALED, "ref-of_torch-gloo"])
def test_a_pickle_from_outside_runs_no_code_in_authenticated_ranks(kind: str, tmp_path: Path) -> None:
    found = run(intruded, 2, str(tmp_path), kind, ranks="processes", init=False)[0]
    assert not list(tmp_path.glob("ran*")), "code of the sender ran"
    for text in found:
        assert "was not written by a member of this job" in text and "'gloo'" in text, found


def between(rank: int, folder: str, kind: str) -> list[str]:
    """Rank 1 stands for a process between the ranks, without the key: it sends the first object of each call again."""
    group, found, to_tensor = joined(rank, folder, kind), [], c10d._object_to_tensor
    for operation in OPERATIONS:
        recorded: list[tuple[torch.Tensor, torch.Tensor]] = []

        def record(*args: Any, recorded: list[Any] = recorded) -> Any:
            if not recorded:
                recorded.append(to_tensor(*args))
            return tuple(each.clone() for each in recorded[0])

        if rank == 1:
            c10d._object_to_tensor, c10d._tensor_to_object = record, lambda *_: "own"  # type: ignore[assignment]
        found += [refused(operation, rank, group) for _ in range(2)]
    leave()
    return found


@pytest.mark.parametrize("kind", SEALED)
def test_an_object_that_arrives_again_is_refused(kind: str, tmp_path: Path) -> None:
    found = run(between, 2, str(tmp_path), kind, ranks="processes", init=False)[0]
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first == "'own'" and "of rank 1" in second and "has arrived before" in second, found


def all_kinds(rank: int, folder: str, kind: str) -> list[Any]:
    group = joined(rank, folder, kind)
    values = [Fraction(rank + 1, 3), {"weight": fill(rank, (rank + 2,))}, "ß" * 3000 * (rank + 1)]
    found = [exchange(operation, rank, value, group) for value in values for operation in OPERATIONS]
    lists = [[Fraction(1, 7), "x" * 300, None] if rank == 1 else [0] * 3 for _ in range(2)]
    theirs.broadcast_object_list(lists[0], src=1, group=group)
    (theirs.send_object_list if rank else theirs.recv_object_list)(lists[1], 1 - rank, group)
    leave()
    return [*found, *lists]


@pytest.mark.parametrize("kind", ["ref", "ref-of_torch", *SEALED, "ref-of_torch-gloo"])
def test_authenticated_ranks_exchange_any_object(kind: str, tmp_path: Path) -> None:
    found = run(all_kinds, 2, str(tmp_path), kind, ranks="processes", init=False)[0]
    count = len(OPERATIONS)
    assert found[:count] == [Fraction(2, 3)] * count
    assert all(torch.equal(each["weight"], fill(1, (3,))) for each in found[count : 2 * count])
    assert found[2 * count : 3 * count] == ["ß" * 6000] * count
    assert found[3 * count :] == [[Fraction(1, 7), "x" * 300, None]] * 2


def test_backend_fake_returns_this_ranks_object_for_each() -> None:
    """Its one rank has no peers, so no code is needed."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=3)
    for module in (dist, theirs):
        gathered = [None] * 3
        module.all_gather_object(gathered, Fraction(1, 3))
        assert gathered == [Fraction(1, 3)] * 3
    dist.destroy_process_group()


def test_a_number_is_accepted_once_in_any_order_unless_it_is_old() -> None:
    numbers = objects.MessageNumbers()
    near = [5, 3, 4, 0, 9, 7]
    assert [numbers.accept(1, each) for each in near] == [True] * 6
    assert [numbers.accept(1, each) for each in near] == [False] * 6
    assert numbers.accept(2, 5), "each sender has its own numbers"
    assert numbers.accept(1, 9 + objects.WINDOW) and not numbers.accept(1, 9) and not numbers.accept(1, 8)
    assert numbers.accept(1, 10) and not numbers.accept(1, 10)
    assert numbers.accept(1, 2**64 - 1) and not numbers.accept(1, 2**64 - 1)
