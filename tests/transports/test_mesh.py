"""Connections between hosts: frames, posted receives, and peers that do not read."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from torchdist_ref.errors import DistNetworkError, RankStalledError
from torchdist_ref.membership.peer_processes import NoPeerProcesses
from torchdist_ref.transports.frames import POSTED_RECEIVE, MeshFrame, pack
from torchdist_ref.transports.mesh import ConnectionMesh, MeshDirectPath
from torchdist_ref.transports.segment import SEMAPHORE_KINDS, SegmentLayout, StatusRow
from torchdist_ref.transports.tcp import HostAndMeshLiveness


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer_end = socket.create_connection(server.getsockname())
        own_end, _ = server.accept()
    with peer_end, own_end:
        yield peer_end, own_end


def test_writes_outside_the_senders_part_are_rejected() -> None:
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        begin = layout.eager_buffer(1, 0)
        peer_end.sendall(pack(MeshFrame(SEMAPHORE_KINDS.index("ready"), 1, ((begin, 3),))) + b"abc")
        mesh.progress(1.0)
        assert bytes(memory[begin : begin + 3]) == b"abc" and mesh.counts["ready", 1] == 1
        peer_end.sendall(pack(MeshFrame(SEMAPHORE_KINDS.index("ready"), 1, ((layout.eager_buffer(0, 0), 3),))) + b"xyz")
        with pytest.raises(DistNetworkError, match="not its part"):
            mesh.progress(1.0)
        mesh.close()
    assert b"xyz" not in memory


def test_direct_bytes_without_a_posted_receive_are_rejected() -> None:
    layout = SegmentLayout(2, window=8192)
    memory, wanted = bytearray(layout.nbytes), bytearray(3)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        MeshDirectPath(mesh, 1).post_receive([memoryview(wanted)])
        frame = pack(MeshFrame(SEMAPHORE_KINDS.index("chunk"), 1, ((POSTED_RECEIVE, 3),))) + b"abc"
        peer_end.sendall(frame)
        mesh.progress(1.0)
        assert bytes(wanted) == b"abc" and mesh.counts["chunk", 1] == 1
        peer_end.sendall(frame)
        with pytest.raises(DistNetworkError, match="3 bytes for which no receive is posted"):
            mesh.progress(1.0)
        mesh.close()


def test_bytes_that_come_after_a_receive_has_failed_are_discarded() -> None:
    """Once they were written into a tensor that the user had again."""
    layout = SegmentLayout(2, window=8192)
    memory, wanted = bytearray(layout.nbytes), [bytearray(4), bytearray(4)]
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        path = MeshDirectPath(mesh, 1)
        path.post_receive([memoryview(view) for view in wanted])
        frame = pack(MeshFrame(SEMAPHORE_KINDS.index("chunk"), 1, ((POSTED_RECEIVE, 4),)))
        peer_end.sendall(frame + b"ab")
        mesh.progress(1.0)
        path.cancel_receives()
        begin = layout.eager_buffer(1, 0)
        ready = pack(MeshFrame(SEMAPHORE_KINDS.index("ready"), 1, ((begin, 3),))) + b"xyz"
        peer_end.sendall(b"cd" + frame + b"efgh" + ready[:-1])
        mesh.progress(1.0)
        # A frame for the segment, of which a part has come, is not discarded.
        path.cancel_receives()
        peer_end.sendall(ready[-1:])
        mesh.progress(1.0)
        assert [bytes(view) for view in wanted] == [b"ab\0\0", bytes(4)] and mesh.counts["chunk", 1] == 2
        assert bytes(memory[begin : begin + 3]) == b"xyz"
        mesh.close()


@pytest.mark.parametrize(
    ("owner", "ranges", "message"),
    [
        (2, ((POSTED_RECEIVE, 3), (POSTED_RECEIVE, 3)), "not one range"),
        (0, ((POSTED_RECEIVE, 3),), "not one range"),
        (7, (), "the part of rank 7"),
        (1, ((SegmentLayout(3, window=8192).message_header(0, 2), 3),), "the part of rank 1"),
    ],
)
def test_frames_for_parts_of_a_third_rank_and_direct_sends_of_two_ranges_are_rejected(
    owner: int, ranges: tuple[tuple[int, int], ...], message: str
) -> None:
    layout = SegmentLayout(3, window=8192)
    memory, wanted = bytearray(layout.nbytes), bytearray(3)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with socket_pair() as (peer_end, own_end):
        mesh.add(2, own_end)
        MeshDirectPath(mesh, 2).post_receive([memoryview(wanted)])
        peer_end.sendall(pack(MeshFrame(SEMAPHORE_KINDS.index("chunk"), owner, ranges)) + b"abcabc")
        with pytest.raises(DistNetworkError, match=message):
            mesh.progress(1.0)
        mesh.close()
    assert not any(memory) and not any(wanted) and not mesh.counts


def test_a_frame_of_an_unknown_kind_names_the_peer_and_the_kind() -> None:
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory))
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        peer_end.sendall(pack(MeshFrame(200, 1, ())))
        with pytest.raises(DistNetworkError, match=r"rank 1 .*frame of an unknown kind, 200"):
            mesh.progress(1.0)
        mesh.close()


def test_sending_to_a_peer_that_does_not_read_times_out() -> None:
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory), timeout=0.1)
    with socket_pair() as (_, own_end):
        mesh.add(1, own_end)
        with pytest.raises(RankStalledError, match=r"rank 1 has not read for 0\.1 s"):
            mesh.send_direct(1, "chunk", memoryview(bytes(64 << 20)))
        # Part of the frame was sent: no other frame may follow it.
        mesh.send_direct(1, "chunk", memoryview(bytes(64 << 20)))
        mesh.close()


def received(sock: socket.socket, nbytes: int) -> bytes:
    """Read a number of bytes; fail if none arrive for some seconds."""
    sock.settimeout(20.0)
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        assert part, "the connection has ended"
        data += part
    return bytes(data)


@pytest.mark.parametrize("reads", [True, False])
def test_an_interrupted_frame_is_completed_by_the_next(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a rank that was interrupted in the middle of a frame could not tell the peer why it ends the group."""
    layout = SegmentLayout(2, window=8192)
    memory, data = bytearray(layout.nbytes), bytes(i * i % 251 for i in range(1 << 20)) * 16
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory), timeout=15.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(mesh, "wait_writable", interrupted)
            mesh.send_direct(1, "chunk", memoryview(data))
        header = pack(MeshFrame(SEMAPHORE_KINDS.index("chunk"), 0, ((POSTED_RECEIVE, len(data)),)))
        signal = pack(MeshFrame(SEMAPHORE_KINDS.index("doorbell"), 0, ()))
        if reads:
            sender = threading.Thread(target=mesh.send, args=(1, "doorbell", 0, ()))
            sender.start()
            assert received(peer_end, len(header) + len(data) + len(signal)) == header + data + signal
            sender.join()
        else:
            for _ in range(3):
                mesh.send(1, "doorbell", 0, ())
        mesh.close()


