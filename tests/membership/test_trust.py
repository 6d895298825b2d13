"""Authentication of ranks: the attacks of processes that reach the store, of other users, and of recorded jobs."""

from __future__ import annotations

import errno
import hmac
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torchdist_ref as dist
from tests.process_ends import answer_of_child
from torchdist_ref.backends.torch_native.gloo import Gloo
from torchdist_ref.errors import AuthenticationError, RankDiedError, RankStalledError, StoreTimeoutError
from torchdist_ref.membership import trust as authentication
from torchdist_ref.membership.group_events import GroupEvents
from torchdist_ref.membership.rounds import Attendee, Round
from torchdist_ref.membership.trust import SECRET, SECRET_FILE, KeyAgreement, KeyServer, receive_key
from torchdist_ref.processes.identity import process_identity
from torchdist_ref.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.stores.sealed import SealedStore, channel_key, is_authenticated, message_code
from torchdist_ref.stores.sockets import TRUST_NETWORK
from torchdist_ref.testing import RankError, fill, run

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


@pytest.fixture(autouse=True)
def no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET, SECRET_FILE, TRUST_NETWORK, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef0123")
    path.chmod(0o600)
    monkeypatch.setenv(SECRET_FILE, str(path))
    return path


@contextmanager
def tcp_stores(count: int) -> Iterator[list[TCPStore]]:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    stores = [master, *(TCPStore("127.0.0.1", master.port) for _ in range(count - 1))]
    try:
        yield stores
    finally:
        for store in reversed(stores):
            store.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls on threads of their own, or their exceptions."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def authenticate(
    store: Any, rank: int, size: int, timeout: float, on_close: list[Callable[[], None]], world_size: int = 0
) -> Any:
    """The sealed store of a rank that agrees with the others by a store alone."""
    agreement = KeyAgreement(store, rank, size, on_close, world_size)
    for key, value in agreement.own.items():
        store.set(key, value)
    return agreement.complete(store, timeout)


def join(stores: list[Any], timeout: float = 20.0) -> list[Any]:
    """Authenticate one rank per store, and return the sealed stores."""
    on_close: list[Callable[[], None]] = []
    size = len(stores)
    calls = [lambda r=r: authenticate(stores[r], r, size, timeout, on_close) for r in range(size)]  # type: ignore[misc]
    try:
        return together(*calls)
    finally:
        for function in on_close:
            function()


def in_child_as(user: int, action: Callable[[], Any]) -> Any:
    """Return the result of an action in a forked process of another user, as text."""

    def answer() -> str:
        os.setgid(user)
        os.setuid(user)
        return repr(action())

    return answer_of_child(answer)


# Sealed values


def test_a_value_that_no_member_wrote_is_refused() -> None:
    whole = HashStore()
    sealed = SealedStore(whole, bytes(range(32)))
    ours = PrefixStore("group/0", sealed)
    ours.multi_set(["a", "b"], ["1", "2"])
    assert ours.multi_get(["a", "b"]) == [b"1", b"2"]
    valid = whole.get("sealed/group/0/a")
    for forged in (b"", b"1", bytes(16) + b"1", valid[:-1] + b"2", valid + b"1", whole.get("sealed/group/0/b")):
        whole.set("sealed/group/0/a", forged)
        for read in (
            lambda: ours.get("a"),
            lambda: ours.multi_get(["b", "a"]),
            lambda: ours.compare_set("a", "y", "x"),
        ):
            with pytest.raises(AuthenticationError, match="'group/0/a' was not written by a member of this job"):
                read()
    whole.queue_push("sealed/q", "code")
    with pytest.raises(AuthenticationError):
        sealed.queue_pop("q")
    with pytest.raises(AuthenticationError):
        PrefixStore("group/0", SealedStore(whole, bytes(32))).get("b")


@pytest.mark.parametrize("length", [0, 1, 32, 63, 64, 65, 128, 1000])
def test_codes_are_those_of_pythons_hmac(length: int) -> None:
    key, data = (bytes(number * number * each % 251 for number in range(length)) for each in (3, 5))
    assert message_code(key, data) == hmac.digest(key, data, "sha256")
    assert message_code(key, data * 100) == hmac.digest(key, data * 100, "sha256")


