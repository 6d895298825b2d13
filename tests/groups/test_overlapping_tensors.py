"""Lists of tensors that share memory: all inputs are read before an output is written, and the last output stays.

Each call is made twice: on tensors that overlap, and on copies of them. Results of the copies, written to the original
tensors in the order of the list, are the expected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as oracle
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import torchdist_ref as dist
from tests.torchs_world import start_torch
from torchdist_ref.backends.operands import RowBlocks, are_apart, check_writable, sharing_pair
from torchdist_ref.testing import fill, run

# More elements than one window of `ref` has.
LARGE = 70_000
Run = Callable[[list[Tensor], list[Tensor], bool], Any]


def all_reduce(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.all_reduce_coalesced(outputs, async_op=async_op)


def all_gather(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.all_gather(outputs, inputs[0], async_op=async_op)


def all_gather_tensor(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.all_gather_into_tensor(outputs[0], inputs[0], async_op=async_op)


def all_gather_coalesced(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    size = len(inputs)
    lists = [outputs[rank * size : (rank + 1) * size] for rank in range(dist.get_world_size())]
    return dist.all_gather_coalesced(lists, inputs, async_op=async_op)


def gather(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.gather(inputs[0], outputs if dist.get_rank() == 1 else None, dst=1, async_op=async_op)


def scatter(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.scatter(outputs[0], inputs if dist.get_rank() == 1 else None, src=1, async_op=async_op)


def reduce_scatter(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.reduce_scatter(outputs[0], inputs, async_op=async_op)


def reduce_scatter_tensor(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.reduce_scatter_tensor(outputs[0], inputs[0], async_op=async_op)


def all_to_all(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.all_to_all(outputs, inputs, async_op=async_op)


def all_to_all_single(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    return dist.all_to_all_single(outputs[0], inputs[0], async_op=async_op)


def all_to_all_uneven(inputs: list[Tensor], outputs: list[Tensor], async_op: bool) -> Any:
    rows = [len(inputs[0]) // dist.get_world_size()] * dist.get_world_size()
    return dist.all_to_all_single(outputs[0], inputs[0], rows, rows, async_op=async_op)


def overlapping(memory: Tensor, world: int, block: int) -> Iterator[tuple[Run, list[Tensor], list[Tensor]]]:
    """Yield a function with inputs and outputs that lie in one memory of ``(world + 1) * block`` elements."""
    rows = [memory[i * block : (i + 1) * block] for i in range(world)]
    shifted = [memory[i * block // 2 : i * block // 2 + block] for i in range(world)]
    turned = [*rows[1:], rows[0]]
    parts = [memory[start::2][: block // 2] for i in range(world) for start in (i * block, i * block + 1)]
    whole, next_whole = memory[: world * block], memory[1 : world * block + 1]
    for views in [rows[0], rows[0]], shifted, [memory[:block:2], memory[1:block:2]]:
        yield all_reduce, views, views
    yield all_gather, [rows[dist.get_rank()]], turned
    yield all_gather_tensor, [memory[block // 2 : block // 2 + block]], [whole]
    yield all_gather_coalesced, [rows[0][::2], rows[1][::2]], parts
    yield gather, [rows[0]], turned
    yield scatter, turned, [rows[1]]
    yield reduce_scatter, turned, [rows[0]]
    yield reduce_scatter, [rows[0]] * world, [rows[0]]
    yield reduce_scatter_tensor, [whole], [memory[block // 2 : block // 2 + block]]
    yield all_to_all, rows, rows
    yield all_to_all, rows, turned
    yield all_to_all_single, [whole], [next_whole]
    yield all_to_all_uneven, [whole], [whole]


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def results(rank: int, world: int, block: int) -> list[str]:
    """Return the names of the calls with wrong results."""
    wrong = []
    count = len(list(overlapping(fill(rank, ((world + 1) * block,)), world, block)))
    for index in range(count):
        for async_op in (False, True):
            memory, expected = (fill(rank, ((world + 1) * block,)) for _ in range(2))
            call, inputs, outputs = list(overlapping(memory, world, block))[index]
            wait(call(inputs, outputs, async_op))
            _, inputs, outputs = list(overlapping(expected, world, block))[index]
            read = [tensor.clone() for tensor in inputs]
            written = [tensor.clone() for tensor in outputs]
            call(read, written, False)
            if dist.get_rank() == 1 or call is not gather:
                for output, result in zip(outputs, written, strict=True):
                    output.copy_(result)
            if not torch.equal(memory, expected):
                wrong.append(f"{index} {call.__name__} async_op={async_op}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_ref_reads_all_inputs_before_it_writes(world: int) -> None:
    assert run(results, world, world, 4) == [[]] * world


def test_ref_reads_all_inputs_of_several_windows_before_it_writes() -> None:
    assert run(results, 2, 2, LARGE) == [[]] * 2


def test_gloo_reads_all_inputs_before_it_writes() -> None:
    assert run(results, 3, 3, 4, ranks="processes", backend="gloo") == [[]] * 3


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_one_rank_reduces_into_one_element_of_a_buffer(backend: str) -> None:
    """One element counts as contiguous with any stride, so Gloo writes it in place: the result is already there."""

    def program(rank: int) -> list[bool]:
        found = []
        for dtype in (torch.uint8, torch.float16, torch.int64):
            for shape, index in (((1,), slice(1, None, 3)), ((), 1)):
                buffer, source = fill(9, (3,), dtype), fill(4, shape, dtype)
                expected = buffer.clone()
                expected[index] = source
                dist.reduce_scatter(buffer[index], [source])
                found.append(torch.equal(buffer, expected))
        return found

    assert all(run(program, 1, backend=backend)[0])


def sums_of_torch(rank: int, path: str) -> list[tuple[Any, Any]]:
    start_torch(store=oracle.FileStore(path, 2), rank=rank, world_size=2)
    pairs = []
    for begin in (0, 2):
        theirs, ours = fill(rank, (6,)), fill(rank, (6,))
        oracle.all_reduce_coalesced([theirs[:4], theirs[begin : begin + 4]])
        dist.all_reduce_coalesced([ours[:4], ours[begin : begin + 4]])
        pairs.append((theirs.tolist(), ours.tolist()))
    oracle.destroy_process_group()
    return pairs


# torch says that its function will be deprecated.
@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_coalesced_sums_of_overlapping_tensors_are_those_of_torch(backend: str, tmp_path: Path) -> None:
    for pairs in run(sums_of_torch, 2, str(tmp_path / "store"), ranks="processes", backend=backend):
        for theirs, ours in pairs:
            assert ours == theirs


def through_torch(rank: int, path: str) -> list[float]:
    oracle.init_process_group("ref", store=oracle.FileStore(path, 2), rank=rank, world_size=2)
    tensor = fill(rank, (6,))
    oracle.all_reduce_coalesced([tensor[:4], tensor[2:]])
    oracle.destroy_process_group()
    return tensor.tolist()


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
def test_torch_on_ref_sums_overlapping_tensors_once(tmp_path: Path) -> None:
    expected = (fill(0, (6,)) + fill(1, (6,))).tolist()
    assert run(through_torch, 2, str(tmp_path / "store"), init=False, ranks="processes") == [expected] * 2


def lists_through_torch(rank: int, path: str) -> list[str]:
    """Pass lists that overlap in part, twice as a whole, and not at all, to a group that torch made."""
    oracle.init_process_group("ref", store=oracle.FileStore(path, 2), rank=rank, world_size=2)
    row, tensor, found = torch.zeros(8), fill(rank, (4,)), []
    calls: list[Callable[[list[Tensor]], Any]] = [
        lambda outputs: oracle.all_gather(outputs, tensor),
        lambda outputs: oracle.all_to_all(outputs, [tensor, tensor]),
        lambda outputs: oracle.all_gather_coalesced([[each] for each in outputs], [tensor]),
    ]
    for outputs in ([row[:4], row[2:6]], [row[:4], row[:4]], [row[::2], row[1::2]]):
        for call in calls:
            row.zero_()
            try:
                call(outputs)
            except ValueError as error:
                found.append(str(error).partition(",")[0])
            found.append(str([each.tolist() for each in outputs]) if row.any() else "nothing written")
    oracle.destroy_process_group()
    return found


@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced:FutureWarning")
def test_torch_on_ref_refuses_the_outputs_that_our_functions_refuse(tmp_path: Path) -> None:
    shared = "{0}: {1}[0] and {1}[1] share memory"
    refused = [
        text
        for name, argument in (("all_gather", "tensor_list"), ("all_to_all", "output_tensor_list"))
        for text in (shared.format(name, argument), "nothing written")
    ]
    of_part = "all_gather: tensor_list[0] and tensor_list[1] share memory", "nothing written"
    gathered = str([fill(rank, (4,)).tolist() for rank in range(2)])
    found = run(lists_through_torch, 2, str(tmp_path / "store"), init=False, ranks="processes")
    assert found == [[*(*refused, *of_part) * 2, *[gathered] * 3]] * 2


def one_row_through_torch(rank: int, elements: int, registered: bool) -> list[bool]:
    """Call torch's functions with outputs that are parts of the inputs, and compare with formulas."""
    data = [fill(r, (2 * elements,)) for r in range(2)]
    row = dist.empty_registered(2 * elements) if registered else torch.empty(2 * elements)
    mine, other, middle = row[rank * elements :][:elements], row[(1 - rank) * elements :][:elements], elements // 2
    row.copy_(data[rank])
    oracle.all_to_all_single(row, row)
    equal = [torch.equal(row, torch.cat([given.view(2, -1)[rank] for given in data]))]
    for output in (mine, other, row[middle:][:elements]):
        row.copy_(data[rank])
        oracle.reduce_scatter_tensor(output, row)
        equal.append(torch.equal(output, sum(data).view(2, -1)[rank]))  # type: ignore[union-attr]
    for begin in (rank * elements, (1 - rank) * elements, middle):
        row.copy_(data[rank])
        oracle.all_gather_into_tensor(row, row[begin:][:elements])
        begins = (begin, begin if begin == middle else elements - begin)[:: -1 if rank else 1]
        equal.append(torch.equal(row, torch.cat([d[b:][:elements] for d, b in zip(data, begins, strict=True)])))
    return equal


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("elements", [6, LARGE, 40 * LARGE])
def test_torchs_calls_read_all_inputs_before_an_output_is_written(elements: int, registered: bool) -> None:
    """A shifted block was an error of torch's addition, or a sum that was read again."""
    assert run(one_row_through_torch, 2, elements, registered, ranks="processes") == [[True] * 7] * 2


