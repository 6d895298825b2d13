"""Objects between ranks: values, torch's side effects, and one error on all ranks if pickling fails."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from tests.torchs_world import start_torch
from torchdist_ref.testing import RankError, fill, run

WORLDS = [1, 2, 3, 4]


def thing(rank: int, place: int = 0) -> dict[str, Any]:
    """Return an object whose size and content depend on the rank and on its index."""
    values = fill(rank + 3 * place, (2 + (rank * 7 + place) % 5,), torch.int64).tolist()
    return {"rank": rank, "values": values, "text": "xyz"[place % 3] * (rank * rank), "nested": [{place: None}]}


def collectives(library: Any, rank: int, size: int) -> list[Any]:
    """Return what one rank has after each object collective of a library, from every root."""
    everybody: list[Any] = [None] * size + ["kept"]
    library.all_gather_object(everybody, thing(rank))
    found: list[Any] = [everybody]
    for root in range(size):
        gathered: list[Any] | None = [None] * size if rank == root else None
        library.gather_object(thing(rank, 1), gathered, dst=root)
        shared: list[Any] = [thing(rank, place) for place in range(3)]
        first = shared[0]
        library.broadcast_object_list(shared, src=root)
        assert (shared[0] is first) == (rank == root), "the source's list is left alone"
        mine: list[Any] = ["old", "kept"]
        given = [thing(rank, place) for place in range(size)] if rank == root else None
        library.scatter_object_list(mine, given, src=root)
        found += [gathered, shared, mine]
    return found


def expected(rank: int, size: int) -> list[Any]:
    found: list[Any] = [[thing(r) for r in range(size)] + ["kept"]]
    for root in range(size):
        found.append([thing(r, 1) for r in range(size)] if rank == root else None)
        found.append([thing(root, place) for place in range(3)])
        found.append([thing(root, rank), "kept"])
    return found


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_objects_match_formulas(world_size: int, backend: str) -> None:
    found = run(lambda rank: collectives(dist, rank, world_size), world_size, backend=backend)
    assert found == [expected(rank, world_size) for rank in range(world_size)]


def beside_torch(rank: int, size: int, path: str) -> tuple[list[Any], list[Any]]:
    start_torch(store=theirs.FileStore(path, size), rank=rank, world_size=size)
    try:
        return collectives(dist, rank, size), collectives(theirs, rank, size)
    finally:
        theirs.destroy_process_group()


@pytest.mark.parametrize("world_size", WORLDS)
def test_objects_match_torchs(world_size: int, tmp_path: Path) -> None:
    for ours, oracle in run(beside_torch, world_size, world_size, str(tmp_path / "store"), ranks="processes"):
        assert ours == oracle


def in_a_subgroup(rank: int) -> Any:
    group = dist.new_group([1, 3])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, thing(rank), group)
        gathered: list[Any] | None = [None, None] if rank == 3 else None
        dist.gather_object(thing(rank, 2), gathered, dst=3, group=group)
        shared: list[Any] = [thing(rank, 1)]
        dist.broadcast_object_list(shared, group_src=1, group=group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [thing(1, 5), thing(3, 5)] if rank == 1 else None, src=1, group=group)
    # pytest's threads share the list of warnings, so only a rank of its own process could count them.
    return everybody, gathered, shared, mine, [str(warning.message) for warning in warned]


def test_subgroups_use_group_ranks_and_do_not_affect_other_ranks() -> None:
    outside, first, _, last = run(in_a_subgroup, 4, ranks="processes")
    both = [thing(1), thing(3)]
    assert first == (both, None, [thing(3, 1)], [thing(1, 5)], [])
    assert last == (both, [thing(1, 2), thing(3, 2)], [thing(3, 1)], [thing(3, 5)], [])
    assert outside[:4] == ([None, None], None, [thing(0, 1)], [None])
    names = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    assert [text.split()[1] for text in outside[4]] == list(names)
    assert all("global rank 0 which does not belong" in text for text in outside[4])


def messages(library: Any, rank: int, size: int) -> list[Any]:
    """Pass a growing list round the ring, first rank first."""
    passed = [thing(0, place) for place in range(2)]
    if rank:
        passed = [None, None]  # type: ignore[list-item]
        assert library.recv_object_list(passed, src=rank - 1, use_batch=rank % 2 == 0) == rank - 1
    if rank + 1 < size:
        library.send_object_list([*passed[:1], thing(rank, 9)], dst=rank + 1, use_batch=rank % 2 == 1)
    return passed


def messages_beside_torch(rank: int, size: int, path: str) -> tuple[list[Any], list[Any]]:
    start_torch(store=theirs.FileStore(path, size), rank=rank, world_size=size)
    try:
        return messages(dist, rank, size), messages(theirs, rank, size)
    finally:
        theirs.destroy_process_group()


def test_send_object_list_and_recv_object_list(tmp_path: Path) -> None:
    found = run(messages_beside_torch, 3, 3, str(tmp_path / "store"), ranks="processes")
    assert [ours for ours, _ in found] == [oracle for _, oracle in found]
    assert [ours[1] for ours, _ in found] == [thing(0, 1), thing(0, 9), thing(1, 9)]


def from_any_source(rank: int) -> list[tuple[int, Any]]:
    if rank:
        dist.send_object_list([thing(rank)], group_dst=0, device=torch.device("cpu"))
        return []
    got = []
    for _ in range(2):
        one: list[Any] = [None]
        got.append((dist.recv_object_list(one, device=torch.device("cpu")), one[0]))
    return sorted(got, key=lambda pair: pair[0])


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_recv_object_list_from_any_source(backend: str) -> None:
    assert run(from_any_source, 3, backend=backend)[0] == [(1, thing(1)), (2, thing(2))]


def pickled_by(rank: int, culprit: int) -> Any:
    return threading.Lock() if rank == culprit else thing(rank)


UNPICKLABLE = {
    "all_gather_object": lambda rank, bad: dist.all_gather_object([None] * 3, pickled_by(rank, bad)),
    "gather_object": lambda rank, bad: dist.gather_object(pickled_by(rank, bad), [None] * 3 if rank == 0 else None),
    "broadcast_object_list": lambda rank, bad: dist.broadcast_object_list([1, pickled_by(rank, bad)], src=bad),
    "scatter_object_list": lambda rank, bad: dist.scatter_object_list(
        [None], [1, pickled_by(rank, bad), 3] if rank == bad else None, src=bad
    ),
}


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("name", UNPICKLABLE)
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks(name: str, culprit: int, backend: str) -> None:
    def program(rank: int) -> tuple[str, bool, list[Any]]:
        with pytest.raises(TypeError) as caught:
            UNPICKLABLE[name](rank, culprit)
        after: list[Any] = [None] * 3
        dist.all_gather_object(after, rank * rank)
        return str(caught.value), isinstance(caught.value.__cause__, TypeError), after

    for rank, (text, caused, after) in enumerate(run(program, 3, backend=backend)):
        assert text.startswith(f"{name}: rank {culprit}'s object cannot be pickled (TypeError: ")
        assert "lock" in text and caused == (rank == culprit)
        assert after == [0, 1, 4]


def refuses_to_send(rank: int) -> tuple[str, float]:
    with pytest.raises(dist.ArgumentTypeError) as caught:
        if rank:
            dist.recv_object_list([None], src=0)
        else:
            dist.send_object_list([lambda: 0], dst=1)
    tensor = fill(rank, (1,))
    dist.all_reduce(tensor)
    return str(caught.value), tensor.item()


def test_the_receiver_raises_the_senders_pickling_error() -> None:
    for text, total in run(refuses_to_send, 2):
        assert says(text, "object_list", "rank 0") and total == (fill(0, (1,)) + fill(1, (1,))).item()


def says(text: str, *words: str) -> bool:
    return "cannot be pickled" in text and all(word in text for word in words)


class Trap:
    """Pickles well and refuses to be unpickled."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_an_object_that_cannot_be_unpickled_names_its_rank() -> None:
    def program(rank: int) -> list[str]:
        with pytest.raises(ValueError, match="no number") as caught:
            dist.all_gather_object([None, None], Trap() if rank else 0)
        dist.barrier()
        return caught.value.__notes__

    assert (
        run(program, 2)
        == [["all_gather_object: the object arrived complete from rank 1, but cannot be unpickled here."]] * 2
    )