def fill(mesh: ConnectionMesh, sock: socket.socket) -> bytes:
    """Send frames to rank 1, which does not read, until its host takes no more; return the bytes of all of them."""
    data, sent = bytes(i * i % 251 for i in range(1 << 14)), []
    header = pack(MeshFrame(SEMAPHORE_KINDS.index("chunk"), 0, ((POSTED_RECEIVE, len(data)),)))
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    # Within 20 ms the peer's host has taken what it takes.
    while poll.poll(20):
        mesh.send_direct(1, "chunk", memoryview(data))
        sent += [header, data]
    mesh.send(1, "doorbell", 0, ())
    return b"".join([*sent, pack(MeshFrame(SEMAPHORE_KINDS.index("doorbell"), 0, ()))])


def has_unread(sock: socket.socket) -> bool:
    """Return whether bytes have come that nobody has read; False once the socket is closed."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def test_what_a_rank_sent_before_it_left_reaches_a_peer_that_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the reason of an abort was lost: the peer took a rank that had ended after a death for dead as well."""
    monkeypatch.setattr("torchdist_ref.transports.mesh.RESUME_SECONDS", 10.0)
    layout = SegmentLayout(2, window=8192)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(bytearray(layout.nbytes)))
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        sent = fill(mesh, own_end)
        # A socket that is closed while such bytes are unread, or before they come, is reset.
        doorbell = pack(MeshFrame(SEMAPHORE_KINDS.index("doorbell"), 1, ()))
        peer_end.sendall(doorbell)
        closing = threading.Thread(target=mesh.close)
        closing.start()
        while has_unread(own_end):
            closing.join(0.01)
        for begin in range(0, len(sent), 4096):
            part = sent[begin : begin + 4096]
            assert received(peer_end, len(part)) == part
            with suppress(ConnectionError):
                peer_end.sendall(doorbell)
        closing.join(5.0)
        assert not closing.is_alive() and own_end.fileno() == -1


