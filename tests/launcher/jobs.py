"""Jobs of test_api and test_contexts: functions that another process can import.

Each rank imports this file. Do not import torch here: it would take each of them two seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torchdist_ref.elastic.utils.store import synchronize

from torchdist_ref.errors import RankDiedError
from torchdist_ref.rendezvous import rendezvous
from torchdist_ref.stores import TCPStore

ENVIRONMENT = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "CUDA_VISIBLE_DEVICES",
)


def connections_to_the_store() -> tuple[int, int]:
    """Return how many connections the launcher's store has before this rank makes a client, and with it."""
    before = _connections(int(os.environ["MASTER_PORT"]))
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set("key", "value")
    assert store.get("key") == b"value"
    return before, _connections(store.port)


def _connections(port: int) -> int:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ENVIRONMENT}


def add(*numbers: int) -> int:
    return sum(numbers) + int(os.environ["RANK"])


def loaded(name: str) -> bool:
    return name in sys.modules


def same(*args: Any) -> tuple[Any, ...]:
    return args


def fail(folder: str, rank: int, good_after: int) -> int:
    """Fail on rank `rank` until it has been started `good_after` times; the others wait to be stopped, or return."""
    mine, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (Path(folder) / f"started {mine}").open("a") as file:
        file.write("x")
    if count < good_after:
        if mine == rank:
            raise ValueError(f"attempt {count} of rank {mine}")
        signal.pause()
    return count


def die(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def signal_launcher() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


def meet() -> list[bytes]:
    store, rank, world_size = next(iter(rendezvous("env://")))
    return synchronize(store, b"rank %d" % rank, rank, world_size, "prefix", 10)


def port_of_store() -> str:
    return os.environ["MASTER_PORT"]


def not_picklable() -> Any:
    return lambda: None


def print_to_both() -> None:
    print("out of", os.environ["RANK"])
    print("error of", os.environ["RANK"], file=sys.stderr)


def print_and_cube(rank: int) -> int:
    print("out", rank, os.environ["A"])
    print("error", file=sys.stderr)
    return rank**3


def die_or_fail_of_it(rank: int, reader: int, writer: int) -> None:
    """Die on rank 1; the others raise as soon as they notice."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.read(reader, 1)
    raise ValueError(f"rank {rank} lost rank 1")


def fail_after_its_victim(rank: int, reader: int, writer: int) -> None:
    """Raise on rank 1 after the others have ended because of it."""
    if rank != 1:
        raise RankDiedError("rank 1 does not come")
    os.close(writer)
    os.read(reader, 1)
    raise ValueError("rank 1 was slow to fail")


def fail_on(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} has no data")
    signal.pause()


def exit_on(rank: int, bad: int, code: int) -> None:
    if rank == bad:
        sys.exit(code)
    signal.pause()


def start_a_daemon_and_wait(path: str) -> None:
    """Start a process in a session of its own, write its number to a file, and exit with 40 plus the file's name."""
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(40 + int(Path(path).name)))
    process = subprocess.Popen(
        ["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    Path(path + ".part").write_text(str(process.pid))
    Path(path + ".part").rename(path)
    # Python does not notice a signal that comes right before a system call that waits without end.
    while True:
        time.sleep(0.1)


def wait_for_signal() -> None:
    signal.pause()


def put_and_fill(rank: int, queue: Any, tensor: Any) -> None:
    for position in range(len(tensor)):
        tensor[position] = position**2
    queue.put(f"from {rank}")


def wait_for_event(rank: int, event: Any) -> None:
    event.wait()
