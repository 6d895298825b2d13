"""Launcher API for programs: run a function or a command on every rank and collect the results.

Names are torch's. Ranks are processes of this machine under the same supervisor as those of ``python -m
torchdist_ref.launch``. For jobs of several machines use torchrun, which works with this library too.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import loads
from string import Template
from typing import Any, NoReturn

from torchdist_ref.authentication import new_secret
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain
from torchdist_ref.failure_record import ERROR_FILE
from torchdist_ref.launcher import entrypoint as entry
from torchdist_ref.launcher.environment import STORE_ADDRESS, Job, job_store, worker_environment
from torchdist_ref.launcher.supervisor import Supervisor, run_with_restarts

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

logger = logging.getLogger("torchdist_ref.launcher")

_UNSUPPORTED = (
    "logs_specs",
    "log_line_prefix_template",
    "numa_options",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)


@dataclass
class LaunchConfig:
    """Configuration of a launch.

    Options of torch's agent that this launcher does not need are accepted and ignored. There is no rendezvous, since
    all ranks are on this machine. Failures are noticed at once, not at intervals. There are no metrics and no event
    log.

    Args:
        min_nodes: Number of machines; 1.
        max_nodes: Number of machines; 1.
        nproc_per_node: Number of ranks.
        logs_specs: Not supported; output is forwarded line by line.
        run_id: Name of the job. Default: a new one.
        role: Value of ROLE_NAME in the ranks' environment.
        rdzv_endpoint: ``host:port``; the port is used for the ranks' store. Default: a free one.
        rdzv_backend: Ignored.
        rdzv_configs: A dict; ignored.
        rdzv_timeout: Ignored.
        max_restarts: Number of times that all ranks are restarted when one fails. Default: 3.
        monitor_interval: Ignored.
        start_method: ``"spawn"``, the only one.
        log_line_prefix_template: Not supported.
        metrics_cfg: A dict; ignored.
        local_addr: Ignored.
        event_log_handler: Ignored.
        numa_options: Not supported.
        signals_to_handle: Names of the signals that are forwarded to the ranks, with commas between them.
        duplicate_stdout_filters: Not supported.
        duplicate_stderr_filters: Not supported.
        virtual_local_rank: Whether each rank sees only its own device and has LOCAL_RANK 0.
        shutdown_timeout: Time from asking ranks to stop to killing them, in seconds. Default: the environment variable
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.

    Raises:
        ArgumentError: The shutdown time-out is negative.

    Example:
        >>> from torchdist_ref.launcher import LaunchConfig
        >>> LaunchConfig(1, 1, nproc_per_node=2, max_restarts=0).shutdown_timeout
        30
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: Any = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: Any = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        self.rdzv_configs.setdefault("timeout", 900)
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        if self.shutdown_timeout < 0:
            raise ArgumentError(explain("LaunchConfig", "shutdown_timeout", "0 or more", self.shutdown_timeout))


class elastic_launch:
    """Launcher of a function or command: calling it runs that on every rank and returns all results.

    Args:
        config: Configuration.
        entrypoint: Function, or name of a command.
        health_check_server: Ignored.

    Example:
        >>> from torchdist_ref.launcher import LaunchConfig, elastic_launch
        >>> import os
        >>> elastic_launch(LaunchConfig(1, 1, 2), os.getenv)("RANK")
        {0: '0', 1: '1'}
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run it with these arguments; see `launch_agent`."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run a function or a command on every rank and wait until all have ended.

    When a rank fails, all are stopped. While restarts are left, all are restarted.

    Args:
        config: Configuration.
        entrypoint: Function that another process can import, or name of a command.
        args: Its arguments. In strings, ``${local_rank}`` becomes the rank on its machine.
        health_check_server: Ignored.

    Returns:
        The result of each rank by its number; None for a command.

    Raises:
        ArgumentError: A value of the configuration is wrong.
        ArgumentTypeError: The entry point is neither a function nor a command.
        UnsupportedError: The configuration needs several machines, log files or another missing feature.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: A rank failed and no restart was left. The
            error contains the rank and its traceback.
        torch.distributed.elastic.multiprocessing.SignalException: A signal ended the job.

    Example: as for `elastic_launch`, which calls this.
    """
    _check(config, entrypoint)
    config.run_id = config.run_id or uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="torchdist_ref") as folder:
        agent = _Agent(config, entrypoint, args, Path(folder))
        supervisor = run_with_restarts(agent.attempt, config.max_restarts, logger.warning)
        if supervisor.code:
            _fail(supervisor, agent.name, Path(folder))
        return agent.results()


