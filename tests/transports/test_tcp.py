"""Ranks on several hosts, which one machine simulates with ``TORCHDIST_REF_HOST_ID``, over real sockets."""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.outcomes import NEVER, failing
from torchdist_ref.errors import DistNetworkError
from torchdist_ref.groups.world import default_group
from torchdist_ref.membership.blame import Wait
from torchdist_ref.stores import HashStore
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.testing.backend_contract import CLAUSES
from torchdist_ref.transports import tcp
from torchdist_ref.transports.mailbox import Mailbox
from torchdist_ref.transports.tcp import interface_address


def join(rank: int, hosts: str, path: str, interface: str = "") -> None:
    os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
    if interface:
        os.environ["TORCHDIST_REF_SOCKET_IFNAME"] = interface
    store = dist.FileStore(path, len(hosts))
    dist.init_process_group("ref", store=store, rank=rank, world_size=len(hosts), timeout=NEVER)


def whole_contract(rank: int, hosts: str, path: str) -> None:
    join(rank, hosts, path)
    for clause in CLAUSES:
        clause(rank, len(hosts))
    dist.destroy_process_group()


# Over a second: the whole contract of a backend, over sockets, with more ranks than cores.
@pytest.mark.parametrize("hosts", ["aab", *(pytest.param(each, marks=pytest.mark.long) for each in ("ab", "abab"))])
def test_ref_keeps_the_contract_between_hosts(hosts: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    run(whole_contract, len(hosts), hosts, path, ranks="processes", init=False, timeout=60.0)


def interrupt_a_long_message(rank: int, path: str) -> tuple[bool, bool]:
    """Rank 0 is interrupted when half of the first chunks may have come; return whether its tensor stays as it is."""
    join(rank, "ab", path)
    backend: Any = default_group().backend
    if rank:
        with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted: KeyboardInterrupt"):
            dist.send(torch.ones(1 << 20), 0)
        return True, True
    tensor, mesh = torch.zeros(1 << 20), backend.link.segment.mesh

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Mailbox, "acquire", interrupted)
        dist.recv(tensor, 1)
    before, deadline = tensor.clone(), time.monotonic() + 10
    while mesh.counts["chunk", 1] < 2 and time.monotonic() < deadline:
        mesh.progress(0.01)
    return torch.equal(tensor, before), mesh.counts["chunk", 1] >= 2


