"""all_to_all_single, batches of messages, coalesced calls: values and futures, beside torch's Gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from torch import Tensor

import torchdist_ref as dist
from tests.torch_versions import torch_has
from tests.torchs_world import start_torch
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.work import JoinedWork

WORLDS = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.complex64]
BACKENDS = ["ref", "gloo"]


def rows_between(source: int, target: int) -> int:
    """How many rows a rank sends to another: different for all pairs, none for some."""
    return (source * 3 + target * target) % 5


def rows_of(source: int, target: int, dtype: torch.dtype) -> Tensor:
    return fill(7 * source + target, (rows_between(source, target), 3), dtype)


def exchange(library: Any, rank: int, size: int, dtype: torch.dtype, group: Any = None, members: Any = None) -> Tensor:
    everybody = range(size) if members is None else members
    sent = torch.cat([rows_of(rank, target, dtype) for target in everybody])
    received = torch.zeros(sum(rows_between(source, rank) for source in everybody), 3, dtype=dtype)
    to = [rows_between(rank, target) for target in everybody]
    library.all_to_all_single(received, sent, [rows_between(source, rank) for source in everybody], to, group)
    return received


def equal_blocks(library: Any, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    received = torch.zeros(2 * size, 3, dtype=dtype)
    library.all_to_all_single(received, fill(rank, (2 * size, 3), dtype))
    return received


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_single_of_blocks_of_any_size(world_size: int, backend: str) -> None:
    def program(rank: int) -> None:
        for dtype in DTYPES:
            if backend == "ref" or not dtype.is_complex:
                mine = equal_blocks(dist, rank, world_size, dtype)
                blocks = [
                    fill(source, (2 * world_size, 3), dtype)[2 * rank : 2 * rank + 2] for source in range(world_size)
                ]
                assert torch.equal(mine, torch.cat(blocks))
            wanted = torch.cat([rows_of(source, rank, dtype) for source in range(world_size)])
            assert torch.equal(exchange(dist, rank, world_size, dtype), wanted)

    run(program, world_size, backend=backend)


def async_exchanges(rank: int) -> None:
    size, works, outputs = 3, [], []
    for place in range(4):
        rows = [1 + (rank + target + place) % 3 for target in range(size)]
        sent = torch.cat([fill(9 * place + 3 * rank + target, (rows[target], 2)) for target in range(size)])
        outputs.append(torch.zeros(sum(rows), 2))
        works.append(dist.all_to_all_single(outputs[-1], sent, rows, rows, async_op=True))
    for place in (2, 0, 3, 1):
        work = works[place]
        assert work is not None and work.wait() is True and work.is_completed() and work.is_success()
        future = work.get_future().wait()
        assert len(future) == 1 and future[0].data_ptr() == outputs[place].data_ptr()
        wanted = [fill(9 * place + 3 * s + rank, (1 + (rank + s + place) % 3, 2)) for s in range(size)]
        assert torch.equal(outputs[place], torch.cat(wanted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_async_all_to_all_calls_may_overlap(backend: str) -> None:
    run(async_exchanges, 3, backend=backend)


def strided_exchange(rank: int) -> None:
    base = torch.zeros(6, 5)
    output, source = base[::2, 1:4:2], fill(rank, (4, 3)).t()
    dist.all_to_all_single(output, source[:, :2], [2, 1] if rank == 0 else [1, 2], [2, 1] if rank == 0 else [1, 2])
    parts = [fill(0, (4, 3)).t()[:, :2], fill(1, (4, 3)).t()[:, :2]]
    wanted = torch.cat([parts[0][:2], parts[1][:1]] if rank == 0 else [parts[0][2:], parts[1][1:]])
    assert torch.equal(output, wanted)
    base[::2, 1:4:2] = 0
    assert torch.equal(base, torch.zeros(6, 5)), "nothing outside the view was written"


def test_strided_tensors_are_written_in_place() -> None:
    run(strided_exchange, 2)


def in_a_subgroup(rank: int) -> bool:
    group, members = dist.new_group([0, 2, 3]), [0, 2, 3]
    if rank not in members:
        with pytest.warns(UserWarning, match="all_to_all_single on global rank 1"):
            assert exchange(dist, rank, 4, torch.float32, group, members).sum() == 0
        return True
    wanted = torch.cat([rows_of(source, rank, torch.float32) for source in members])
    return torch.equal(exchange(dist, rank, 4, torch.float32, group, members), wanted)


def test_all_to_all_in_a_subgroup() -> None:
    assert run(in_a_subgroup, 4, ranks="processes") == [True] * 4


def pairs(library: Any, rank: int, size: int) -> list[list[float]]:
    """Send to every other rank in one batch, with tags, the receives first on odd ranks."""
    got = {peer: torch.zeros(peer + 2) for peer in range(size) if peer != rank}
    sends = [library.P2POp(library.isend, fill(10 * rank + p, (rank + 2,)), p, tag=rank) for p in got]
    receives = [library.P2POp(library.irecv, got[p], group_peer=p, tag=p) for p in got]
    ops = [*receives, *sends] if rank % 2 else [*sends, *receives]
    for work in library.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return [got[peer].tolist() for peer in got]


def of_one_tensor(library: Any) -> tuple[Any, Any]:
    """Return the functions on blocks of one tensor, by the older names in a torch that lacks the present ones."""
    if library is theirs and not torch_has("2.13"):
        return library.all_gather_into_tensor, library.reduce_scatter_tensor
    return library.all_gather_single, library.reduce_scatter_single


def coalesced(library: Any, rank: int, size: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [fill(rank, (5,)), fill(rank + 4, (2, 3)), fill(rank + 9, ())]
        library.all_reduce_coalesced(tensors, theirs.ReduceOp.MAX)
        everybody = [[torch.zeros(2), torch.zeros(3, 2)] for _ in range(size)]
        library.all_gather_coalesced(everybody, [fill(rank, (2,)), fill(rank + 1, (3, 2))])
        later = [fill(rank, (4,)), fill(rank + 2, (1,))]
        future = library.all_reduce_coalesced(later, async_op=True)
        assert [tensor.data_ptr() for tensor in future.wait()] == [tensor.data_ptr() for tensor in later]
        output, part = torch.zeros(3 * size), torch.zeros(2)
        gather, scatter = of_one_tensor(library)
        gather(output, fill(rank, (3,)))
        scatter(part, fill(rank, (2 * size,)), theirs.ReduceOp.MIN)
    return [t.tolist() for t in [*tensors, *(t for tensors in everybody for t in tensors), *later, output, part]]


def single_and_many(library: Any, rank: int, size: int) -> list[Any]:
    found = [exchange(library, rank, size, dtype).tolist() for dtype in DTYPES]
    found += [equal_blocks(library, rank, size, dtype).tolist() for dtype in DTYPES]
    return [*found, pairs(library, rank, size), coalesced(library, rank, size)]


def beside_torch(rank: int, size: int, path: str) -> tuple[list[Any], list[Any]]:
    start_torch(store=theirs.FileStore(path, size), rank=rank, world_size=size)
    try:
        return single_and_many(dist, rank, size), single_and_many(theirs, rank, size)
    finally:
        theirs.destroy_process_group()


@pytest.mark.parametrize("world_size", WORLDS)
def test_results_are_those_of_torchs_gloo(world_size: int, tmp_path: Path) -> None:
    for ours, oracle in run(beside_torch, world_size, world_size, str(tmp_path / "store"), ranks="processes"):
        assert ours == oracle


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_and_coalesced_calls_match_formulas(world_size: int, backend: str) -> None:
    size = world_size

    def program(rank: int) -> None:
        wanted = [fill(10 * peer + rank, (peer + 2,)).tolist() for peer in range(size) if peer != rank]
        assert pairs(dist, rank, size) == wanted
        found = coalesced(dist, rank, size)
        maxima = [torch.stack([fill(r + k, shape) for r in range(size)]).amax(0) for k, shape in SHAPES]
        assert found[:3] == [maximum.tolist() for maximum in maxima]
        gathered = [fill(r + k, shape).tolist() for r in range(size) for k, shape in ((0, (2,)), (1, (3, 2)))]
        assert found[3 : 3 + 2 * size] == gathered
        assert found[-4] == torch.stack([fill(r, (4,)) for r in range(size)]).sum(0).tolist()
        assert found[-2] == torch.cat([fill(r, (3,)) for r in range(size)]).tolist()
        least = torch.stack([fill(r, (2 * size,)) for r in range(size)]).amin(0)
        assert found[-1] == least[2 * rank : 2 * rank + 2].tolist()

    run(program, size, backend=backend)


SHAPES: list[tuple[int, tuple[int, ...]]] = [(0, (5,)), (4, (2, 3)), (9, ())]


def one_tensor_alone(rank: int) -> float:
    tensor = fill(rank, (1,))
    assert dist.all_reduce_coalesced(tensor) is None
    return tensor.item()


def test_a_single_tensor_is_a_list_of_one() -> None:
    assert run(one_tensor_alone, 2) == [(fill(0, (1,)) + fill(1, (1,))).item()] * 2


def future_of_blocks(rank: int) -> bool:
    output = torch.zeros(4)
    work = dist.all_gather_into_tensor(output, fill(rank, (2,)), async_op=True)
    assert work is not None
    (value,) = work.get_future().wait()
    work.wait()
    return value.data_ptr() == output.data_ptr() and torch.equal(value, torch.cat([fill(0, (2,)), fill(1, (2,))]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_future_of_all_to_all_single_holds_the_output(backend: str) -> None:
    assert run(future_of_blocks, 2, backend=backend) == [True, True]


def inside_a_callback(rank: int) -> list[float]:
    """Wait for an exchange in a completion callback, on the thread that other callbacks need."""
    output, first = torch.zeros(3), fill(rank, (1,))
    work = dist.all_reduce(first, async_op=True)
    assert work is not None

    def then(_: Any) -> bool:
        rows = [1, 2] if rank == 0 else [2, 1]
        later = dist.all_to_all_single(output, fill(rank, (3,)), rows, rows, async_op=True)
        assert later is not None
        return later.wait()

    assert work.get_future().then(then).wait()
    return output.tolist()


def test_a_callback_may_wait_for_all_to_all_without_deadlock() -> None:
    zero, one = fill(0, (3,)), fill(1, (3,))
    assert run(inside_a_callback, 2) == [[zero[0], one[0], one[1]], [zero[1], zero[2], one[2]]]


def test_mismatched_split_sizes_are_named() -> None:
    def program(rank: int) -> str:
        rows = [1, 2] if rank == 0 else [1, 1]
        output, sent = torch.full((3 - rank,), -1.0), torch.ones(3 - rank)
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_to_all_single(output, sent, rows, rows)
        assert output.eq(-1).all(), "nothing was written"
        tensor = fill(rank, (1,))
        dist.all_reduce(tensor)
        assert tensor.item() == (fill(0, (1,)) + fill(1, (1,))).item()
        return str(caught.value)

    for rank, text in enumerate(run(program, 2)):
        assert f"of float32 on rank {rank} of group 'world'" in text
        assert "rank 0 sends 2 elements to rank 1, which expects 1" in text


def too_little_on_gloo(rank: int) -> list[float]:
    output = torch.full((2 if rank == 0 else 4,), -1.0)
    dist.all_to_all_single(output, fill(rank, (2,)), [1, 1] if rank == 0 else [3, 1], [1, 1])
    return output.tolist()


def test_rows_that_gloo_does_not_write_are_unchanged() -> None:
    """Gloo raises no error either: sizes are compared only at the debug level DETAIL."""
    first, second = (fill(rank, (2,)).tolist() for rank in range(2))
    assert run(too_little_on_gloo, 2, backend="gloo", ranks="processes") == [
        [first[0], second[0]],
        [first[1], -1.0, -1.0, second[1]],
    ]


@pytest.mark.parametrize("algorithm", ["pairwise", "bruck"])
def test_equal_and_unequal_blocks_use_one_algorithm(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", f"all_to_all={algorithm}")
    given = [[2, 2, 2], [1, 2, 0], [3, 2, 4]]

    def program(rank: int) -> list[float]:
        taken = [row[rank] for row in given]
        output = torch.zeros(sum(taken))
        dist.all_to_all_single(output, fill(rank, (sum(given[rank]),)), taken, given[rank])
        return output.tolist()

    blocks = [fill(rank, (sum(sizes),)).split(sizes) for rank, sizes in enumerate(given)]
    assert run(program, 3) == [torch.cat([row[rank] for row in blocks]).tolist() for rank in range(3)]


class Boom(Exception):
    pass


def test_joined_work_waits_for_all_parts_and_raises_the_first_error() -> None:
    def fails() -> None:
        raise Boom("afterwards")

    parts = [dist.Work("a", []), dist.Work("b", [])]
    work = JoinedWork("both", ["out"], parts)
    future = work.get_future()
    parts[0].fail(Boom("first"))
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    with pytest.raises(dist.RankStalledError, match=r"both: not done after 0\.01 s"):
        work.wait(timedelta(milliseconds=10))
    parts[1].finish()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), Boom)
    with pytest.raises(Boom, match="first"):
        work.wait()
    with pytest.raises(Exception, match="first"):
        future.wait()
    with pytest.raises(Boom, match="afterwards"):
        JoinedWork("none", [], [], fails).wait()


T, I64 = torch.ones(4), torch.ones(4, dtype=torch.int64)
# Two blocks of three elements, in three rows.
STRIDED = torch.zeros(2, 3).t()
Single = dist.all_to_all_single


def other() -> int:
    return 1 - dist.get_rank()


def mixed_groups() -> Any:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, T, other()), dist.P2POp(dist.isend, T, other(), group)])


MISUSE: list[tuple[str, Any, type[Exception], str]] = [
    ("output of wrong size", lambda: Single(torch.ones(6), T), ValueError, "all_to_all_single.*'output'.*4 elements"),
    ("odd rows", lambda: Single(torch.ones(3), torch.ones(3)), ValueError, "'output'.*first dimension divides by 2"),
    ("too few splits", lambda: Single(T, T, [4], [4]), ValueError, r"'output_split_sizes'.*2 ranks.*got \[4\]"),
    ("splits that don't add up", lambda: Single(T, T, None, [1, 2]), ValueError, "input_split_sizes'.*add up.* 4 rows"),
    ("negative split", lambda: Single(T, T, [5, -1]), ValueError, "'output_split_sizes'.*from 0 up"),
    ("splits of text", lambda: Single(T, T, "ab"), ValueError, "'output_split_sizes'.*'ab'"),
    ("dtypes", lambda: Single(T, I64), ValueError, "different dtypes"),
    ("no tensor", lambda: Single([T], T), TypeError, "`output`"),
    ("keeps another number", lambda: Single(T, T, [1, 3], [2, 2]), ValueError, r"output_split_sizes\[\d\].*to itself"),
    ("odd op", lambda: dist.P2POp(dist.send, T, 0), ValueError, "P2POp.*'op'.*isend.*Invalid ``op``"),
    ("op without a tensor", lambda: dist.P2POp(dist.isend, [T], 0), TypeError, "P2POp.*`tensor`"),
    ("no peer", lambda: dist.P2POp(dist.isend, T), ValueError, "Must specify peer or group_peer"),
    ("peer too far", lambda: dist.P2POp(dist.irecv, T, 5), ValueError, "P2POp.*'peer'.*got 5"),
    ("empty batch", lambda: dist.batch_isend_irecv([]), IndexError, "'p2p_op_list'.*at least one"),
    ("batch of tensors", lambda: dist.batch_isend_irecv([T]), ValueError, "'p2p_op_list'.*P2POp"),
    ("groups mixed", mixed_groups, ValueError, "need to use the same group.*world"),
    ("coalesced dtypes", lambda: dist.all_reduce_coalesced([T, I64]), ValueError, "different dtypes"),
    ("coalesced number", lambda: dist.all_reduce_coalesced([1]), TypeError, "all_reduce_coalesced.*`tensors`"),
    ("coalesced op", lambda: dist.all_reduce_coalesced([T], "max"), TypeError, "'op'.*'max'"),
    ("too few lists", lambda: dist.all_gather_coalesced([[T]], [T]), ValueError, "tensor_lists'.*2 lists.*got 1"),
    ("a short list", lambda: dist.all_gather_coalesced([[T], []], [T]), ValueError, r"'output_tensor_lists\[1\]'"),
    ("entry size", lambda: dist.all_gather_coalesced([[T], [T[:2]]], [T]), ValueError, r"lists\[1\]\[0\]'.*4 elements"),
    ("strided output", lambda: dist.all_gather_single(STRIDED, T[:3]), ValueError, "'output_tensor'.*contiguous.*by 2"),
    ("strided input", lambda: dist.reduce_scatter_single(T[:3], STRIDED), ValueError, "'input'.*contiguous.*by 2"),
    ("nothing gathered", lambda: dist.all_gather_coalesced([[], []], []), ValueError, "at least one tensor"),
    ("gathered size", lambda: dist.all_gather_single(T, T), ValueError, "all_gather_single.*'output_tensor'.*8 elem"),
    ("scattered size", lambda: dist.reduce_scatter_single(T, T), ValueError, "reduce_scatter_single.*'input'.*8 elem"),
]


@pytest.mark.parametrize(("call", "kind", "words"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse_raises_a_clear_error(call: Any, kind: type[Exception], words: str) -> None:
    def program(rank: int) -> float:
        with pytest.raises(kind, match=words):
            call()
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(program, 2) == [3.0, 3.0]


def test_repr_of_p2pop_shows_both_ranks() -> None:
    def program(rank: int) -> str:
        return repr(dist.P2POp(dist.irecv, T, group_peer=0, tag=7))

    assert run(program, 2)[1] == "P2POp(irecv in 'world', group rank 0 to 1, tag 7, torch.float32 [4])"


def test_a_rank_that_dies_in_all_to_all_is_named() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            raise Boom("gone")
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [1, 2])

    with pytest.raises(RankError) as caught:
        run(program, 2)
    assert isinstance(caught.value.__cause__, Boom)


# ---- a later tensor that is refused


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def last_is_refused(rank: int, make: Callable[[], torch.Tensor], name: str) -> list[float]:
    """Rank 0 passes a third tensor that is refused; rank 1 makes no such call. Return the sum of the next call."""
    good = [torch.full((4,), rank + 1.0) for _ in range(2)]
    if rank == 0:
        three, outputs = [*good, make()], [[torch.zeros(4) for _ in range(3)] for _ in range(2)]
        batch = [dist.P2POp(dist.isend, each, 1) for each in three]
        refused: dict[str, Callable[[], Any]] = {
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(three),
            "all_gather_coalesced": lambda: dist.all_gather_coalesced(outputs, three),
            "batch_isend_irecv": lambda: dist.batch_isend_irecv(batch),
            "torch": lambda: torch.distributed.all_reduce_coalesced(three),
        }
        with pytest.raises((dist.ArgumentError, dist.UnsupportedError, dist.ArgumentTypeError)):
            refused[name]()
        world = dist.group.WORLD
        assert world is not None and not world.backend.recorder.events(), "no call has begun"
        assert all(tensor.tolist() == [1.0] * 4 for tensor in good), "nothing was written"
    message = torch.full((4,), 7.0 if rank == 0 else 0.0)
    # A message that a refused batch has begun would come first.
    dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
    assert message.tolist() == [7.0] * 4
    total = torch.tensor([rank + 0.5, 1.0])
    dist.all_reduce(total)
    return list(total.tolist())


@pytest.mark.parametrize("make", [freed, lambda: torch.ones(4, device="meta")], ids=["freed", "meta"])
@pytest.mark.parametrize("name", ["all_reduce_coalesced", "all_gather_coalesced", "batch_isend_irecv", "torch"])
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_later_tensor_that_is_refused_keeps_the_calls_before_it_from_beginning(
    name: str, make: Callable[[], torch.Tensor]
) -> None:
    assert run(last_is_refused, 2, make, name, ranks="processes") == [[2.0, 2.0]] * 2
