"""A rank that dies or fails while groups are made ends the call of the others at once, with its name."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, WORLD, errors_of_survivors
from tests.descriptors import use_all_descriptors
from tests.outcomes import NEVER, failing
from tests.process_ends import answer_of_child
from torchdist_ref.backends.ref import Ref
from torchdist_ref.groups import world
from torchdist_ref.groups.torch_tables import GroupsInTorch
from torchdist_ref.groups.world import current
from torchdist_ref.membership import trust as authentication
from torchdist_ref.membership import watch as membership_watch
from torchdist_ref.simulation.scheduler import current_task
from torchdist_ref.stores import FileStore, HashStore, PrefixStore, TCPStore
from torchdist_ref.testing import RankError, run
from torchdist_ref.transports.link import Link

CALLS: dict[str, Callable[[], Any]] = {
    "new_group": lambda: dist.new_group([0, 1, 2]),
    "new_group of members": lambda: dist.new_group([0, 1, 2], use_local_synchronization=True),
    "split_group": lambda: dist.split_group(split_ranks=[[0, 1, 2]]),
}


def die_before_joining(rank: int, name: str) -> tuple[str, str]:
    if rank == 1:
        # All its keys are in the store and its pid is in the segment; its semaphores are not posted.
        Link.handshake = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return failing(CALLS[name])


@pytest.mark.parametrize("name", ["new_group"])
def test_a_rank_that_dies_before_it_joins_is_named(name: str) -> None:
    """A sample of real processes: `tests.simulation.test_deaths` has all calls and moments."""
    with pytest.raises(RankError) as caught:
        run(die_before_joining, 3, name, ranks="processes")
    for rank in (0, 2):
        kind, text = caught.value.outcomes[rank].value
        assert kind == "RankDiedError" and "rank 1 died (pid " in text and "was killed by SIGKILL" in text
        assert name.split()[0] in text


def fail_on_rank_1(owner: Any, name: str, fail: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a function that all simulated ranks share on rank 1 alone."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        task = current_task()
        return (fail if task is not None and task.owner == 1 else real)(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


LIMITS = {
    "Too many open files. This process has no free file descriptor": OSError(24, "Too many open files"),
    "File too large. A limit on the size of files is reached, which holds for shared memory": OSError(27, ""),
    "can't start new thread in {name} on rank 1. No thread can be started": RuntimeError("can't start new thread"),
    "out of memory. No memory is free": MemoryError(),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_at_a_limit_tells_the_others_in_words(name: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LIMITS[limit]

    def fail_before_joining(rank: int) -> tuple[str, str]:
        if rank == 1:
            fail_on_rank_1(Link, "handshake", fail, monkeypatch)
        try:
            return failing(CALLS[name])
        except (OSError, RuntimeError, MemoryError) as error:
            return type(error).__name__, str(error)

    outcomes = run(fail_before_joining, 3, ranks="simulated")
    own_kind, own_text = outcomes[1]
    assert own_kind == type(LIMITS[limit]).__name__ and f"{name.split()[0]} on rank 1" in own_text
    assert limit.format(name=name.split()[0]) in own_text
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "GroupAbortedError" and f"rank 1 failed: {own_kind}: {own_text}" in text


def test_a_rank_without_a_descriptor_for_the_store_says_so_at_once() -> None:
    """Once it tried until the time-out, and asked whether rank 0 was up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint, limit = f"tcp://127.0.0.1:{server.getsockname()[1]}", NEVER

        def start() -> str:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            first, texts = os.open(os.devnull, os.O_RDONLY) + 1, []
            # The socket and the question whose it is need one each.
            for free in (0, 1):
                resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, hard))
                with pytest.raises(dist.DistNetworkError) as caught:
                    dist.init_process_group("ref", endpoint, limit, rank=1, world_size=2)
                texts.append(str(caught.value))
            return "|".join(texts)

        texts = answer_of_child(start).split("|")
    assert len(texts) == 2
    for text in texts:
        assert f"no socket to {endpoint[6:]} can be opened ([Errno 24] Too many open files)" in text
        assert "ulimit -n" in text


