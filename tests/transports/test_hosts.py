"""Ranks of several hosts: one machine plays them all, by ``TORCHDIST_REF_HOST_ID``, over real sockets."""

from __future__ import annotations

import ctypes
import fcntl
import io
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.errors import DistNetworkError, RankStalledError
from torchdist_ref.stores import HashStore
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.testing.backend_contract import CLAUSES
from torchdist_ref.transports.connection import POSTED_RECEIVE, MeshFrame, check_ranges, pack
from torchdist_ref.transports.mesh import ConnectionMesh, MeshDirectPath
from torchdist_ref.transports.segment_layout import SEMAPHORE_KINDS, SegmentLayout
from torchdist_ref.transports.tcp import interface_address

SOON = 2.0


@contextmanager
def a_line() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with theirs, ours:
        yield theirs, ours


def join(rank: int, hosts: str, path: str, interface: str = "") -> None:
    os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
    if interface:
        os.environ["TORCHDIST_REF_SOCKET_IFNAME"] = interface
    store = dist.FileStore(path, len(hosts))
    dist.init_process_group("ref", store=store, rank=rank, world_size=len(hosts), timeout=timedelta(seconds=20))


def whole_contract(rank: int, hosts: str, path: str) -> None:
    join(rank, hosts, path)
    for clause in CLAUSES:
        clause(rank, len(hosts))
    dist.destroy_process_group()