def test_two_ranks_that_leave_while_they_send_to_each_other_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdist_ref.transports.mesh.RESUME_SECONDS", 10.0)
    layout = SegmentLayout(2, window=8192)
    meshes = [ConnectionMesh(0, layout, lambda rank: memoryview(bytearray(layout.nbytes))) for _ in range(2)]
    with socket_pair() as ends:
        for mesh, end in zip(meshes, ends, strict=True):
            mesh.add(1, end)
            fill(mesh, end)
        closing = [threading.Thread(target=mesh.close) for mesh in meshes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(5.0)
        assert not any(thread.is_alive() for thread in closing)


@pytest.mark.parametrize("peer", ["ends", "has not read a whole frame", "does not read"])
def test_leaving_waits_for_no_peer_that_will_not_read(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdist_ref.transports.mesh.RESUME_SECONDS", 0.05 if peer == "does not read" else 10.0)
    layout = SegmentLayout(2, window=8192)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(bytearray(layout.nbytes)))
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        fill(mesh, own_end)
        if peer == "ends":
            peer_end.close()
        elif peer == "has not read a whole frame":
            mesh.connections[1].rest = None
            # It would never be done.
            monkeypatch.setattr(mesh.connections[1], "report_deliveries", lambda: pytest.fail("the rank waits"))
        mesh.close()
        assert own_end.fileno() == -1
        mesh.close()


def test_a_rank_is_not_disconnected_before_all_it_sent_is_read() -> None:
    """Once a failed send was enough, while another thread had yet to read there that the rank had aborted."""
    layout = SegmentLayout(2, window=8192)
    memory = memoryview(bytearray(layout.nbytes))
    mesh = ConnectionMesh(0, layout, lambda rank: memory)
    rows = [StatusRow(memory, layout.status_row(rank)) for rank in range(2)]
    liveness = HostAndMeshLiveness(NoPeerProcesses(), mesh, rows)
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        peer_end.sendall(pack(MeshFrame(SEMAPHORE_KINDS.index("status"), 1, ())))
        peer_end.close()
        with mesh.reading:
            # The first brings the reset about.
            while mesh.connections[1].rest is not None:
                mesh.send(1, "doorbell", 0, ())
            assert liveness.dead() == []
        while not liveness.dead():
            mesh.progress(1.0)
        assert mesh.counts["status", 1] == 1
        liveness.close()


def test_waiting_for_a_full_socket_works_with_any_descriptor() -> None:
    """Programs with many files have descriptors that `select.select` does not accept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    layout = SegmentLayout(2, window=8192)
    memory = bytearray(layout.nbytes)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(memory), timeout=0.05)
    try:
        with (
            socket_pair() as (_, own_end),
            socket.socket(fileno=fcntl.fcntl(own_end, fcntl.F_DUPFD_CLOEXEC, 2000)) as high_fd,
        ):
            mesh.add(1, high_fd)
            with pytest.raises(RankStalledError, match="rank 1 has not read"):
                mesh.send_direct(1, "chunk", memoryview(bytes(64 << 20)))
            mesh.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_living_child_does_not_keep_its_parents_connections_open() -> None:
    """Once a rank's death was not seen for as long as a child of it lived."""
    layout = SegmentLayout(2, window=8192)
    mesh = ConnectionMesh(0, layout, lambda rank: memoryview(bytearray(layout.nbytes)))
    reader, writer = os.pipe()
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        try:
            mesh.close()
            peer_end.settimeout(20.0)
            assert peer_end.recv(1) == b""
        finally:
            os.close(writer)
            os.waitpid(child, 0)
            os.close(reader)


def test_a_connection_ends_while_another_thread_looks_for_the_dead() -> None:
    """Once the look failed, "Set changed size during iteration", and the death was not named: 1 of 1,000 deaths."""
    layout = SegmentLayout(2, window=8192)
    memory = memoryview(bytearray(layout.nbytes))
    mesh = ConnectionMesh(0, layout, lambda rank: memory)
    with socket_pair() as (peer_end, own_end):
        mesh.add(1, own_end)

        class LivenessOnHost:
            """Looks at processes for so long that another thread reads the end of the connection."""

            def dead(self) -> list[int]:
                peer_end.close()
                if not mesh.disconnected:
                    mesh.progress(1.0)
                return []

            def ending(self, rank: int) -> str:
                return ""

            def close(self) -> None:
                pass

        rows = [StatusRow(memory, layout.status_row(rank)) for rank in range(2)]
        liveness = HostAndMeshLiveness(LivenessOnHost(), mesh, rows)
        assert liveness.dead() == []
        assert liveness.dead() == [1]
        liveness.close()
