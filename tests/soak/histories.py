"""Histories of a TCPStore whose clients are killed, stopped and disconnected, and a checker that explains them.

In each history a few processes call the store at once, on a few keys, and log when each call began and what it
returned. Meanwhile one is killed, another is stopped for a while, and in half of the histories a relay drops responses
and breaks the connection, so that clients send requests again. `linearizability` then looks for an order of the calls,
key by key, that explains every result.
"""

from __future__ import annotations

import ast
import faulthandler
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.soak.linearizability import NEVER, UNKNOWN, Call, unexplained
from tests.soak.proofs import Limits, Outcome
from tests.stores.store_helpers import LossyRelay
from torchdist_ref.errors import QueueEmptyError, StoreTimeoutError
from torchdist_ref.stores import TCPStore

CLIENTS, CALLS = (2, 4), (6, 14)
TIMEOUT, HANG_SECONDS = timedelta(milliseconds=300), 20.0
WORDS = (b"", b"a", b"bc", b"17")
READERS = ("get", "queue_pop", "queue_pop_now")


def random_call(rng: random.Random) -> tuple[str, str, tuple[Any, ...]]:
    """Return a key, a function and its arguments: keys of registers, counters and queues."""
    kind = rng.choice(("register", "register 2", "counter", "queue"))
    names: dict[str, Callable[[], tuple[Any, ...]]] = {"get": tuple, "check": tuple, "delete_key": tuple}
    if kind == "queue":
        names = dict.fromkeys(("queue_pop", "queue_pop_now", "queue_len", "check"), tuple)
        name = rng.choice((*names, "queue_push", "queue_push", "queue_push"))
        return kind, name, (rng.randbytes(2),) if name == "queue_push" else ()
    if kind == "counter":
        names |= {"add": lambda: (rng.randrange(-3, 9),), "set": lambda: (b"%d" % rng.randrange(99),)}
        name = rng.choice((*names, "add", "add", "add"))
        return kind, name, names[name]()
    names |= {
        "set": lambda: (rng.choice(WORDS) + rng.randbytes(1),),
        "append": lambda: (rng.randbytes(1),),
        "compare_set": lambda: (rng.choice(WORDS), rng.choice(WORDS)),
    }
    name = rng.choice((*names, "set", "append", "compare_set"))
    return kind, name, names[name]()


def call(store: TCPStore, key: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Call the store, and return the result in the terms of `linearizability.apply`."""
    if name == "queue_pop_now":
        try:
            return store.queue_pop(key, block=False)
        except QueueEmptyError:
            return "empty"
    if name == "check":
        return store.check([key])
    return getattr(store, name)(key, *arguments)


def run_client(port: int, prefix: str, seed: str, log: int, ready: int, go: int) -> None:
    """Make random calls, and log each before and after it."""
    rng = random.Random(seed)
    try:
        store = TCPStore("127.0.0.1", port)
        store.set_timeout(TIMEOUT)
    finally:
        os.write(ready, b".")
    os.read(go, 1)
    for _ in range(rng.randint(*CALLS)):
        key, name, arguments = random_call(rng)
        began = time.monotonic()
        os.write(log, f"{(key, name, arguments, began)!r}\n".encode())
        try:
            result = call(store, f"{prefix}/{key}", name, arguments)
        except StoreTimeoutError as error:
            # It waited in vain, without an effect; or the server was held up, and runs the request later.
            result = "no response" if "may or may not have been done" in str(error) else "timed out"
        os.write(log, f"{(result, time.monotonic())!r}\n".encode())


def calls_of(text: str) -> Iterator[Call]:
    """Read the log of one client."""
    lines = [ast.literal_eval(line) for line in text.splitlines()]
    for made, returned in zip(lines[::2], [*lines[1::2], None], strict=False):
        key, name, arguments, began = made
        result, ended = returned or (UNKNOWN, NEVER)
        if result == "no response" or (result == "timed out" and name not in READERS):
            result, ended = UNKNOWN, NEVER
        if result != "timed out":
            yield Call(key, name, arguments, result, began, ended)


@contextmanager
def server(seed: int) -> Iterator[tuple[int, int]]:
    """Serve a store from another process; yield its port, and that of a relay which drops responses now and then."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        rng = random.Random(f"relay {seed}")
        with suppress(BaseException):
            os.close(receiver)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            relay = LossyRelay(store.port)
            os.write(sender, f"{store.port} {relay.port}".encode())
            while os.getppid() != 1:
                # By requests, not by time: on a busy machine no client would come through.
                next_loss = relay.requests + rng.randint(8, 40)
                while relay.requests < next_loss and os.getppid() != 1:
                    time.sleep(0.0005)
                relay.lose_responses = 1
        os._exit(1)
    os.close(sender)
    try:
        port, relayed = map(int, os.read(receiver, 64).split())
        yield port, relayed
    finally:
        os.close(receiver)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def fork(body: Callable[[], None]) -> int:
    """Run a function in a forked process, and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(int(HANG_SECONDS))
        faulthandler.dump_traceback_later(HANG_SECONDS / 2)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def history(port: int, seed: int, folder: Path) -> tuple[list[Call], str]:
    """Run the clients of one history; return their calls, and a failure of a client that was not killed."""
    rng = random.Random(seed)
    (ready_receiver, ready_sender), (go_receiver, go_sender) = os.pipe(), os.pipe()
    pids, paths = [], []
    for number in range(rng.randint(*CLIENTS)):
        paths.append(folder / f"{seed} {number}")
        log = os.open(paths[-1], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        arguments = (port, f"history {seed}", f"{seed} {number}", log, ready_sender, go_receiver)
        pids.append(fork(lambda arguments=arguments: run_client(*arguments)))
        os.close(log)
    killed, stopped = rng.sample(pids, 2)
    for _ in pids:
        # A client that cannot connect ends by its alarm, and is reported below.
        if select.select([ready_receiver], [], [], HANG_SECONDS)[0]:
            os.read(ready_receiver, 1)
    os.write(go_sender, b"." * len(pids))
    interrupt(killed, stopped, rng)
    failure = ""
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        if status and not (pid == killed and os.WTERMSIG(status) == signal.SIGKILL):
            failure = f"a client ended with status {status}"
    for descriptor in (ready_receiver, ready_sender, go_receiver, go_sender):
        os.close(descriptor)
    calls = [each for path in paths for each in calls_of(path.read_text(encoding="utf-8"))]
    for path in paths:
        path.unlink()
    return calls, failure


def interrupt(killed: int, stopped: int, rng: random.Random) -> None:
    """Stop one client, kill another, and continue the first."""
    time.sleep(rng.random() * 0.003)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(rng.random() * 0.003)
    os.kill(killed, signal.SIGKILL)
    time.sleep(rng.random() * 0.02)
    os.kill(stopped, signal.SIGCONT)


def prove(limits: Limits) -> Outcome:
    """Record histories, and look for an order that explains each."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="histories-") as name, server(limits.seed) as (port, relayed):
        for seed, _ in limits.seeds():
            calls, failure = history(relayed if seed % 2 else port, seed, Path(name))
            outcome.done += 1
            outcome.counts["calls"] += len(calls)
            outcome.counts["calls that never returned"] += sum(each.ended == NEVER for each in calls)
            if failure:
                outcome.fail(f"seed {seed}: {failure}")
            for key, found in unexplained(calls).items():
                outcome.fail(f"seed {seed}: no order explains the calls on {key!r}: {[*map(tuple, found)]}")
    return outcome