ONE = [None]
MISUSE: list[tuple[str, Any, type[Exception], str]] = [
    ("short output", lambda r: dist.all_gather_object([], r), IndexError, r"'object_list'.*2 entries.*got 0 \(on rank"),
    ("no list at dst", lambda r: dist.gather_object(r), ValueError, "object_gather_list`` must be specified"),
    ("list elsewhere", lambda r: dist.gather_object(r, ONE * 2, 0), ValueError, "must NOT be specified on non-dest"),
    (
        "short gather",
        lambda r: dist.gather_object(r, ONE if r == 0 else None),
        IndexError,
        "'object_gather_list'.*got 1",
    ),
    ("dst missing", lambda r: dist.gather_object(r, ONE, 2), ValueError, "gather_object.*'dst'.*got 2"),
    ("dst twice", lambda r: dist.gather_object(r, ONE, 0, None, 0), ValueError, "both dst and group_dst"),
    ("no input", lambda r: dist.scatter_object_list([1]), ValueError, "'scatter_object_input_list'.*2 objects.*None"),
    ("short input", lambda r: dist.scatter_object_list([1], ONE), ValueError, r"input_list'.*got 1 \(on rank 0\)"),
    (
        "no output",
        lambda r: dist.scatter_object_list([], [1, 2]),
        ValueError,
        r"size at least 1, got \[\] \(on rank \d",
    ),
    ("to oneself", lambda r: dist.send_object_list([1], dst=r), ValueError, "Invalid destination rank"),
    ("from oneself", lambda r: dist.recv_object_list([1], src=r), ValueError, "Invalid source rank"),
]


@pytest.mark.parametrize(("call", "kind", "words"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse_raises_on_every_rank_and_the_group_remains_usable(call: Any, kind: type[Exception], words: str) -> None:
    def program(rank: int) -> list[Any]:
        with pytest.raises(kind, match=words):
            call(rank)
        after: list[Any] = [None, None]
        dist.all_gather_object(after, rank + 5)
        return after

    assert run(program, 2) == [[5, 6], [5, 6]]


def unequal(rank: int) -> str:
    objects: list[Any] = [rank] * (2 + rank)
    try:
        dist.broadcast_object_list(objects, src=0)
    except dist.ArgumentError as error:
        return f"{error} {objects}"
    return "received"


def test_lists_of_unequal_length_raise_on_the_ranks_that_differ() -> None:
    source, other = run(unequal, 2, backend="gloo")
    assert source == "received"
    assert "'object_list' must be as long as the sender's list, 2, got 3 (on rank 1)" in other and "[1, 1, 1]" in other


def test_a_sender_that_has_exited_is_an_error() -> None:
    with pytest.raises(RankError, match="recv") as caught:
        run(lambda rank: rank or dist.recv_object_list([None], src=1), 2)
    assert isinstance(caught.value.__cause__, dist.DistBackendError)
