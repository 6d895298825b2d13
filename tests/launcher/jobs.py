"""Jobs of test_api: functions that another process can import."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torchdist_ref.elastic.utils.store import synchronize

from torchdist_ref.rendezvous import rendezvous

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


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ENVIRONMENT}


def add(*numbers: int) -> int:
    return sum(numbers) + int(os.environ["RANK"])


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
