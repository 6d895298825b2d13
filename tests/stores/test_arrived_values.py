"""ArrivedValues: a queue's values are read from the memory of the server, whatever is in front of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchdist_ref as dist
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.served_values import ArrivedValues


@pytest.fixture
def store() -> Iterator[TCPStore]:
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made
    made.close()


def arrivals(queue: ArrivedValues) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(queue.queue_pop("q", block=False))
        except dist.QueueEmptyError:
            return found


def push(store: TCPStore, *values: str) -> None:
    for value in values:
        store.queue_push("q", value)


def test_each_value_is_read_once_as_it_arrives_and_once_more_when_it_is_popped(store: TCPStore) -> None:
    queue, popped = ArrivedValues(store), []
    assert arrivals(queue) == []
    push(store, "a", "b", "c", "d")
    popped.append(queue.queue_pop("q"))
    assert arrivals(queue) == [b"b", b"c", b"d"] and arrivals(queue) == []
    push(store, "e", "f")
    popped.append(queue.queue_pop("q"))
    assert arrivals(queue) == [b"e", b"f"] and store.queue_len("q") == 4
    popped += [queue.queue_pop("q") for _ in range(4)]
    assert popped == [b"a", b"b", b"c", b"d", b"e", b"f"] and arrivals(queue) == []
    push(store, "g")
    assert arrivals(queue) == [b"g"]


def test_values_that_another_program_pops_hide_no_later_one_for_good(store: TCPStore) -> None:
    queue, other = ArrivedValues(store), store.clone()
    push(store, "a", "b", "c", "d")
    assert len(arrivals(queue)) == 4
    assert [other.queue_pop("q") for _ in range(2)] == [b"a", b"b"]
    push(store, "e")
    assert arrivals(queue) == [] and [queue.queue_pop("q") for _ in range(3)] == [b"c", b"d", b"e"]
    push(store, "f", "g")
    assert arrivals(queue) == [b"f", b"g"]
    other.close()


def test_only_the_process_that_serves_the_store_reads_its_memory(store: TCPStore) -> None:
    other = TCPStore("127.0.0.1", store.port)
    with pytest.raises(dist.DistNetworkError, match="this process does not serve the store"):
        ArrivedValues(other).queue_pop("q", block=False)
    other.close()