class _Agent:
    """Job of one function or command, and the folder of its results."""

    def __init__(self, config: LaunchConfig, entrypoint: Any, args: Sequence[Any], folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._function = callable(entrypoint)
        self.name: str = entrypoint.__name__ if callable(entrypoint) else entrypoint
        if self._function:
            entry.write_call(folder, entrypoint, args)
        self._command = [entrypoint, *map(str, args)]

    def attempt(self, restarts: int) -> Supervisor:
        """Run all ranks once."""
        port = int(self._config.rdzv_endpoint.rpartition(":")[2] or 0) if ":" in self._config.rdzv_endpoint else 0
        secret = new_secret()
        with job_store(port) as port:
            ranks = range(self._config.nproc_per_node)
            supervisor = Supervisor(
                [self._command_of(rank) for rank in ranks],
                [self._environment(rank, port, restarts, secret) for rank in ranks],
                prefix=False,
                grace=float(self._config.shutdown_timeout or 0),
                log=logger.warning,
                signals=[signal.Signals[name.strip()] for name in self._config.signals_to_handle.split(",")],
                records=[entry.error_path(self._folder, rank) for rank in ranks],
            )
            supervisor.run()
            return supervisor

    def _command_of(self, rank: int) -> list[str]:
        if self._function:
            return entry.command(self._folder)
        return [Template(word).safe_substitute(local_rank=str(rank)) for word in self._command]

    def _environment(self, rank: int, port: int, restarts: int, secret: str) -> dict[str, str]:
        config = self._config
        job = Job(config.run_id, config.role, restarts, config.max_restarts, secret)
        error_file = entry.error_path(self._folder, rank)
        # A file of an earlier attempt describes another failure.
        error_file.unlink(missing_ok=True)
        found = worker_environment(os.environ, config.nproc_per_node, rank, STORE_ADDRESS, port, job)
        found |= {ERROR_FILE: str(error_file)}
        return found | (_one_device(found, rank) if config.virtual_local_rank else {})

    def results(self) -> dict[int, Any]:
        """Return the result of each rank."""
        ranks = range(self._config.nproc_per_node)
        if not self._function:
            return dict.fromkeys(ranks)
        return {rank: loads(entry.result_path(self._folder, rank).read_bytes()) for rank in ranks}


def _one_device(environment: dict[str, str], rank: int) -> dict[str, str]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[rank] if visible else str(rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


def _check(config: LaunchConfig, entrypoint: Any) -> None:
    if not callable(entrypoint) and not isinstance(entrypoint, str):
        expected = "a function or the name of a command"
        raise ArgumentTypeError(explain("launch_agent", "entrypoint", expected, entrypoint))
    if config.nproc_per_node < 1 or config.max_restarts < 0:
        got = config.nproc_per_node, config.max_restarts
        raise ArgumentError(explain("launch_agent", "config", "one rank or more, and 0 restarts or more", got))
    if (config.min_nodes, config.max_nodes) != (1, 1):
        hint = "torchrun starts jobs of several machines, and init_process_group() of this library works under it."
        got = config.min_nodes, config.max_nodes
        raise UnsupportedError(explain("launch_agent", "config", "for one machine", got, hint=hint))
    if config.start_method != "spawn":
        raise UnsupportedError(explain("launch_agent", "config.start_method", "'spawn'", config.start_method))
    for name in _UNSUPPORTED:
        if getattr(config, name) is not None:
            raise UnsupportedError(explain("launch_agent", f"config.{name}", "None", getattr(config, name)))


def _fail(supervisor: Supervisor, name: str, folder: Path) -> NoReturn:
    # Programs catch torch's own types. Only here is torch needed.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    worker = supervisor.first_failure
    if worker is None:
        signum = signal.Signals(supervisor.code - 128)
        raise SignalException(f"{name}: the launcher received {signum.name}", sigval=signum)
    error_file = str(entry.error_path(folder, worker.rank))
    failure = ProcessFailure(worker.rank, worker.process.pid, worker.process.status or 0, error_file)
    raise ChildFailedError(name, {worker.rank: failure})
