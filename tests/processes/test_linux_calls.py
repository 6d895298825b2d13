"""System calls that `os` of some builds of Python leaves out: the same through `os` and through the C library."""

from __future__ import annotations

import importlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.release.scripts import ROOT
from torchdist_ref.processes import linux_calls

PORTABLE = """
import os, signal, socket, sys, torch
for module in (os, signal, socket):
    for name in ("pidfd_open", "memfd_create", "MFD_CLOEXEC", "pidfd_send_signal", "TCP_NOTSENT_LOWAT"):
        vars(module).pop(name, None)
import torchdist_ref as dist
from torchdist_ref.testing import fill, run

def program(rank, hosts, path):
    os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
    dist.init_process_group("ref", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    tensor = fill(rank, (5,))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()

expected = sum(fill(rank, (5,)) for rank in range(3)).tolist()
for hosts in ("aaa", "abc"):
    path = os.path.join(sys.argv[1], hosts)
    assert run(program, 3, hosts, path, ranks="processes", init=False) == [expected] * 3
print("ran")
"""


@pytest.fixture(params=["os", "C library"], autouse=True)
def through(request: pytest.FixtureRequest) -> Iterator[None]:
    """Load the module as it is, or as a Python loads it that lacks the calls."""
    if request.param == "os":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((os, "pidfd_open"), (os, "memfd_create"), (signal, "pidfd_send_signal")):
            patch.delattr(module, name, raising=False)
        importlib.reload(linux_calls)
        assert linux_calls.pidfd_open is not getattr(os, "pidfd_open", None)
        yield
    importlib.reload(linux_calls)


def test_a_memory_file_is_private_and_has_the_name() -> None:
    descriptor = linux_calls.memfd_create("some name")
    assert os.readlink(f"/proc/self/fd/{descriptor}") == "/memfd:some name (deleted)"
    assert not os.get_inheritable(descriptor)
    os.write(descriptor, b"abc")
    assert os.pread(descriptor, 9, 1) == b"bc"
    os.close(descriptor)


def test_a_process_is_watched_and_signaled_until_it_has_ended() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        descriptor = linux_calls.pidfd_open(process.pid)
        assert not select.select([descriptor], [], [], 0)[0] and not os.get_inheritable(descriptor)
        linux_calls.pidfd_send_signal(descriptor, signal.SIGTERM)
        assert select.select([descriptor], [], [], 30)[0]
        assert process.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        linux_calls.pidfd_send_signal(descriptor, signal.SIGTERM)
    os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        linux_calls.pidfd_open(process.pid)


def test_ranks_run_on_a_python_without_them(python_with_torch: str, tmp_path: Path) -> None:
    """Over shared memory, and as on three hosts over TCP."""
    command = [python_with_torch, "-c", PORTABLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "ran" in done.stdout, done.stdout + done.stderr


def test_tests_and_library_call_them_by_this_module() -> None:
    """A test that calls those of `os` fails on builds of Python that lack them."""
    call = re.compile(r"\b(os|signal)\.(pidfd_open|memfd_create|pidfd_send_signal)\b")
    files = [path for part in ("tests", "torchdist_ref", "docs/_ext") for path in (ROOT / part).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if call.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 500 and not found