# Over a second: the whole contract of a backend, over sockets, with more ranks than cores.
@pytest.mark.parametrize("hosts", ["ab", "aab", "abab"])
def test_ref_keeps_the_contract_between_hosts(hosts: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    run(whole_contract, len(hosts), hosts, path, ranks="processes", init=False, timeout=60.0)


def die_or_tell(rank: int, hosts: str, path: str, victim: int) -> tuple[str, str, float]:
    join(rank, hosts, path)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(10))
    except dist.DistError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_is_known_on_other_hosts(victim: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    with pytest.raises(RankError) as caught:
        run(die_or_tell, 3, "aab", path, victim, ranks="processes", init=False)
    for rank, outcome in caught.value.outcomes.items():
        if rank != victim:
            kind, text, seconds = outcome.value
            assert kind in ("RankDiedError", "GroupAbortedError") and f"rank {victim} died" in text, text
            assert seconds < SOON


def differ(rank: int, path: str) -> tuple[str, list[float]]:
    join(rank, "ab", path)
    tensor = fill(rank, (4 + rank,))
    try:
        dist.all_reduce(tensor)
    except dist.MismatchError as error:
        text = str(error)
    else:
        text = ""
    again = fill(rank, (3,))
    dist.all_reduce(again)
    dist.destroy_process_group()
    return text, again.tolist()


def test_a_mismatch_between_hosts_names_both_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    for text, again in run(differ, 2, path, ranks="processes", init=False):
        assert "rank 0: all_reduce" in text and "[4]" in text and "rank 1: all_reduce" in text and "[5]" in text
        assert again == (fill(0, (3,)) + fill(1, (3,))).tolist()


def exchange_much(rank: int, path: str, interface: str) -> bool:
    """More than the kernel buffers, from both sides at once."""
    join(rank, "ab", path, interface)
    tensor = fill(rank, (3_000_000,))
    dist.all_reduce(tensor)
    other = torch.empty(2_000_000)
    sending = dist.isend(fill(rank + 2, (2_000_000,)), 1 - rank)
    dist.recv(other, 1 - rank)
    assert sending is not None and sending.wait()
    dist.destroy_process_group()
    return torch.equal(tensor, fill(0, (3_000_000,)) + fill(1, (3_000_000,))) and torch.equal(
        other, fill(3 - rank, (2_000_000,))
    )


def test_large_tensors_pass_both_ways_at_once_on_a_named_interface(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    assert run(exchange_much, 2, path, "none,lo", ranks="processes", init=False) == [True, True]


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_SOCKET_IFNAME", "eth77")
    with pytest.raises(DistNetworkError, match=r"TORCHDIST_REF_SOCKET_IFNAME=eth77.*it has .*'lo'"):
        interface_address(HashStore())


def test_a_store_without_a_host_means_the_loopback() -> None:
    assert interface_address(HashStore()) == (socket.AF_INET, "127.0.0.1")


def test_a_peer_may_write_only_its_own_part() -> None:
    check_ranges([(10, 5), (100, 1)], [(8, 8), (100, 4)])
    for wrong in [(7, 2), (10, 7), (200, 1), (2**63, 8)]:
        with pytest.raises(DistNetworkError, match="not its part"):
            check_ranges([wrong], [(8, 8), (100, 4)])


def test_a_mesh_refuses_bytes_for_a_part_that_is_not_the_senders() -> None:
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with a_line() as (theirs, ours):
        mesh.add(1, ours)
        begin = layout.eager_buffer(1, 0)
        theirs.sendall(pack(MeshFrame(SEMAPHORE_KINDS.index("ready"), 1, ((begin, 3),))) + b"abc")
        mesh.progress(1.0)
        assert bytes(memory[begin : begin + 3]) == b"abc" and mesh.counts["ready", 1] == 1
        theirs.sendall(pack(MeshFrame(SEMAPHORE_KINDS.index("ready"), 1, ((layout.eager_buffer(0, 0), 3),))) + b"xyz")
        with pytest.raises(DistNetworkError, match="not its part"):
            mesh.progress(1.0)
        mesh.close()
    assert b"xyz" not in memory


CLONE_NEWIPC = 0x08000000


def apart(rank: int, path: str) -> tuple[list[float], str, str]:
    """Rank 1 moves to an ipc namespace of its own, as in a container of its own."""
    if rank == 1 and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWIPC):
        return [], "", os.strerror(ctypes.get_errno())
    said = io.StringIO()
    logging.getLogger("torchdist_ref.transports").addHandler(logging.StreamHandler(said))
    logging.getLogger("torchdist_ref.transports").setLevel(logging.INFO)
    store = dist.FileStore(path, 2)
    dist.init_process_group("ref", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    tensor = fill(rank, (7,))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist(), said.getvalue(), ""


def test_namespaces_of_one_machine_meet_over_tcp_and_say_so(tmp_path: Path) -> None:
    allowed = os.geteuid() == 0 and run(may_move, 1, ranks="processes", init=False)[0]
    if not allowed:
        pytest.skip("making a namespace needs root, and a kernel that allows it")
    results = run(apart, 2, str(tmp_path / "store"), ranks="processes", init=False)
    expected = (fill(0, (7,)) + fill(1, (7,))).tolist()
    assert [result[0] for result in results] == [expected, expected], results
    assert "2 sets of pid, ipc and user namespaces on one machine" in results[0][1]


def may_move(rank: int) -> bool:
    return ctypes.CDLL(None).unshare(CLONE_NEWIPC) == 0


def test_a_mesh_takes_bytes_for_anywhere_only_where_they_are_expected() -> None:
    layout = SegmentLayout(2, window=8192)
    memory, wanted = bytearray(layout.nbytes), bytearray(3)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with a_line() as (theirs, ours):
        mesh.add(1, ours)
        MeshDirectPath(mesh, 1).post_receive([memoryview(wanted)])
        frame = pack(MeshFrame(SEMAPHORE_KINDS.index("chunk"), 1, ((POSTED_RECEIVE, 3),))) + b"abc"
        theirs.sendall(frame)
        mesh.progress(1.0)
        assert bytes(wanted) == b"abc" and mesh.counts["chunk", 1] == 1
        theirs.sendall(frame)
        with pytest.raises(DistNetworkError, match="3 bytes for which no receive is posted"):
            mesh.progress(1.0)
        mesh.close()


def test_a_peer_that_does_not_read_is_named_in_time() -> None:
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory), timeout=0.1)
    with a_line() as (_, ours):
        mesh.add(1, ours)
        start = time.monotonic()
        with pytest.raises(RankStalledError, match=r"rank 1 has not read for 0\.1 s"):
            mesh.send_direct(1, "chunk", memoryview(bytes(64 << 20)))
        # The frame was sent in part: nothing may follow it.
        mesh.send_direct(1, "chunk", memoryview(bytes(64 << 20)))
        assert time.monotonic() - start < SOON
        mesh.close()


