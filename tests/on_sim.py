"""Tests on the simulated device, each in a process of its own.

A process has the device for good: `torch.accelerator` names it from then on, also for tests that know nothing of it. So
`on_sim` forks a process for a test, which installs the device there and runs the test.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from torchdist_ref.testing import simulated_device
from torchdist_ref.testing.simulated_device import building


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


def on_sim(test: Callable[..., object]) -> Callable[..., None]:
    """Run a test in a process that has the simulated device, or skip it where there is no compiler."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if why := missing():
            pytest.skip(why)

        def body() -> None:
            simulated_device.install()
            test(*args, **kwargs)

        forked(body)

    return wrapped
