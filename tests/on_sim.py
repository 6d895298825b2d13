"""Tests on the simulated device, each in a process of its own.

A process has the device for good: `torch.accelerator` names it from then on, also for tests that know nothing of it. So
`on_sim` has a process forked for a test, which installs the device there and runs the test.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from torchdist_ref.testing import simulated_device
from torchdist_ref.testing.simulated_device import building

NEEDS_PARENT = pytest.mark.usefixtures("parent_of_device_tests")


@functools.cache
def build() -> subprocess.Popen[str]:
    """Compile the device in a process of its own, 30 s of a core: it goes on where a test's time ends before."""
    command = [sys.executable, "-m", "torchdist_ref.testing.simulated_device"]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@functools.cache
def missing() -> str:
    """Return why the device can't be had here, or the empty string."""
    try:
        building.compiler()
    except simulated_device.BuildError as error:
        return str(error)
    errors = build().communicate()[1]
    assert build().returncode == 0, errors
    return ""


def forked(body: Callable[[], object]) -> None:
    """Run `body` in a forked process and raise AssertionError with its traceback if it fails there."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            os.write(writing, traceback.format_exc()[-4000:].encode())
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as text:
        report = text.read()
    _, status = os.waitpid(process, 0)
    assert status == 0, report or f"the process of the test ended with status {os.waitstatus_to_exitcode(status)}"


class Parent:
    """The process that tests are forked from: it has torch and the library, and has run nothing.

    Torch counts devices at the first backward pass of a process, for good: forked from a process that has run one, a
    test could not run a backward pass on the simulated device.
    """

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        command = [sys.executable, "-c", f"from tests.on_sim import serve; serve({its.fileno()})"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with its:
            self.process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment)
        self.stream = ours.makefile("rwb")

    def call(self, *call: object) -> None:
        """Run a function in a process forked there; raise AssertionError with its traceback if it fails."""
        try:
            pickle.dump(call, self.stream)
            self.stream.flush()
            report = pickle.load(self.stream)
        except BaseException:
            # The test's time ended: an answer that comes later is not the next test's.
            self.process.kill()
            parent.cache_clear()
            raise
        assert not report, report


@functools.cache
def parent() -> Parent:
    """Return this process's parent of tests, started when the first test needs it."""
    return Parent()


def serve(descriptor: int) -> None:
    """Run calls until the stream ends."""
    # Each optimizer's first step would import it, 3 s in each forked process.
    importlib.import_module("torch._dynamo")
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    while True:
        try:
            module, name, args, kwargs = pickle.load(stream)
        except EOFError:
            return
        function = inspect.unwrap(getattr(importlib.import_module(module), name))
        report = ""
        try:
            forked(functools.partial(function, *args, **kwargs))
        except AssertionError as error:
            report = str(error)
        pickle.dump(report, stream)
        stream.flush()


def installed(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Install the device and call a function of a module."""
    simulated_device.install()
    inspect.unwrap(getattr(importlib.import_module(module), name))(*args, **kwargs)


def on_sim(test: Callable[..., object]) -> Callable[..., None]:
    """Run a test in a process that has the simulated device, or skip it where there is no compiler."""

    @pytest.mark.sim
    @NEEDS_PARENT
    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if why := missing():
            pytest.skip(why)
        parent().call(__name__, "installed", (test.__module__, test.__name__, args, kwargs), {})

    return wrapped