# (first element, elements, stride) of a view of a row.
VIEWS = st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(1, 3))


@example([(0, 2, 3)], [(2, 2, 1)], False)
@example([(0, 2, 1), (2, 2, 1)], [(3, 2, 1)], False)
@given(st.lists(VIEWS, max_size=3), st.lists(VIEWS, min_size=1, max_size=3), st.booleans())
def test_tensors_that_are_called_apart_share_no_element(
    read: list[tuple[int, int, int]], written: list[tuple[int, int, int]], rows: bool
) -> None:
    row = torch.zeros(40)
    inputs, outputs = ([row.as_strided((n,), (step,), first) for first, n, step in views] for views in (read, written))
    elements = [set(range(first, first + n * step, step)) for first, n, step in (*read, *written)]
    alone = sum(map(len, elements)) == len(set().union(*elements))
    blocks = RowBlocks(outputs[0], len(outputs)) if rows and len(outputs) == 1 else outputs
    if are_apart(inputs, blocks):
        assert alone
    in_a_row = all(n > 0 and (step == 1 or n == 1) for _, n, step in (*read, *written))
    if alone and in_a_row:
        assert are_apart(inputs, blocks)


@example([(0, 2, 2), (1, 2, 2)])
@example([(0, 3, 1), (9, 2, 2), (10, 2, 1), (10, 2, 2)])
@given(st.lists(VIEWS, max_size=4))
def test_the_outputs_that_are_refused_are_those_that_share_an_element(views: list[tuple[int, int, int]]) -> None:
    row = torch.zeros(40)
    outputs = [row.as_strided((n,), (step,), first) for first, n, step in views]
    elements = [set(range(first, first + n * step, step)) for first, n, step in views]
    pair = sharing_pair(outputs)
    if pair is None:
        assert sum(map(len, elements)) == len(set().union(*elements))
    else:
        assert pair[0] < pair[1] and elements[pair[0]] & elements[pair[1]]