def test_a_sealed_store_compares_and_sets_as_others() -> None:
    sealed = SealedStore(HashStore(), bytes(32))
    assert sealed.compare_set("k", "", "first") == b"first"
    assert sealed.compare_set("k", "", "second") == b"first"
    assert sealed.compare_set("k", "first", "third") == b"third"
    assert sealed.get("k") == b"third"


def test_each_part_of_a_store_has_a_channel_key_of_its_own() -> None:
    sealed = SealedStore(HashStore(), bytes(32))
    stores = [
        sealed,
        PrefixStore("a", sealed),
        PrefixStore("a", PrefixStore("b", sealed)),
        SealedStore(HashStore(), b"x" * 32),
    ]
    keys = [channel_key(store, purpose) for store in stores for purpose in ("mesh", "objects")]
    assert len(set(keys)) == len(keys) and bytes(32) not in keys
    assert channel_key(PrefixStore("a", sealed), "mesh") == channel_key(PrefixStore("a", sealed), "mesh")


# One host


def test_ranks_of_one_user_agree_on_a_key_that_is_in_no_store() -> None:
    with tcp_stores(3) as stores:
        sealed = join([*stores])
        keys = {store.derived_key("x") for store in sealed}
        assert len(keys) == 1 and all(is_authenticated(store) for store in sealed)
        sealed[2].set("address", "here")
        assert sealed[0].get("address") == b"here"
        secret = sealed[0]._session_key
        assert not any(
            secret in stores[0].get(key) or secret.hex().encode() in stores[0].get(key) for key in stores[0].list_keys()
        )


