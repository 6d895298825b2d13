"""What holds for every test: one thread a rank, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests import huge_pages, warm_python

# Two ranks on two cores with a thread pool each would measure the scheduler.
torch.set_num_threads(1)

# A shell that starts the tests in its background has them ignore Ctrl-C, and ranks inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` has them ignore that the terminal is gone; some tests send that signal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hypothesis measures how long an example takes, which on a busy machine says nothing. A machine with a GPU may lack it.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# On a busy machine the kernel needs seconds for the memory of a process that was killed.
TIMEOUT_SECONDS = 10.0
# multiprocessing starts these once per process and keeps them.
KEPT = ("resource_tracker", "forkserver")
# So many tests fork so often that it pays to copy the memory of this process, 0.3 s, into huge pages.
MANY_TESTS = 200
# Once forks have taken so long it pays to copy it again: with 1 GB in small pages, 12 forks; after a copy, some 50.
SECONDS_OF_FORKS = 0.3
FORKS = huge_pages.Forks()
# Modules that forked ranks would each load, some milliseconds, unless this process has.
OF_RANKS = ("torchdist_ref.backends.torch_native.gloo", "torchdist_ref.backends.ref_in_torch.creation")
# The same for ranks that compile or shard by torch's modules, 0.7 s. Some versions of torch lack some.
OF_TORCHS_MODULES = (
    "torch._dynamo.backends.common",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.export._trace",
    "torch.distributed.tensor.experimental",
)
# The C library's function that returns free memory to the system; other libraries have none.
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def children() -> set[int]:
    """Return the live child processes of this one, of whichever thread started them."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in task.read_text().split())
        except OSError:
            # The thread ended between the listing and the reading.
            continue
    return {pid for pid in found if not any(word in command(pid) for word in KEPT)}


def command(pid: int) -> str:
    """Return the command line of a process, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def still_there(pids: set[int], timeout: float) -> set[int]:
    """Return those that do not end in time. A child that ended but was never waited for counts as left behind."""
    end = time.monotonic() + timeout
    while (left := pids & children()) and time.monotonic() < end:
        # The kernel tells us of a child's end without polling; a short limit, since there may be several.
        wait_for(next(iter(left)), 0.1)
    return left


def still_running(before: set[threading.Thread], timeout: float) -> set[threading.Thread]:
    """Return the threads beside those of `before` that do not end in time."""
    end = time.monotonic() + timeout
    while (left := set(threading.enumerate()) - before) and time.monotonic() < end:
        started = next((thread for thread in left if thread.ident is not None), None)
        if started is None:
            # A server starts a thread at this moment: it can't be joined yet.
            os.sched_yield()
        else:
            started.join(0.1)
    return left


def wait_for(pid: int, seconds: float) -> None:
    """Wait until a process ends, at most so long."""
    import select

    from torchdist_ref.processes.linux_calls import pidfd_open

    try:
        descriptor = pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of tests on simulated devices, by which `tests.gpu` finds them."""
    config.addinivalue_line("markers", "sim: runs on simulated devices")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the tests have loaded out of garbage collections, which take half a second with it."""
    for name in OF_RANKS if len(session.items) >= MANY_TESTS else ():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # Not `session.testscollected`, which is 0 until this returns.
    if len(session.items) >= MANY_TESTS:
        huge_pages.collapse()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Return what tests have freed, and map the rest by huge pages, once forks have become slow or were many."""
    if item.session.testscollected >= MANY_TESTS:
        FORKS.collapse_after(SECONDS_OF_FORKS, lambda: TRIM and TRIM(0))


@pytest.fixture(autouse=True)
def registries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the rendezvous handlers and backends that a test or an example of the documentation registers."""
    # The package has a function of the module's name.
    for name, registry in (("torchdist_ref.rendezvous", "handlers"), ("torchdist_ref.backends.registry", "registered")):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, registry, dict(getattr(module, registry)))


@pytest.fixture(autouse=True)
def late_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `run` wait longer for the others once a rank has died: a busy machine may not resume them within 3 s."""
    running = importlib.import_module("torchdist_ref.testing.running")
    monkeypatch.setattr(running, "LIMITS", running.RunLimits(grace=15.0))


@pytest.fixture(scope="session")
def torchs_modules() -> None:
    """Load torch's compiler and what its modules load late, for ranks that are forked after."""
    with warnings.catch_warnings():
        # They define functions by torch.jit, which torch deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in OF_TORCHS_MODULES:
            with suppress(ImportError):
                importlib.import_module(name)


@pytest.fixture(scope="session")
def python_with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the path of a Python that has torch loaded, for programs that others start: see `tests.warm_python`."""
    with warm_python.started(tmp_path_factory.mktemp("python")) as path:
        yield path


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function for tests of torch's parts to call after their comparisons: see `tests.drop_in.packages`."""
    from tests.drop_in.packages import publish

    return lambda *seen: publish(request.node.nodeid, *seen)


@pytest.fixture
def clients_with_long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients of a store wait for a busy server: to connect to it, and for its report at the end of a wait."""
    from torchdist_ref import timeouts
    from torchdist_ref.stores.tcp.client import ConnectionPool

    connect = ConnectionPool.connect
    monkeypatch.setattr(timeouts, "MIN_GRACE_SECONDS", 20.0)
    monkeypatch.setattr(ConnectionPool, "connect", lambda pool, _: connect(pool, timeouts.Deadline(20.0)))


@pytest.fixture(scope="session")
def parent_of_device_tests() -> None:
    """Start the process from which tests on the simulated device are forked, before the first of them is watched."""
    from tests import on_sim

    if not on_sim.missing():
        on_sim.parent()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process or a thread behind."""
    threads, processes = set(threading.enumerate()), children()
    yield
    left = [thread.name for thread in still_running(threads, TIMEOUT_SECONDS)]
    alive = {pid: command(pid) for pid in still_there(children() - processes, TIMEOUT_SECONDS)}
    assert not left, f"{request.node.name} left threads behind: {left}"
    assert not alive, f"{request.node.name} left processes behind: {alive}"