def test_a_full_socket_may_have_any_descriptor() -> None:
    """Programs with many files have descriptors that `select.select` can't take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory), timeout=0.05)
    try:
        with a_line() as (_, ours), socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 2000)) as far_up:
            mesh.add(1, far_up)
            with pytest.raises(RankStalledError, match="rank 1 has not read"):
                mesh.send_direct(1, "chunk", memoryview(bytes(64 << 20)))
            mesh.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def interrupted(rank: int, path: str, call: str) -> float:
    """Ctrl-C comes while the other host's rank has not made the call."""
    join(rank, "ab", path)
    store = dist.FileStore(path + "late", 2)
    if rank == 1:
        store.wait(["go"])
        return 0.0
    hit: list[float] = []

    def interrupt() -> None:
        hit.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(10)) if call == "all_reduce" else dist.recv(torch.ones(10), 1)
    store.set("go", "")
    return time.monotonic() - hit[0]


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_ctrl_c_is_answered_while_another_host_is_waited_for(
    call: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    # The goal is 0.1 s; the rest is for a machine with other work.
    assert run(interrupted, 2, path, call, ranks="processes", init=False)[0] < 0.1 + 0.4


def sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in open_descriptors())


def open_descriptors() -> list[str]:
    """Without the one that listing them takes."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def count_sockets(rank: int, hosts: str, path: str) -> list[int]:
    """How many more sockets there are than before: with the group, after a ring, after messages, without the group."""
    os.environ["TORCHDIST_REF_ALGORITHM"] = "all_reduce=ring"
    before, counts = sockets(), []
    join(rank, hosts, path)
    counts.append(sockets() - before)
    tensor = fill(rank, (40_000,))
    dist.all_reduce(tensor)
    assert torch.allclose(tensor, sum(fill(r, (40_000,)) for r in range(len(hosts))))
    counts.append(sockets() - before)
    if rank < 2:
        dist.send(tensor, 1 - rank) if rank else dist.recv(tensor, 1 - rank)
    counts.append(sockets() - before)
    dist.barrier()
    dist.destroy_process_group()
    counts.append(sockets() - before)
    return counts


@pytest.mark.parametrize(("hosts", "each"), [("abcd", [3, 3, 3, 3]), ("aabc", [2, 2, 3, 3])])
def test_two_ranks_of_different_hosts_have_one_connection(
    hosts: str, each: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    found = run(count_sockets, len(hosts), hosts, path, ranks="processes", init=False)
    assert found == [[count, count, count, 0] for count in each]


def hear_of_a_death(rank: int, path: str, call: str) -> tuple[str, float]:
    """Rank 2 ends before anybody has made a call: no byte but those of the meeting has gone between any two ranks."""
    join(rank, "abcd", path)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(dist.DistError) as caught:
        dist.recv(torch.ones(3), 2) if call == "recv" else dist.all_reduce(torch.ones(3))
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_death_before_the_first_call_is_known_to_all(call: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    with pytest.raises(RankError) as caught:
        run(hear_of_a_death, 4, path, call, ranks="processes", init=False)
    for rank in (0, 1, 3):
        text, seconds = caught.value.outcomes[rank].value
        assert "rank 2 died" in text and call in text and seconds < SOON, text


def exchange_kinds(rank: int, path: str) -> bool:
    """Long messages whose memory is no plain row of floats."""
    join(rank, "ab", path)
    right = True
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.uint8):
        sent = (fill(0, (700_000,)) > 0).to(dtype) if dtype == torch.bool else fill(0, (700_000,)).to(dtype)
        kinds = [sent, sent.view(1000, 700).t(), sent.conj(), sent.clone().requires_grad_(dtype.is_floating_point)]
        for tensor in kinds:
            if rank == 0:
                dist.send(tensor, 1)
            else:
                got = torch.empty(tensor.shape, dtype=dtype)
                dist.recv(got, 0)
                right = right and torch.equal(got, tensor)
    dist.destroy_process_group()
    return right


def test_long_messages_of_any_kind_pass_between_hosts(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    assert run(exchange_kinds, 2, path, ranks="processes", init=False) == [True, True]