@pytest.mark.parametrize(
    "known", [{"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}]
)
def test_the_store_does_not_turn_authentication_off_where_a_launcher_reports_one_host(
    known: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who reaches the store has replaced rank 0's entry by one of another network."""
    for name in ("WORLD_SIZE", "SLURM_HET_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**known, "SLURM_STEP_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    for world_size, name in ((0, "world"), (3, "two of them")):
        store = FileStore(str(tmp_path / name), 1)
        store.set("authentication/0", f"user another-host/1 torchdist_ref/{'0' * 32}")
        with pytest.raises(AuthenticationError, match="rank 0 does not serve the session key on this host"):
            authenticate(store, 1, 3 if not world_size else 2, 0.05, [], world_size)


def test_ranks_that_may_be_on_several_hosts_log_both_cures(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    for rank, network in enumerate(("here", "there")):
        store.set(f"authentication/{rank}", f"user {network} torchdist_ref/{'0' * 32}")
    on_close: list[Callable[[], None]] = []
    assert not is_authenticated(authenticate(store, 0, 2, 20.0, on_close))
    on_close[0]()
    for words in (SECRET_FILE, f"{TRUST_NETWORK}=1", "If all ranks are on this host, set MASTER_ADDR=127.0.0.1"):
        assert words in caplog.text


def test_a_file_store_tells_ranks_of_one_host_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stores: list[Store] = [FileStore(str(tmp_path / "one"), 2) for _ in range(2)]
    assert all(is_authenticated(store) for store in join(stores))
    hosts = iter(["a", "b"] * 10)
    monkeypatch.setattr(authentication, "_network", lambda: next(hosts))
    stores = [FileStore(str(tmp_path / "two"), 2) for _ in range(2)]
    sealed = join(stores)
    assert not any(is_authenticated(store) for store in sealed)
    assert "on several hosts and have no job token" in caplog.text and SECRET_FILE in caplog.text


def test_an_entry_of_an_earlier_run_is_replaced() -> None:
    with tcp_stores(2) as stores:
        stale = KeyServer(1)
        stale.close()
        stores[0].set("authentication/0", f"user here {stale.name}")
        on_close: list[Callable[[], None]] = []
        member = ThreadPoolExecutor(1).submit(authenticate, stores[1], 1, 2, 20.0, on_close)
        first = authenticate(stores[0], 0, 2, 20.0, on_close)
        assert member.result().derived_key("x") == first.derived_key("x")
        for function in on_close:
            function()


def early(stores: list[TCPStore], on_close: list[Callable[[], None]]) -> tuple[KeyAgreement, KeyAgreement]:
    """The parts of two ranks, of which rank 1 has read the nonce of rank 0's round."""
    first, second = (KeyAgreement(store, rank, 2, on_close) for rank, store in enumerate(stores))
    second.connect(first.nonce)
    for key, value in first.own.items():
        stores[0].set(key, value)
    return first, second


def test_rank_zero_does_not_wait_for_a_rank_that_has_connected_before_it_greets() -> None:
    """Once it waited until the rank had read that all have met, and had connected then."""
    with tcp_stores(2) as stores:
        on_close: list[Callable[[], None]] = []
        first, second = early(stores, on_close)
        entries = [stores[0].get(key) for key in second.awaited]
        # On one thread: what one rank waited for, the other could not do.
        sealed = first.complete(stores[0], 20.0, [])
        assert not [each for each in threading.enumerate() if "key server" in each.name]
        assert second.complete(stores[1], 20.0, entries).derived_key("x") == sealed.derived_key("x")
        for function in on_close:
            function()


def no_descriptor(*_: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("change", ["another socket", "no socket", "no nonce", "no descriptor", "rank 0 again"])
def test_a_rank_that_could_not_connect_before_it_greets_connects_afterward(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tcp_stores(2) as stores:
        on_close: list[Callable[[], None]] = []
        first, second = early(stores, on_close)
        if change == "another socket":
            # Of this user, but not the one in rank 0's entry.
            other = KeyServer(1)
            second.connect(other.name.rpartition("/")[2])
            other.serve(0.01)
            on_close.append(other.close)
        elif change == "no socket":
            second.connect("0" * 32)
        elif change == "no nonce":
            second.connect("\0/../" * 100)
        elif change == "no descriptor":
            with monkeypatch.context() as patch:
                patch.setattr(socket, "socket", no_descriptor)
                second.connect(first.nonce)
        else:
            second.connect(first.nonce)
        member = ThreadPoolExecutor(1).submit(second.complete, stores[1], 20.0)
        key = first.complete(stores[0], 20.0).derived_key("x")
        assert member.result().derived_key("x") == key
        for function in on_close:
            function()


def test_a_connection_that_is_not_used_is_closed() -> None:
    with tcp_stores(2) as stores:
        on_close: list[Callable[[], None]] = []
        before = len(os.listdir("/proc/self/fd"))
        _, second = early(stores, on_close)
        second.connect("0" * 32)
        assert len(os.listdir("/proc/self/fd")) == before + 1, "rank 0's socket"
        early(stores, on_close)
        assert len(os.listdir("/proc/self/fd")) == before + 3
        for function in on_close:
            function()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("clients_with_long_timeouts")
def test_a_rank_that_never_comes_is_named() -> None:
    with tcp_stores(2) as stores:
        with pytest.raises(RankStalledError, match="rank 0 of 2 did not join in time"):
            authenticate(stores[1], 1, 2, 0.05, [])


class LateStore(HashStore):
    """Store whose server is late: what a rank waits for is there when its time has passed."""

    def wait_get(self, *_: Any) -> list[bytes]:
        self.set("authentication/0", "user here")
        raise StoreTimeoutError("wait: the server does not respond at all")


def test_entries_that_come_at_the_last_moment_are_read() -> None:
    """Once the error was that nobody did not join: "ranks  of 2 did not join in time"."""
    assert authentication._read_entries(LateStore(), ["authentication/0"], 2, 1, 0.0) == [b"user here"]


def rank_zero_that_does_not_serve(store: Store) -> list[Callable[[], None]]:
    """Publish where rank 0 serves the session key, as a process does that is stopped before it does so."""
    on_close: list[Callable[[], None]] = []
    for key, value in KeyAgreement(store, 0, 2, on_close).own.items():
        store.set(key, value)
    return on_close


def test_a_rank_zero_that_is_stopped_before_it_serves_the_key_is_named() -> None:
    with tcp_stores(2) as stores:
        on_close = rank_zero_that_does_not_serve(stores[0])
        text = (
            f"init_process_group or new_group on rank 1: rank 0 of the group listens for this rank, but did not send "
            f"the session key within 0.05 s: process {os.getpid()} of this host does not respond."
        )
        with pytest.raises(RankStalledError, match=re.escape(text)) as caught:
            authenticate(stores[1], 1, 2, 0.05, [])
        assert caught.value.ranks == (0,)
        with pytest.raises(RankStalledError, match="rank 0 of the group") as caught:
            authenticate(stores[1], 1, 2, 0.05, [], world_size=5)
        assert caught.value.ranks == (), "group rank 0 may be another global rank"
        for function in on_close:
            function()


def test_a_wait_for_the_key_ends_with_the_failure_of_a_rank() -> None:
    with tcp_stores(2) as stores:
        on_close = rank_zero_that_does_not_serve(PrefixStore("a", stores[0]))
        watched = WatchedStore("a", stores[1], lambda: RankDiedError("rank 0 died"))
        with pytest.raises(RankDiedError, match="rank 0 died"):
            authenticate(watched, 1, 2, 20.0, [])
        for function in on_close:
            function()


def test_a_wait_for_a_place_in_the_queue_ends_with_the_failure_of_a_rank() -> None:
    server = KeyServer(0)
    clients: list[socket.socket] = []
    codes = [0]
    while codes[-1] == 0:
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].setblocking(False)
        codes.append(clients[-1].connect_ex(f"\0{server.name}"))
    assert codes[-1] == errno.EAGAIN

    def fail() -> None:
        raise RankDiedError("rank 0 died")

    with pytest.raises(RankDiedError, match="rank 0 died"):
        receive_key(server.name, 20.0, fail)
    for client in clients:
        client.close()
    server.close()


@as_root
def test_another_user_gets_no_key_and_gives_none() -> None:
    server = KeyServer(3)
    server.serve()
    assert receive_key(server.name, 20.0) == server.key
    assert "AuthenticationError" in in_child_as(NOBODY, lambda: receive_key(server.name, 20.0))

    def connect_without_a_check() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"\0{server.name}")
            return sock.recv(100)

    assert in_child_as(NOBODY, connect_without_a_check) == "b''"
    assert receive_key(server.name, 20.0) == server.key
    server.close()
    with pytest.raises(ConnectionRefusedError):
        receive_key(server.name, 20.0)


@as_root
def test_a_key_of_another_user_is_refused() -> None:
    name, done = f"torchdist_ref/{'ab' * 16}", os.pipe()

    def impersonate() -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"\0{name}")
            sock.listen()
            os.write(done[1], b"x")
            client, _ = sock.accept()
            client.sendall(bytes(32))
            return "sent"

    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(in_child_as(NOBODY, impersonate)))
    thread.start()
    assert os.read(done[0], 1) == b"x"
    with pytest.raises(AuthenticationError, match=f"belongs to user {NOBODY}, and this rank to user 0"):
        receive_key(name, 20.0)
    thread.join()


@as_root
def test_another_user_who_fills_the_queue_stops_no_rank_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = KeyServer(2)

    def fill_queue() -> int:
        # Connections that have ended stay in the queue.
        for count in range(10_000):
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                if client.connect_ex(f"\0{server.name}") == errno.EAGAIN:
                    return count
        return 0

    assert int(in_child_as(NOBODY, fill_queue)) > 2
    # Rank 0 serves when a rank has found the queue full.
    monkeypatch.setattr(authentication.time, "sleep", lambda _: server.thread or server.serve())
    assert receive_key(server.name, 20.0) == server.key
    server.close()
    assert caplog.text.count("refused the session key") == caplog.text.count(f"of user {NOBODY}") == 1


def test_the_key_server_ends_when_all_ranks_have_the_key() -> None:
    server = KeyServer(2)
    server.serve()
    assert receive_key(server.name, 20.0) == receive_key(server.name, 20.0) == server.key
    child = os.fork()
    if child == 0:
        os._exit(0 if receive_key(server.name, 20.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert server.thread is not None
    server.thread.join(20.0)
    assert not server.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        receive_key(server.name, 20.0)


def test_only_sockets_of_this_library_are_contacted() -> None:
    for name in ("", "token", "/tmp/socket", "torchdist_ref/../x", "torchdist_ref/" + "A" * 32):
        with pytest.raises(AuthenticationError, match="published no socket"):
            receive_key(name, 1.0)


def test_a_forked_child_neither_serves_nor_ends_the_key_server() -> None:
    server = KeyServer(2)
    server.serve()
    child = os.fork()
    if child == 0:
        os._exit(0 if server._socket.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert receive_key(server.name, 20.0) == server.key
    server.close()


# The attack on a default job: a process announces itself as a rank on another host.


@pytest.mark.parametrize("host", [b"elsewhere", b"127.0.0.1"])
def test_a_process_that_announces_itself_in_the_store_does_not_become_a_rank(host: bytes) -> None:
    with tcp_stores(2) as [master, attacker]:
        thread = threading.Thread(target=greet_and_announce, args=(attacker, host))
        thread.start()
        with pytest.raises(RankError, match=r"AuthenticationError.*endpoint/1' was not written by a member"):
            run(only_rank_zero, 1, master.port, ranks="processes", init=False, timeout=60.0)
        assert not [key for key in master.list_keys() if "address" in key], "no listener was published"
        thread.join()


def greet_and_announce(store: TCPStore, host: bytes) -> None:
    opened = Round.parse(store.get("world/round"))
    for prefix in ("", "sealed/", f"world/{opened.nonce}/sealed/"):
        store.set(f"{prefix}group/0/link/endpoint/1", host + b"|1|")
    announced = Attendee(host.decode(), 1, 0, opened.size, "ref", "0123")
    store.set(f"world/{opened.nonce}/present/1", announced.encode())


def only_rank_zero(_: int, port: int) -> None:
    dist.init_process_group("ref", store=TCPStore("127.0.0.1", port), rank=0, world_size=2)


# Tokens


def test_a_secret_authenticates_ranks_of_several_hosts(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_all_on_this_host", lambda *_: False)
    with tcp_stores(3) as stores:
        sealed = join([*stores])
        assert len({store.derived_key("x") for store in sealed}) == 1
        assert all(is_authenticated(store) for store in sealed)


def test_a_recorded_job_cannot_be_replayed(secret_file: Path) -> None:
    """The token stays the same for months, and the attacker has read and now writes every key."""
    with tcp_stores(2) as stores:
        first = join([*stores])
        first[1].set("group/0/link/endpoint/1", "attacker's host")
        recorded = {key: stores[0].get(key) for key in stores[0].list_keys()}
    with tcp_stores(2) as [store, attacker]:
        for key, value in recorded.items():
            attacker.set(key, value)
        sealed = authenticate(store, 0, 2, 20.0, [])
        assert sealed.derived_key("x") != first[0].derived_key("x")
        with pytest.raises(AuthenticationError):
            sealed.get("group/0/link/endpoint/1")


def test_ranks_with_different_secrets_do_not_believe_each_other(
    secret_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 20)
    other.chmod(0o600)
    with tcp_stores(2) as stores:
        on_close: list[Callable[[], None]] = []
        with ThreadPoolExecutor(1) as pool:
            member = pool.submit(authenticate, stores[1], 1, 2, 20.0, on_close)
            stores[0].wait(["authentication/1"])
            monkeypatch.setenv(SECRET_FILE, str(other))
            first = authenticate(stores[0], 0, 2, 20.0, on_close)
            member.result().set("address", "here")
        with pytest.raises(AuthenticationError, match="different job tokens"):
            first.get("address")


def test_ranks_with_and_without_a_secret_name_the_difference(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tcp_stores(2) as stores:
        with ThreadPoolExecutor(1) as pool:
            with_secret = pool.submit(authenticate, stores[0], 0, 2, 20.0, [])
            stores[1].wait(["authentication/0"])
            monkeypatch.delenv(SECRET_FILE)
            with pytest.raises(AuthenticationError, match=f"another rank has {SECRET_FILE}"):
                authenticate(stores[1], 1, 2, 20.0, [])
            stores[1].set("authentication/1", "user somewhere")
            with pytest.raises(AuthenticationError, match="disagree about how to authenticate"):
                with_secret.result()


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [("short", 0o600, "has 5 bytes; it needs 16"), ("x" * 40, 0o644, "other users may read")],
)
def test_a_bad_secret_file_is_refused(secret_file: Path, content: str, mode: int, text: str) -> None:
    secret_file.write_text(content)
    secret_file.chmod(mode)
    with pytest.raises(AuthenticationError, match=text):
        authenticate(HashStore(), 0, 1, 1.0, [])
    secret_file.unlink()
    with pytest.raises(AuthenticationError, match="No such file"):
        authenticate(HashStore(), 0, 1, 1.0, [])


@as_root
@pytest.mark.parametrize("linked", [False, True])
def test_a_secret_that_another_user_knows_is_refused(secret_file: Path, linked: bool) -> None:
    os.chown(secret_file, NOBODY, NOBODY)
    if linked:
        secret_file.rename(secret_file.with_name("target"))
        secret_file.symlink_to("target")
    with pytest.raises(AuthenticationError, match=rf"belongs to user {NOBODY}.*chown {os.geteuid()} {secret_file}"):
        authenticate(HashStore(), 0, 1, 1.0, [])


@pytest.mark.parametrize("kind", ["FIFO", "directory"])
def test_a_secret_file_that_is_no_file_is_refused_at_once(secret_file: Path, kind: str) -> None:
    secret_file.unlink()
    os.mkfifo(secret_file, 0o600) if kind == "FIFO" else secret_file.mkdir(0o700)
    with pytest.raises(AuthenticationError, match=r"it is not a regular file|Is a directory"):
        authenticate(HashStore(), 0, 1, 1.0, [])


def test_a_short_secret_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "x")
    with pytest.raises(AuthenticationError, match=f"{SECRET}: the token has 1 bytes; it needs 16"):
        authenticate(HashStore(), 0, 1, 1.0, [])


def test_a_trusted_network_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_NETWORK, "1")
    with tcp_stores(2) as stores:
        sealed = join([*stores])
        sealed[0].set("k", "v")
        assert sealed[1].get("k") == b"v" and not any(is_authenticated(store) for store in sealed)
        monkeypatch.setenv(TRUST_NETWORK, "0")
        with pytest.raises(AuthenticationError, match=f"another rank has {TRUST_NETWORK}=1"):
            authenticate(stores[1], 1, 2, 20.0, [])


def between_hosts(rank: int, port: int, path: str) -> list[float]:
    os.environ |= {"TORCHDIST_REF_HOST_ID": str(rank), SECRET_FILE: path}
    dist.init_process_group("ref", store=TCPStore("127.0.0.1", port), rank=rank, world_size=2)
    tensor = fill(rank, (7,))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [*tensor.tolist()]


def test_a_mesh_between_hosts_with_a_secret(secret_file: Path) -> None:
    with tcp_stores(1) as [store]:
        expected = (fill(0, (7,)) + fill(1, (7,))).tolist()
        assert run(between_hosts, 2, store.port, str(secret_file), ranks="processes", init=False) == [
            expected,
            expected,
        ]


OBJECTS = """
import sys, torch, torchdist_ref as dist, torch.distributed as torchs
from fractions import Fraction
dist.init_process_group(sys.argv[1])
rank, found = dist.get_rank(), []
for library in (dist, torchs):
    gathered = [None, None]
    library.all_gather_object(gathered, Fraction(rank + 1, 7))
    found.append(gathered)
sys.stdout.write(f"{found}\\n")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["torchdist_ref.launch", "torch.distributed.run"])
def test_ranks_of_one_host_exchange_any_object_without_a_setting(
    launcher: str, python_with_torch: str, tmp_path: Path
) -> None:
    script = tmp_path / "objects_of_ranks.py"
    script.write_text(OBJECTS)
    command = [python_with_torch, "-m", launcher, "--nproc-per-node", "2", str(script), "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count(str([[Fraction(1, 7), Fraction(2, 7)]] * 2)) == 2, done.stdout + done.stderr


def test_gloos_rank_0_believes_no_other_program_that_a_rank_needs_the_store_no_more() -> None:
    """Rank 0 once returned, and might close the store that rank 1 still reads."""
    whole = HashStore()
    sealed = SealedStore(whole, bytes(32))
    sealed.set("connected/1", process_identity())
    whole.set("sealed/gone on/1", "forged")
    rank_0: Any = SimpleNamespace(
        _membership=SimpleNamespace(store=sealed, rank=0, size=2, timeout=5.0, watch=None),
        _events=GroupEvents(sealed, 0, [0, 1]),
    )
    with pytest.raises(AuthenticationError, match="'gone on/1' was not written by a member of this job"):
        Gloo._after_connect(rank_0)
