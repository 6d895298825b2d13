"""Objects of peers that are not authenticated: no payload runs code, whatever the backend."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.groups import pickling
from torchdist_ref.membership import trust as authentication
from torchdist_ref.testing import fill, run


class Attack:
    """Object whose unpickling creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def join(rank: int, folder: str, backend: str, authenticated: bool) -> None:
    os.environ.pop(authentication.SECRET, None)
    if not authenticated:
        authentication._network = lambda: str(rank)  # type: ignore[assignment]
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)


def receive(operation: str, rank: int) -> Any:
    """Call an object collective in which rank 0 receives from rank 1; return the received object."""
    own: list[Any] = ["own"]
    if operation == "all_gather_object":
        gathered = [None, None]
        dist.all_gather_object(gathered, own[0])
        return gathered[1]
    if operation == "gather_object":
        gathered = [None, None]
        dist.gather_object(own[0], gathered if rank == 0 else None, dst=0)
        return gathered[1]
    if operation == "broadcast_object_list":
        dist.broadcast_object_list(own, src=1)
    elif operation == "scatter_object_list":
        dist.scatter_object_list(own, ["own", "own"] if rank == 1 else None, src=1)
    elif rank == 1:
        dist.send_object_list(own, dst=0)
    else:
        dist.recv_object_list(own, src=1)
    return own[0]


def attacked(rank: int, folder: str, backend: str, authenticated: bool) -> list[str]:
    """Rank 1 stands for a process that has got into the connections: it sends pickles, with no or a wrong code."""
    join(rank, folder, backend, authenticated)
    found = []
    for number, operation in enumerate(OPERATIONS):
        hostile = b"\0" * 32 + (1000).to_bytes(8, "little") if authenticated else b""
        pickled = pickle.dumps(Attack(f"{folder}/ran{number}"))
        if rank == 1:
            pickling.dump_object = lambda *_, data=hostile + pickled: data  # type: ignore[assignment]
            pickling.load_object = lambda *_: None  # type: ignore[assignment]
        try:
            found.append(repr(receive(operation, rank)))
        except (dist.DistError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    dist.destroy_process_group()
    return found


OPERATIONS = ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"]


@pytest.mark.parametrize(("backend", "authenticated"), [("ref", False), ("gloo", False), ("gloo", True)])
def test_a_hostile_pickle_runs_no_code(backend: str, authenticated: bool, tmp_path: Path) -> None:
    found = run(attacked, 2, str(tmp_path), backend, authenticated, ranks="processes", init=False)[0]
    assert not list(tmp_path.glob("ran*")), "code of the sender ran"
    expected = "AuthenticationError" if authenticated else "NotPlainError"
    assert [text.partition(":")[0] for text in found] == [expected] * len(OPERATIONS), found


def exchanged(rank: int, folder: str, backend: str, authenticated: bool) -> list[Any]:
    join(rank, folder, backend, authenticated)
    value = {"rank": rank, "tensor": fill(rank, (3,)), "nested": [(1.5, None), "ß"]}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, value)
    words = [["from", rank]]
    dist.broadcast_object_list(words, src=1)
    try:
        dist.all_gather_object([None, None], Path("x") if rank == 1 else None)
        text = ""
    except dist.PicklingError as error:
        text = str(error)
    dist.destroy_process_group()
    return [gathered, words, text]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("authenticated", [True, False])
def test_objects_arrive_with_and_without_authentication(backend: str, authenticated: bool, tmp_path: Path) -> None:
    for gathered, words, text in run(
        exchanged, 2, str(tmp_path), backend, authenticated, ranks="processes", init=False
    ):
        assert [value["rank"] for value in gathered] == [0, 1] and words == [["from", 1]]
        assert all(torch.equal(value["tensor"], fill(rank, (3,))) for rank, value in enumerate(gathered))
        assert all(value["nested"] == [(1.5, None), "ß"] for value in gathered)
        if authenticated:
            assert text == ""
        else:
            assert "rank 1's object has a PosixPath in it" in text, text
            assert authentication.SECRET_FILE in text and f"{authentication.TRUST_NETWORK}=1" in text


def trusting(rank: int, folder: str) -> Any:
    os.environ[authentication.TRUST_NETWORK] = "1"
    join(rank, folder, "gloo", False)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, partial(divmod, rank + 7))
    dist.destroy_process_group()
    return [each(2) for each in gathered]


def test_a_trusted_network_exchanges_any_object(tmp_path: Path) -> None:
    assert run(trusting, 2, str(tmp_path), ranks="processes", init=False) == [[(3, 1), (4, 0)]] * 2


def replayed(rank: int, folder: str) -> list[str]:
    """Rank 1 stands for a process between the ranks, which knows no key: it sends its first pickle again."""
    join(rank, folder, "gloo", True)
    found, dump, recorded = [], pickling.dump_object, {}

    def record(group: dist.ProcessGroup, exchange: str, value: Any, weights_only: bool) -> bytes:
        kind = exchange.partition(" ")[0]
        return recorded.setdefault(kind, dump(group, exchange, value, weights_only))

    for operation in OPERATIONS:
        for _ in range(2):
            if rank == 1:
                pickling.dump_object = record
                pickling.load_object = lambda *_: ["own"]
            try:
                found.append(repr(receive(operation, rank)))
            except dist.AuthenticationError as error:
                found.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_pickle_of_another_call_is_refused(tmp_path: Path) -> None:
    found = run(replayed, 2, str(tmp_path), ranks="processes", init=False)[0]
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first == "'own'" and "was not written by a member of this job for this call" in second


def test_each_message_of_a_direction_has_a_number() -> None:
    def program(rank: int) -> list[str]:
        group = dist.new_group()
        ends = (0, 1), (1, 0), (0, 1)
        return [pickling.next_message(group, *pair) for pair in ends]

    assert run(program, 1) == [["message 0 to 1 0", "message 1 to 0 0", "message 0 to 1 1"]]