@example((2, 3), (3, 2))
@given(st.tuples(*[st.integers(0, 4)] * 3), st.tuples(*[st.integers(0, 5)] * 3))
def test_a_view_is_refused_if_two_of_its_elements_are_one(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    view = torch.zeros(60).as_strided(shape, strides[: len(shape)])
    addresses = torch.arange(60).as_strided(view.shape, view.stride()).flatten().tolist()
    refused = ""
    try:
        check_writable("broadcast", "tensor", view)
    except dist.ArgumentError as error:
        refused = str(error)
    assert bool(refused) == (len(set(addresses)) < len(addresses))


def batch(rank: int, first: int, second: int, later: int) -> list[Any]:
    """Receive from two ranks into parts of one row; rank `later` sends after the other's message was received."""
    row = torch.zeros(9)
    if rank:
        if rank == later:
            dist.recv(torch.empty(1), 3 - rank)
        dist.send(fill(rank, (5,)), 0)
        if rank != later:
            dist.send(torch.ones(1), later)
        return []
    receives = [dist.P2POp(dist.irecv, row[begin : begin + 5], peer) for begin, peer in ((first, 1), (second, 2))]
    refused = ""
    try:
        works = dist.batch_isend_irecv(receives)
    except dist.ArgumentError as error:
        refused = str(error)
        # No receive was posted: both messages arrive here.
        works = [dist.irecv(torch.empty(5), peer) for peer in (3 - later, later)]
    for work in works:
        work.wait()
    return [refused, row.tolist()]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("later", [1, 2])
def test_a_batch_that_receives_twice_into_one_element_is_refused(backend: str, later: int) -> None:
    """torch keeps the message that arrives last, by chance."""
    refused, row = run(batch, 3, 0, 4, later, ranks="processes", backend=backend)[0]
    assert "receives 0 and 1 of the list write to the same memory" in refused and "(on rank 0)" in refused
    assert row == [0.0] * 9


def neighbors(rank: int) -> list[float]:
    """Receive from two ranks into parts of one row that share no element."""
    row = torch.zeros(10)
    if rank:
        dist.send(fill(rank, (5,)), 0)
    else:
        parts = [row[:5], row[5:]]
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, part, 2 - i) for i, part in enumerate(parts)]):
            work.wait()
    return row.tolist()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_batch_may_receive_into_neighboring_parts_of_one_tensor(backend: str) -> None:
    found = run(neighbors, 3, ranks="processes", backend=backend)
    assert found[0] == [*fill(2, (5,)).tolist(), *fill(1, (5,)).tolist()]
