"""Programs that are started with closed standard streams, under a host name too long for DNS, or without /proc."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests import private_mounts
from torchdist_ref.launcher import LaunchConfig, elastic_launch, reports
from torchdist_ref.processes.identity import has_no_proc, host_identity
from torchdist_ref.processes.standard_streams import open_closed_streams
from torchdist_ref.testing import fill, run

MISSING = private_mounts.missing()
needs_mounts = pytest.mark.skipif(bool(MISSING), reason=MISSING)
CLOSED = [(0,), (1,), (0, 1, 2)]
# A rank of a launcher, without torch. What it writes to its descriptors must not end up in a socket.
RANK = """
import os, sys
from datetime import timedelta
from torchdist_ref.rendezvous import rendezvous
store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=20)))
store.set(f"value {rank}", str((rank + 2) ** 5))
found = store.multi_get([f"value {each}" for each in range(size)])
for number in (1, 2):
    os.write(number, b"output")
store.set(f"read {rank}", "")
store.wait([f"read {each}" for each in range(size)])
with open(os.path.join(sys.argv[1], str(rank)), "w") as file:
    file.write(repr((found, sys.stdin.read() if rank == 0 else "")))
"""


# 0.5 s each: three new interpreters, without torch. The descriptors are opened when the package is imported.
@pytest.mark.parametrize("closed", CLOSED, ids=lambda numbers: "closed " + " ".join(map(str, numbers)))
def test_a_launcher_with_closed_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Once the job was killed by the launcher's own guard, or the launcher ended with a traceback or without a word."""
    (tmp_path / "script.py").write_text(RANK)
    # The shell closes them as a user does; Popen would open other files there.
    redirections = "".join(f" {number}>&-" for number in closed)
    launcher = f"{sys.executable} -m torchdist_ref.launch --nproc-per-node 2"
    done = subprocess.run(
        ["sh", "-c", f"exec {launcher} {tmp_path}/script.py {tmp_path} {redirections}"],
        env={**os.environ, "PYTHONPATH": str(Path(dist.__file__).parents[1])},
        input=b"input",
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout == (b"" if 1 in closed else b"output\n" * 2)
    assert done.stderr == (b"" if 2 in closed else b"output\n" * 2)
    for rank, text in enumerate(["" if 0 in closed else "input", ""]):
        assert (tmp_path / str(rank)).read_text() == repr(([b"32", b"243"], text))


def reduce_with_closed_streams(rank: int, folder: str) -> list[float]:
    """Begin as a process that was started so, and write to all standard descriptors between the calls."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(number)
        setattr(sys, name, None)
    open_closed_streams()
    assert sys.stdin.read() == "" and sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    dist.init_process_group("ref", f"file://{folder}/store", timedelta(seconds=20), 2, rank)
    for step in range(3):
        value = fill(rank + step, (1000,), torch.float32)
        dist.all_reduce(value)
        for number in (1, 2):
            os.write(number, b"output of a library")
    dist.destroy_process_group()
    return value.tolist()  # type: ignore[no-any-return]


def test_ranks_without_a_launcher_with_closed_standard_streams(tmp_path: Path) -> None:
    found = run(reduce_with_closed_streams, 2, str(tmp_path), ranks="processes", init=False)
    expected = fill(2, (1000,), torch.float32) + fill(3, (1000,), torch.float32)
    assert found == [expected.tolist()] * 2


def launch_with_long_host_name(rank: int) -> Any:
    private_mounts.use_host_name("a" * 64)
    names: list[str] = []
    reports.recorder = lambda handler: lambda name, source, metadata: names.append(metadata["hostname"])
    return elastic_launch(LaunchConfig(1, 1, 1, start_method="fork"), os.getenv)("RANK"), names


@needs_mounts
def test_a_host_name_longer_than_dns_allows_is_reported_as_it_is() -> None:
    """Once all ranks succeeded, and then the launcher ended with a traceback of the resolver."""
    [(found, names)] = run(launch_with_long_host_name, 1, ranks="processes", init=False)
    # One event of the worker, one of the agent.
    assert found == {0: "0"} and names == ["a" * 64] * 2


def test_a_handler_that_fails_does_not_fail_a_job_whose_ranks_succeeded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the disk of the metrics is full")

    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.metrics", SimpleNamespace(put_metric=fail))  # type: ignore[arg-type]
    config = LaunchConfig(1, 1, 1, start_method="fork")
    assert elastic_launch(config, os.getenv)("RANK") == {0: "0"}
    [line] = [record.getMessage() for record in caplog.records if "could not be reported" in record.getMessage()]
    assert "RuntimeError('the disk of the metrics is full')" in line


def reduce_without_proc(rank: int, folder: str) -> tuple[list[float], bool, str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchdist_ref.transports").addHandler(handler)
    if rank != 2:
        private_mounts.hide_proc()
    dist.init_process_group("ref", f"file://{folder}/store", timedelta(seconds=20), 3, rank)
    value = fill(rank, (5000,), torch.float32)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value[:3].tolist(), has_no_proc(host_identity()), " ".join(messages)


@needs_mounts
def test_ranks_without_proc_communicate_by_tcp(tmp_path: Path) -> None:
    """Once they searched for each other's memory where there is none. The third rank has a /proc."""
    found = run(reduce_without_proc, 3, str(tmp_path), ranks="processes", init=False)
    values = [fill(rank, (5000,), torch.float32) for rank in range(3)]
    expected = (values[0] + values[1] + values[2])[:3]
    for value, _, _ in found:
        assert torch.allclose(torch.tensor(value), expected)
    assert [without for _, without, _ in found] == [True, True, False]
    assert "have no /proc" in found[0][2] and "Mount /proc for shared memory" in found[0][2]
    assert "have no /proc" not in found[1][2]
