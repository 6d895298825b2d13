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
from torchdist_ref import authentication
from torchdist_ref.testing import fill, run


class Attack:
    """Object whose unpickling creates a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def join(rank: int, folder: str, kind: str) -> Any:
    """Initialize two ranks "on several hosts" without a token, and return a group of them.

    Args:
        rank: This rank.
        folder: Folder of the store.
        kind: Backend, then how to make a group: by nothing, by our function or by torch's; or a job that torch
            initializes.
    """
    os.environ.pop(authentication.SECRET, None)
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