def test_a_rank_without_a_free_descriptor_tells_the_others_through_a_file(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        store = FileStore(str(tmp_path / "store"), WORLD)
        dist.init_process_group("ref", store=store, rank=rank, world_size=WORLD, timeout=NEVER)
        dist.barrier()
        if rank == CULPRIT:
            use_all_descriptors()
        dist.new_group([0, 1, 2])

    found = errors_of_survivors(program)
    for rank in SURVIVORS:
        assert found[rank].kind == "GroupAbortedError", found[rank].text
        assert "rank 1 failed: OSError: [Errno 24] new_group on rank 1: Too many open files." in found[rank].text


OPENING = {
    "after all have joined": (Link, "handshake"),
    "in the backend": (Ref, "_set_up"),
    "in the debug level": (world, "include"),
    "in the tables of torch": (GroupsInTorch, "add"),
}


@pytest.mark.parametrize("where", OPENING)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_fails_when_others_have_joined_tells_them(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the others had a group, and its first call waited for the time-out."""

    handshake = Link.handshake

    def fail(*arguments: Any, **_: Any) -> None:
        if where == "after all have joined":
            handshake(*arguments)
        raise OSError(24, "Too many open files")

    def fail_when_others_have_joined(rank: int) -> tuple[str, str]:
        if rank == 1:
            fail_on_rank_1(*OPENING[where], fail, monkeypatch)
            with pytest.raises(OSError, match="Too many open files"):
                CALLS[name]()
            return "", ""
        return failing(lambda: dist.barrier(CALLS[name]()))

    outcomes = run(fail_when_others_have_joined, 3, ranks="simulated", timeout=20)
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "GroupAbortedError" and "rank 1 " in text and "Too many open files" in text, text


@pytest.mark.parametrize("name", ["new_group", "split_group"])
def test_a_rank_that_is_interrupted_before_it_connects_tells_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the others waited for the time-out."""
    owner, request = (
        (PrefixStore, "compare_set") if name == "new_group" else (membership_watch.WatchedStore, "wait_get")
    )

    def interrupt(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def interrupted_before_it_connects(rank: int) -> tuple[str, str]:
        if rank != 1:
            return failing(CALLS[name])
        fail_on_rank_1(owner, request, interrupt, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name]()
        return "", ""

    outcomes = run(interrupted_before_it_connects, 3, ranks="simulated", timeout=20)
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "GroupAbortedError" and "rank 1 failed: KeyboardInterrupt" in text, text


def two_deaths(rank: int) -> tuple[str, str] | None:
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    failing(dist.barrier)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    first = failing(lambda: dist.shrink_group([3]))
    dist.shrink_group([2, 3])
    dist.barrier()
    return first


def test_a_second_death_ends_a_shrink_that_can_be_repeated() -> None:
    with pytest.raises(RankError) as caught:
        run(two_deaths, 4, ranks="processes")
    for rank in (0, 1):
        kind, text = caught.value.outcomes[rank].value
        assert kind == "RankDiedError" and "rank 2 died" in text


def test_the_default_timeout_of_a_new_group_is_the_default_groups() -> None:
    def program(rank: int) -> list[float | None]:
        groups = [dist.new_group(), dist.split_group(split_ranks=[[0, 1]])]
        return [getattr(group, "timeout", None) for group in [dist.group.WORLD, *groups]]

    for seconds in run(program, 2, timeout=40.0):
        assert seconds == [32.0] * 3


def test_the_server_reports_a_rank_whose_connection_ends() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    meeting = PrefixStore("group/0", TCPStore("127.0.0.1", server.port))
    pid = os.fork()
    if pid == 0:
        other = PrefixStore("group/0", TCPStore("127.0.0.1", server.port))
        ended = membership_watch.MemberWatch(other, 1, [0, 1], "init_process_group").on_disconnect()
        other.wait_get(["ready"], timedelta(seconds=10), {"ready": ""}, ended)
        os.kill(os.getpid(), signal.SIGKILL)
    watch = membership_watch.MemberWatch(meeting, 0, [0, 1], "init_process_group")
    meeting.wait(["ready"], timedelta(seconds=10))
    with pytest.raises(dist.RankDiedError, match=f"rank 1 failed: its process .pid {pid} on .* has ended"):
        watch.store.get("an address")
    os.waitpid(pid, 0)
    server.close()


def test_a_client_that_connects_again_or_withdraws_is_not_reported() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    broken, withdrawn = (TCPStore("127.0.0.1", server.port) for _ in range(2))
    assert broken.set_on_disconnect("broken", "x") and withdrawn.set_on_disconnect("withdrawn", "x")
    assert withdrawn.set_on_disconnect("withdrawn", "")
    withdrawn.close()
    for connection in broken._pool._idle:
        connection.close()
    broken.set("key", "value")
    with pytest.raises(dist.StoreTimeoutError):
        server.wait(["broken"], timedelta(seconds=0.2))
    assert not server.check(["withdrawn"])
    broken.close()
    server.wait(["broken"], timedelta(seconds=20))
    server.close()


def test_other_stores_report_nothing() -> None:
    assert not PrefixStore("a", HashStore()).set_on_disconnect("key", "value")


def take_the_key_from_a_dying_rank(rank: int, port: int) -> tuple[str, str]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("TORCHDIST_REF_HOST_ID", f"host {rank}")

    def die(server: authentication.KeyServer, seconds: float) -> None:
        # Rank 1 has connected, and is not accepted.
        select.select([server._socket], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        monkeypatch.setattr(authentication.KeyServer, "serve", die)
    store = TCPStore("127.0.0.1", port)
    return failing(lambda: dist.init_process_group("ref", store=store, rank=rank, world_size=2))


def test_a_rank_that_dies_while_it_serves_the_session_key_is_named() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(RankError) as caught:
        run(take_the_key_from_a_dying_rank, 2, server.port, ranks="processes", init=False)
    kind, text = caught.value.outcomes[1].value
    assert kind == "RankDiedError" and "rank 0" in text
    server.close()


DIFFERENT: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "members": (
        lambda rank: dist.new_group([[0, 1], [1, 0]][rank], sort_ranks=False),
        "group/1/members",
        "rank 0 passes members [0,1], rank 1 passes members [1,0]. All ranks must create the same groups in",
    ),
    "backend": (
        lambda rank: dist.new_group(backend=["ref", "gloo"][rank]),
        "group/1/members",
        "rank 0 uses backend 'ref', rank 1 uses 'gloo'. All ranks must use the same backend.",
    ),
    "split_ranks": (
        lambda rank: dist.split_group(split_ranks=[[[0, 1]], [[0, 1], [2]]][rank]),
        "split_group/group.0/1/lists",
        "rank 0 passes [[0, 1]], rank 1 passes [[0, 1], [2]]. All ranks must pass the same.",
    ),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("what", DIFFERENT)
def test_both_sides_of_a_mismatch_are_named_in_either_order_of_arrival(what: str, first: int) -> None:
    """Once the second one called the first one "another rank", and the order of the sides was that of arrival."""
    call, key, sides = DIFFERENT[what]

    def program(rank: int) -> str:
        store = current().store
        assert store is not None
        if rank == 2:
            # A rank that has ended before would be the reason of the failure.
            store.wait(["0 has failed", "1 has failed"], timedelta(seconds=60))
            return ""
        if rank != first:
            # What the first one has published.
            store.wait([key], timedelta(seconds=60))
        with pytest.raises(dist.MismatchError) as caught:
            call(rank)
        store.set(f"{rank} has failed", "")
        return str(caught.value)

    texts = run(program, 3)
    assert texts[0] == texts[1] and sides in texts[0], texts