def test_a_tensor_is_the_users_again_when_its_receive_has_failed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once what the sender sent before it learned of the failure was still written into it."""
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    assert run(interrupt_a_long_message, 2, path, ranks="processes", init=False) == [(True, True)] * 2


def die_or_report(rank: int, hosts: str, path: str, victim: int) -> tuple[str, str]:
    join(rank, hosts, path)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return failing(lambda: dist.all_reduce(torch.ones(10)))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_is_detected_on_other_hosts(victim: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    with pytest.raises(RankError) as caught:
        run(die_or_report, 3, "aab", path, victim, ranks="processes", init=False)
    for rank, outcome in caught.value.outcomes.items():
        if rank != victim:
            kind, text = outcome.value
            assert kind in ("RankDiedError", "GroupAbortedError") and f"rank {victim} died" in text, text


def look_after_a_close(rank: int, path: str, aborts: bool) -> tuple[str, str]:
    """Rank 1 closes the group and lives on, then rank 0 dies; returns what rank 2 knows of their processes."""
    join(rank, "abc", path)
    after = dist.FileStore(f"{path} after", 3)
    if rank == 0:
        after.wait(["go"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        after.wait(["joined"])
        dist.group.WORLD.abort() if aborts else dist.destroy_process_group()
        after.set("closed", "")
        after.wait(["seen"])
        return "", ""
    backend = default_group().backend
    after.set("joined", "")
    after.wait(["closed"])
    # Each look reads what has arrived, in several steps.
    of_the_living = [backend.failure([1], "meeting", Wait.ELSEWHERE) for _ in range(20)][-1]
    after.set("go", "")
    while (of_the_dead := backend.failure([0, 1], "meeting", Wait.ELSEWHERE)) is None:
        os.sched_yield()
    after.set("seen", "")
    return str(of_the_living), str(of_the_dead)


@pytest.mark.parametrize("aborts", [False, True])
def test_the_end_of_a_closed_connection_is_no_death(aborts: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    with pytest.raises(RankError) as caught:
        run(look_after_a_close, 3, path, aborts, ranks="processes", init=False)
    of_the_living, of_the_dead = caught.value.outcomes[2].value
    assert of_the_living == "None"
    assert of_the_dead.startswith("meeting on rank 2 of group 'world': rank 0 died")


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
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    for text, again in run(differ, 2, path, ranks="processes", init=False):
        assert "rank 0: all_reduce" in text and "[4]" in text and "rank 1: all_reduce" in text and "[5]" in text
        assert again == (fill(0, (3,)) + fill(1, (3,))).tolist()


def exchange_large_tensors(rank: int, path: str, interface: str) -> bool:
    """Exchange more bytes than the kernel buffers, in both directions at once."""
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


def test_large_tensors_in_both_directions_do_not_deadlock_on_a_named_interface(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    assert run(exchange_large_tensors, 2, path, "none,lo", ranks="processes", init=False) == [True, True]


def test_a_missing_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_SOCKET_IFNAME", "eth77")
    with pytest.raises(DistNetworkError, match=r"TORCHDIST_REF_SOCKET_IFNAME=eth77.*it has .*'lo'"):
        interface_address(HashStore())


CLONE_NEWIPC = 0x08000000


def own_ipc_namespace(rank: int, path: str) -> tuple[list[float], str, str]:
    """Move rank 1 to an ipc namespace of its own, as in a container of its own."""
    if rank == 1 and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWIPC):
        return [], "", os.strerror(ctypes.get_errno())
    logged = io.StringIO()
    logging.getLogger("torchdist_ref.transports").addHandler(logging.StreamHandler(logged))
    logging.getLogger("torchdist_ref.transports").setLevel(logging.INFO)
    store = dist.FileStore(path, 2)
    dist.init_process_group("ref", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    tensor = fill(rank, (7,))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist(), logged.getvalue(), ""


def test_namespaces_of_one_machine_connect_over_tcp_and_log_it(tmp_path: Path) -> None:
    allowed = os.geteuid() == 0 and run(may_unshare, 1, ranks="processes", init=False)[0]
    if not allowed:
        pytest.skip("making a namespace needs root, and a kernel that allows it")
    results = run(own_ipc_namespace, 2, str(tmp_path / "store"), ranks="processes", init=False)
    expected = (fill(0, (7,)) + fill(1, (7,))).tolist()
    assert [result[0] for result in results] == [expected, expected], results
    assert "2 sets of pid, ipc and user namespaces on one machine" in results[0][1]


def may_unshare(rank: int) -> bool:
    return ctypes.CDLL(None).unshare(CLONE_NEWIPC) == 0


def interrupted(rank: int, path: str, call: str) -> None:
    """Interrupt a wait for a rank of another host, which goes on only then."""
    join(rank, "ab", path)
    store = dist.FileStore(path + "late", 2)
    if rank == 1:
        return store.wait(["go"])
    with pytest.raises(KeyboardInterrupt):
        # In the block: on a busy machine the signal may come before the wait.
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        dist.all_reduce(torch.ones(10)) if call == "all_reduce" else dist.recv(torch.ones(10), 1)
    store.set("go", "")


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_ctrl_c_interrupts_a_wait_for_another_host(call: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    assert run(interrupted, 2, path, call, ranks="processes", init=False) == [None, None]


def sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in open_descriptors())


def open_descriptors() -> list[str]:
    """Return all descriptors but the one that listing them uses."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def count_sockets(rank: int, hosts: str, path: str) -> list[int]:
    """Count the additional sockets: with the group, after a ring, after messages, without the group."""
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
def test_each_pair_of_ranks_on_different_hosts_has_one_connection(
    hosts: str, each: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    found = run(count_sockets, len(hosts), hosts, path, ranks="processes", init=False)
    assert found == [[count, count, count, 0] for count in each]


def call_after_a_death(rank: int, path: str, call: str) -> str:
    """End rank 2 before any call: no two ranks have exchanged more than the handshake."""
    join(rank, "abcd", path)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistError) as caught:
        dist.recv(torch.ones(3), 2) if call == "recv" else dist.all_reduce(torch.ones(3))
    return str(caught.value)


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_death_before_the_first_call_is_detected_by_all(call: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    with pytest.raises(RankError) as caught:
        run(call_after_a_death, 4, path, call, ranks="processes", init=False)
    for rank in (0, 1, 3):
        text = caught.value.outcomes[rank].value
        assert "rank 2 died" in text and call in text, text


def exchange_dtypes(rank: int, path: str) -> bool:
    """Send long messages of several dtypes and layouts."""
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


def test_long_messages_of_any_dtype_and_layout_are_delivered(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("tcp") / "store")
    assert run(exchange_dtypes, 2, path, ranks="processes", init=False) == [True, True]


def interrupt_in_a_frame(rank: int, path: str) -> str:
    join(rank, "ab", path)
    mesh = default_group().backend.link.segment.mesh
    if rank == 0:
        mesh.connections[1].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        original = mesh.wait_writable

        def interrupted_once(*_: object) -> None:
            mesh.wait_writable = original
            raise KeyboardInterrupt

        mesh.wait_writable = interrupted_once
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(4_000_000))
        # It stays: the end of its process would tell the other.
        with pytest.raises(dist.GroupAbortedError):
            dist.barrier()
        dist.FileStore(path + " of the end", 2).wait(["told"], timedelta(seconds=15))
        return ""
    with pytest.raises(dist.GroupAbortedError) as caught:
        dist.all_reduce(torch.ones(4_000_000))
    dist.FileStore(path + " of the end", 2).set("told", "")
    return str(caught.value)


def test_a_rank_that_is_interrupted_while_it_sends_tells_the_other(tmp_path: Path) -> None:
    """Once the other waited for the time-out, since no frame could follow the half of one."""
    _, text = run(interrupt_in_a_frame, 2, str(tmp_path / "store"), ranks="processes", init=False, timeout=20)
    assert "rank 0 aborted: KeyboardInterrupt in all_reduce" in text


def test_a_rank_without_descriptors_does_not_blame_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(OSError, match="Too many open files") as caught:
        tcp.connect_to("192.0.2.1 1", "", bytes(32), 1, 0, time.monotonic() + 1, None)
    assert not isinstance(caught.value, DistNetworkError)
