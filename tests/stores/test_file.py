"""FileStore: the contract, torch's file format both ways, several processes, and files that are not a store's."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import threading
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed

from tests.descriptors import use_all_descriptors
from tests.stores.store_helpers import in_child
from tests.stores.store_model import machine
from torchdist_ref.errors import DistStoreError, StoreTimeoutError
from torchdist_ref.stores import FileStore
from torchdist_ref.stores.base import limit_requests
from torchdist_ref.stores.file import OPEN_COUNT
from torchdist_ref.testing.store_contract import check_store
from torchdist_ref.timeouts import Deadline

numbers = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture
def path(folder: Path) -> str:
    return str(folder / f"store{next(numbers)}")


def test_store_contract(folder: Path) -> None:
    check_store(lambda: FileStore(str(folder / f"store{next(numbers)}")))


def test_model(folder: Path) -> None:
    machine(lambda: FileStore(str(folder / f"store{next(numbers)}"), 1), queues=False).TestCase().runTest()


def test_file_has_torchs_bytes(path: str) -> None:
    store = FileStore(path, 2)
    store.set("k", "v")
    store.delete_key("k")
    assert store.delete_key("k") is False

    def record(key: bytes, value: bytes) -> bytes:
        return struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value

    assert Path(path).read_bytes() == record(b"refcount/", b"1") + record(b"/k", b"v") + record(b"-/k", b"")


def test_files_are_exchanged_with_torch(path: str) -> None:
    ours, theirs = FileStore(path, 2), torch.distributed.FileStore(path, 2)
    theirs.set_timeout(timedelta(seconds=10))
    for number, key in enumerate(["k", "", "a/b", "-/x", "ü"]):
        ours.set(key, str(number * number))
        assert theirs.get(key) == str(number * number).encode()
        theirs.set(key, b"\x00back")
        assert ours.get(key) == b"\x00back"
    assert [ours.add("n", 3), theirs.add("n", 4), ours.add("n", -9)] == [3, 7, -2]
    assert ours.compare_set("k", "wrong", "x") == theirs.compare_set("k", "wrong", "x") == b"\x00back"
    theirs.delete_key("k")
    assert not ours.check(["k"]) and ours.num_keys() == theirs.num_keys()
    ours.delete_key("a/b")
    assert not theirs.check(["a/b"])
    ours.multi_set(["p", "q"], ["1", "2"])
    assert theirs.multi_get(["p", "q"]) == [b"1", b"2"]


@pytest.mark.parametrize("ours_last", [True, False])
def test_last_of_world_size_removes_the_file_also_torchs(path: str, ours_last: bool) -> None:
    ours, theirs = FileStore(path, 2), torch.distributed.FileStore(path, 2)
    if ours_last:
        del theirs
        assert os.path.exists(path)
        ours.close()
    else:
        ours.close()
        assert os.path.exists(path)
        del theirs
    assert not os.path.exists(path)


def test_collected_store_closes_itself(path: str) -> None:
    store = FileStore(path, 1)
    store.set("k", "v")
    del store
    assert not os.path.exists(path)


def test_file_without_a_world_size_is_kept(path: str) -> None:
    FileStore(path).close()
    assert os.path.exists(path)


def add_many(pipe: Connection, path: str, amount: int) -> None:
    store = FileStore(path)
    for _ in range(25):
        store.add("sum", amount)
    store.append("done", f"<{amount}>")
    pipe.send(store.get("sum"))


def test_adds_of_several_processes_are_atomic(path: str) -> None:
    store = FileStore(path)
    with in_child(add_many, path, 3) as (one, _), in_child(add_many, path, 1000) as (two, _):
        one.recv()
        two.recv()
    assert store.add("sum", 0) == 25 * 1003
    assert sorted(store.get("done").decode().strip("<>").split("><")) == ["1000", "3"]


@pytest.mark.parametrize(
    "content",
    [
        b"hello world, no store",
        b"\xff" * 64,
        b"\x00\x00\x00\x00",
        struct.pack("<I", 2) + b"/k" + b"\x01\x00",
        os.urandom(999),
    ],
    ids=["text", "huge length", "nothing", "cut off", "random"],
)
def test_file_that_is_not_a_store_is_an_error_at_once(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(DistStoreError, match="is not the file of a store, or is damaged"):
        FileStore(path, 2)
    assert Path(path).read_bytes() == content


def test_missing_directory_and_directory_are_errors_at_once(folder: Path) -> None:
    with pytest.raises(DistStoreError, match=r"the directory '.*nowhere' does not exist"):
        FileStore(str(folder / "nowhere" / "store"))
    with pytest.raises(DistStoreError, match="Is a directory"):
        FileStore(str(folder))
    with pytest.raises(TypeError, match="file_name"):
        FileStore(7)  # type: ignore[arg-type]


def test_file_that_was_removed_or_replaced(path: str) -> None:
    store = FileStore(path)
    store.set("k", "old")
    os.unlink(path)
    with pytest.raises(DistStoreError, match="the file is gone"):
        store.get("k")
    FileStore(path).set("k", "new")
    assert store.get("k") == b"new"


def test_lock_held_by_another_process_is_a_timeout(path: str) -> None:
    store = FileStore(path)
    store.set_timeout(timedelta(milliseconds=80))
    with open(path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StoreTimeoutError, match=r"the lock of .* was not free within 0.08 s"):
            store.set("k", "v")
        fcntl.flock(holder, fcntl.LOCK_UN)
        store.set_timeout(timedelta(seconds=20))
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_child_forked_while_another_thread_has_the_lock_does_not_keep_it(path: str) -> None:
    store = FileStore(path)
    store.set("k", "v")
    locked, forked = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with store._log.reading(Deadline(20)):
            locked.set()
            forked.wait(20)

    holder = threading.Thread(target=hold_lock)
    holder.start()
    assert locked.wait(20)
    ends, ended = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        # Lives until the parent has used the store.
        os.read(ends, 1)
        os._exit(int(store.get("k") != b"new"))
    os.close(ends)
    forked.set()
    holder.join()
    store.set_timeout(timedelta(seconds=5))
    try:
        store.set("k", "new")
    finally:
        os.close(ended)
        status = os.waitpid(child, 0)[1]
    assert status == 0


def test_a_wait_for_the_lock_ends_with_the_operation_that_it_belongs_to(path: str) -> None:
    store = FileStore(path)
    store.set_timeout(timedelta(seconds=20))
    with open(path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with limit_requests(0.05), pytest.raises(StoreTimeoutError) as caught:
            store.check(["k"])
    waited = re.search(r"was not free within (\S+) s", str(caught.value))
    assert waited is not None and float(waited[1]) <= 0.05


def test_a_thread_that_waits_for_the_lock_does_not_hold_up_others(path: str) -> None:
    store = FileStore(path)
    store.set_timeout(timedelta(milliseconds=20))
    errors: list[BaseException] = []

    def waits() -> None:
        try:
            store.check(["k"])
        except StoreTimeoutError as error:
            errors.append(error)

    with store._log._lock:
        thread = threading.Thread(target=waits, daemon=True)
        thread.start()
        thread.join(20)
        assert len(errors) == 1


def test_the_file_is_for_its_owner_only(path: str) -> None:
    before = os.umask(0)
    try:
        FileStore(path)
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_a_file_of_another_user_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path)
    os.chown(path, 65534, -1)
    for use in (lambda: FileStore(path), lambda: store.check(["k"])):
        with pytest.raises(DistStoreError, match=r"belongs to user 65534, and this process to user 0: .* another path"):
            use()
    monkeypatch.setenv("TORCHDIST_REF_TRUST_NETWORK", "1")
    assert not store.check(["k"])


def test_a_file_that_others_can_write_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path)
    os.chmod(path, 0o620)
    with pytest.raises(DistStoreError, match=f"can be written by other users.*Run: chmod 600 {path}; or set"):
        store.check(["k"])
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDIST_REF_TRUST_NETWORK", "1")
        assert not store.check(["k"])
    os.chmod(path, 0o600)
    assert not store.check(["k"])


def test_a_file_that_torch_created_is_used_with_a_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    former = os.umask(0o022)
    theirs = torch.distributed.FileStore(path, 2)
    theirs.set("k", "v")
    os.umask(former)
    assert os.stat(path).st_mode & 0o777 == 0o644
    ours = FileStore(path, 2)
    assert ours.get("k") == ours.get("k") == b"v"
    assert caplog.text.count("other users can read") == 1


def test_failed_write_leaves_no_partial_record(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = FileStore(path), FileStore(path)
    store.set("k", "v")
    size = os.path.getsize(path)
    real, calls = os.write, count()

    def fills_up(descriptor: int, data: memoryview) -> int:
        if next(calls):
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:3])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fills_up)
        with pytest.raises(DistStoreError, match="No space left on device"):
            store.set("k", "lost")
    assert os.path.getsize(path) == size
    assert store.get("k") == other.get("k") == b"v"


def test_set_wakes_a_wait_of_another_object(path: str) -> None:
    store, results = FileStore(path), []
    other = store.clone()
    thread = threading.Thread(target=lambda: results.append(other.get("late")))
    thread.start()
    store.set("late", "1")
    thread.join()
    assert results == [b"1"]


def test_the_last_one_to_close_does_not_remove_what_another_writes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank opens the file for its next world between the last close of this world and the removal of the file."""
    first, last = FileStore(path, 2), FileStore(path, 2)
    first.close()
    unlink, flock = os.unlink, fcntl.flock
    opened: list[FileStore] = []
    has_opened_or_waits = threading.Event()

    def open_and_set() -> None:
        opened.append(FileStore(path, 2))
        opened[0].set("of the next world", "v")
        has_opened_or_waits.set()

    def lock(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except BlockingIOError:
            has_opened_or_waits.set()
            raise

    opener = threading.Thread(target=open_and_set)

    def unlink_late(name: str) -> None:
        opener.start()
        assert has_opened_or_waits.wait(20)
        unlink(name)

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr("torchdist_ref.stores.file.os.unlink", unlink_late)
    last.close()
    monkeypatch.undo()
    opener.join()
    other = FileStore(path, 2)
    assert other.check(["of the next world"]) and other._log.table.number(OPEN_COUNT) == 2


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def publish_without_a_descriptor(pipe: Connection, path: str, store: FileStore) -> None:
    store.set("used", "since")
    stores = [store, FileStore(path)]
    use_all_descriptors()
    for index, each in enumerate(stores):
        for key in "ab":
            each.set(f"failure {key}{index}", "no free descriptor")
    pipe.send([each.get("failure a1") for each in stores])


def test_a_process_without_a_free_descriptor_can_still_publish(path: str) -> None:
    """A store of its own, and one that it inherited and has used since."""
    store = FileStore(path)
    store.set("k", "v")
    with in_child(publish_without_a_descriptor, path, store) as (pipe, _):
        assert pipe.recv() == [b"no free descriptor"] * 2
    assert (
        store.multi_get([f"failure {key}{index}" for key in "ab" for index in range(2)]) == [b"no free descriptor"] * 4
    )


def test_closed_stores_and_those_that_cannot_open_their_file_keep_no_descriptor(path: str) -> None:
    Path(path).write_bytes(b"hello world, no store")
    before = open_descriptors()
    with pytest.raises(DistStoreError):
        FileStore(path)
    os.unlink(path)
    store = FileStore(path)
    assert len(open_descriptors() - before) == 1
    store.close()
    del store
    FileStore(path).set("k", "v")
    assert open_descriptors() == before
