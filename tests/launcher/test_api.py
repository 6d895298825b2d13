"""Launcher API: results by rank, restarts, failures in torch's types, and unsupported configurations.

Ranks import torch only if their job needs it, so most take a tenth of a second.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.launcher.api as theirs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import torchdist_ref as dist
from tests.groups.surface_table import signature
from tests.launcher import jobs
from tests.ports import reserve_port
from tests.process_ends import answer_of_child
from tests.torch_versions import needs_torch
from torchdist_ref import launcher
from torchdist_ref.elastic.attempt import Assignment
from torchdist_ref.launcher import LaunchConfig, elastic_launch, launch_agent
from torchdist_ref.launcher.local_workers import LocalWorkers, WorkerSettings
from torchdist_ref.launcher.logs import DefaultLogsSpecs


def config(nproc: int = 2, max_restarts: int = 0, **options: Any) -> LaunchConfig:
    return LaunchConfig(1, 1, nproc, max_restarts=max_restarts, shutdown_timeout=2, **options)


def test_results_of_all_ranks() -> None:
    assert elastic_launch(config(3), jobs.add)(10, 20) == {0: 30, 1: 31, 2: 32}


def test_a_rank_has_torch_only_if_its_function_imports_it() -> None:
    """Once the functions of these tests imported it, and the tests took two minutes of processor time."""
    assert elastic_launch(config(1), jobs.loaded)("torch") == {0: False}


def test_environment_of_each_rank() -> None:
    found = launch_agent(config(2, 5, run_id="job 7", role="trainer"), jobs.environment, [])
    assert found[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job 7",
        "CUDA_VISIBLE_DEVICES": found[0]["CUDA_VISIBLE_DEVICES"],
    }


def test_virtual_local_rank_restricts_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    found = launch_agent(config(virtual_local_rank=True), jobs.environment, [])
    assert [(found[r]["LOCAL_RANK"], found[r]["CUDA_VISIBLE_DEVICES"]) for r in found] == [("0", "4"), ("0", "6")]


def test_rendezvous_of_the_ranks() -> None:
    assert elastic_launch(config(), jobs.meet)() == {0: [b"rank 0", b"rank 1"], 1: [b"rank 0", b"rank 1"]}


def test_the_store_has_no_client_until_a_rank_makes_one() -> None:
    assert launch_agent(config(1), jobs.connections_to_the_store, []) == {0: (0, 1)}


def test_port_of_the_store() -> None:
    port = reserve_port()
    found = launch_agent(config(1, rdzv_backend="static", rdzv_endpoint=f"localhost:{port}"), jobs.port_of_store, [])
    assert found == {0: str(port)}


def test_local_rank_is_substituted_in_arguments() -> None:
    assert launch_agent(config(), jobs.same, ["--rank=${local_rank}", 3]) == {0: ("--rank=0", 3), 1: ("--rank=1", 3)}


def test_a_command_as_entry_point(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; print(os.environ['RANK'], sys.argv[1])"
    assert launch_agent(config(), sys.executable, ["-c", program, "${local_rank}"]) == {0: None, 1: None}
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0", "1 1"]


def test_output_is_forwarded_to_a_text_only_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    launch_agent(config(), jobs.print_to_both, [])
    assert sorted(text.getvalue().splitlines()) == ["out of 0", "out of 1"]


def test_all_ranks_are_restarted_until_none_fails(tmp_path: Path) -> None:
    found = launch_agent(config(max_restarts=3), jobs.fail, [str(tmp_path), 1, 1])
    assert found == {0: 1, 1: 1}
    # The other one may have been stopped before it wrote anything.
    assert (tmp_path / "started 1").read_text() == "xx"


def test_child_failed_error_after_the_last_restart(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as caught:
        launch_agent(config(2, max_restarts=1), jobs.fail, [str(tmp_path), 1, 9])
    ((rank, failure),) = caught.value.failures.items()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert "attempt 1 of rank 1" in str(caught.value) and "in fail" in str(caught.value)
    assert caught.value.name == "fail"


def test_child_failed_error_of_a_killed_rank() -> None:
    with pytest.raises(ChildFailedError, match="Signal 9") as caught:
        launch_agent(config(), jobs.die, [1])
    assert caught.value.failures[1].exitcode == -9


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(ChildFailedError, match="lambda"):
        launch_agent(config(1), jobs.not_picklable, [])


def test_a_signal_ends_the_job_without_a_restart() -> None:
    with pytest.raises(SignalException) as caught:
        launch_agent(config(max_restarts=3), jobs.signal_launcher, [])
    assert caught.value.sigval == 15


def test_launch_outside_the_main_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(launch_agent(config(), jobs.add, [1])))
    thread.start()
    thread.join(30)
    assert found == [{0: 1, 1: 2}]


@pytest.mark.parametrize(
    ("options", "entrypoint", "message"),
    [
        ({}, None, "'entrypoint' must be a function or the name of a command, got None"),
        ({"nproc_per_node": 0}, jobs.add, "'config' must be one rank or more"),
        ({"max_restarts": -1}, jobs.add, "'config' must be one rank or more"),
        (
            {"max_nodes": 2, "rdzv_endpoint": "localhost:1"},
            jobs.add,
            "--rdzv-backend 'etcd' is not available; give c10d, or static with --node-rank",
        ),
        (
            {"start_method": "thread"},
            jobs.add,
            "'config.start_method' must be 'spawn', 'fork' or 'forkserver', got 'thr",
        ),
        ({"logs_specs": "files"}, jobs.add, "'config.logs_specs' must be a LogsSpecs or None, got 'files'"),
        ({"rdzv_endpoint": "localhost:abc"}, jobs.add, "'config.rdzv_endpoint' must be HOST:PORT with a port"),
        ({"signals_to_handle": "SIGFOO"}, jobs.add, "'SIGFOO' is not a signal; name signals as in SIGTERM,"),
    ],
)
def test_unsupported_configurations_raise(options: dict[str, Any], entrypoint: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError, dist.UnsupportedError), match=message):
        launch_agent(LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, **options}), entrypoint, [])


def test_shutdown_timeout_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 7
    with pytest.raises(ValueError, match="'shutdown_timeout' must be 0 or more"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)


def test_the_rendezvous_timeout_is_configured_as_by_torch() -> None:
    ours, torchs = (kind(1, 1, 1, rdzv_timeout=5).rdzv_configs for kind in (LaunchConfig, theirs.LaunchConfig))
    assert ours == torchs


@needs_torch("2.13", "LaunchConfig.shutdown_timeout")
def test_torch_takes_the_shutdown_timeout_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == theirs.LaunchConfig(1, 1, 1).shutdown_timeout


@needs_torch("2.13", "LaunchConfig.shutdown_timeout, and health_check_server of the launch functions")
@pytest.mark.parametrize("name", ["LaunchConfig", "elastic_launch", "launch_agent"])
def test_signatures_equal_torchs(name: str) -> None:
    assert signature(getattr(launcher, name)) == signature(getattr(theirs, name))


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    """Once a full or read-only disk ended the launcher with a traceback that ended in a number."""
    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    (tmp_path / "logs").rmdir()
    with pytest.raises(dist.ArgumentError, match=f"create a folder in {tmp_path}/logs: No such file.* --log-dir"):
        specs.reify({0: {}})


def test_a_folder_of_a_rank_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    """Once this ended the launcher with a traceback, unlike the folder of the job."""
    specs = DefaultLogsSpecs(str(tmp_path))
    attempt = Path(specs.reify({0: {}}).error_files[0]).parents[1]
    shutil.rmtree(attempt)
    attempt.touch()
    with pytest.raises(dist.ArgumentError, match=f"cannot create the folder {attempt}/0: Not a directory. .*--log-dir"):
        specs.reify({0: {}})


def with_no_more_processes(begin: Callable[[], Callable[[], Any]]) -> str:
    """Return the error of a function in a child without root's right to exceed the limit on processes.

    Args:
        begin: Function that is called before the limit is lowered, and returns the one that is called below it.
    """

    def answer() -> str:
        if os.geteuid() == 0:
            os.setuid(65534)
        function = begin()
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        with pytest.raises((dist.DistError, dist.ArgumentError)) as raised:
            function()
        return str(raised.value)

    return answer_of_child(answer)


def test_the_limit_on_processes_is_named() -> None:
    """Once it ended in a traceback with a number, or in a program that cannot be executed."""
    named = "no process can be started: Resource temporarily unavailable. Raise the limit on processes (ulimit -u) or"
    started = with_no_more_processes(lambda: partial(elastic_launch(config(1), os.getenv), "RANK"))
    assert started.startswith(f"the launcher cannot go on: {named}")

    def begin() -> Callable[[], Any]:
        workers = LocalWorkers(WorkerSettings(sys.executable, ["-c", ""]))

        def run() -> None:
            with workers:
                workers.run(Assignment([3], 4, "127.0.0.1", 29500))

        return run

    assert with_no_more_processes(begin).startswith(f"the launcher cannot start rank 3: {named}")
