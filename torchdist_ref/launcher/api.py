"""Launcher API for programs: run a function or a command on every rank and collect the results.

Names are torch's. ``python -m torchdist_ref.launch`` runs its command line with the same functions. A job of several
hosts is handed to an agent of `torchdist_ref.elastic`. Do not add the supervision of processes here: it belongs to
`torchdist_ref.launcher.local_workers`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torchdist_ref.elastic.attempt import AttemptOutcome
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, RankDiedError, advice_on_limit, explain
from torchdist_ref.launcher.environment import LOCALHOST, Job
from torchdist_ref.launcher.local_workers import (
    DEFAULT_SIGNALS,
    SHUTDOWN_SECONDS,
    LocalWorkers,
    WorkerSettings,
    binding,
)
from torchdist_ref.launcher.reports import LaunchReport
from torchdist_ref.launcher.restarts import run_with_restarts
from torchdist_ref.stores.addresses import loopback_address, parse_endpoint, parse_host

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

logger = logging.getLogger("torchdist_ref.launcher")

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class LaunchConfig:
    """Configuration of a launch.

    Args:
        min_nodes: Smallest number of hosts.
        max_nodes: Largest number of hosts. With 1 there is no rendezvous: all ranks are on this host.
        nproc_per_node: Number of ranks on each host.
        logs_specs: `LogsSpecs`, ours or torch's. Default None: no log files.
        run_id: Name of the job. Default: a new one.
        role: Value of ROLE_NAME in the ranks' environment.
        rdzv_endpoint: ``host:port`` of the rendezvous; on one host, of the ranks' store. Default: a free port.
        rdzv_backend: Backend of the rendezvous of several hosts.
        rdzv_configs: Dict of its further options.
        rdzv_timeout: Time-out of the rendezvous in seconds. Default -1: 900.
        max_restarts: Number of times that all ranks are restarted when one fails. Default: 3.
        monitor_interval: Accepted for compatibility with torch, without effect: failures are noticed at once.
        start_method: ``"spawn"``, ``"forkserver"`` (both start a new interpreter) or ``"fork"``, for functions.
        log_line_prefix_template: Start of each line on the console, see `Template`; ``${role_name}``, ``${rank}``,
            ``${local_rank}`` and ``${hostname}`` are replaced. Default None: ``[role local_rank]:`` for lines that go
            to a file too.
        metrics_cfg: Accepted; a program configures metrics by torch's `elastic.metrics.configure`.
        local_addr: Address of this host for other hosts. Default None: looked up.
        event_log_handler: Name of a handler of `elastic.events`: ``"null"``, ``"console"``, or a registered one. All
            but ``"null"`` import torch.
        numa_options: Value with an attribute `affinity_mode`, such as torch's `NumaOptions`. Default None: all
            processors.
        signals_to_handle: Names of the signals that are forwarded to the ranks, separated by commas.
        duplicate_stdout_filters: Texts; lines of teed standard output that contain one go to a file of their own too.
        duplicate_stderr_filters: The same for standard error.
        virtual_local_rank: Whether each rank sees only its own device and has LOCAL_RANK 0.
        shutdown_timeout: Time from asking ranks to stop to killing them, in seconds. Default: the environment variable
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.

    Raises:
        ArgumentError: The shutdown time-out is negative.

    Example:
        >>> from torchdist_ref.launcher import LaunchConfig
        >>> LaunchConfig(1, 1, nproc_per_node=2, max_restarts=0).shutdown_timeout
        30

    Elsewhere:
        The options of ``mpiexec`` in MPI; none in NCCL; the arguments of ``jax.distributed.initialize`` in JAX.
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
    signals_to_handle: str = DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None

    def __post_init__(self) -> None:
        self.rdzv_configs.setdefault("timeout", 900)
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get(SHUTDOWN_VARIABLE, SHUTDOWN_SECONDS))
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

    Elsewhere:
        ``mpiexec`` and ``MPI_Comm_spawn`` in MPI, without restarts; none in NCCL and JAX, which leave it to schedulers.
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
        ChildFailedError: A rank failed and no restart was left. The error contains the rank and its traceback. It is
            torch's `ChildFailedError` too if torch is installed, which only a job that fails imports.
        SignalException: A signal ended the job. It is torch's too if torch is installed.

    Example: as for `elastic_launch`, which calls this.

    Elsewhere:
        ``mpiexec`` and ``MPI_Comm_spawn`` in MPI, without restarts; none in NCCL and JAX, which leave it to schedulers.
    """
    _check(config, entrypoint)
    name = entrypoint_name(entrypoint, args)
    outcome = run_job(config, entrypoint, args, log=logger.warning, on_end=lambda end: _raise(end, name))
    return dict(zip((each.rank for each in outcome.exits), outcome.return_values.values(), strict=True))


def run_job(
    config: LaunchConfig,
    entrypoint: Any,
    args: list[Any],
    *,
    log: Callable[[str], None],
    on_end: Callable[[AttemptOutcome], object] = lambda outcome: None,
    own_descendants: bool = False,
) -> AttemptOutcome:
    """Run a job to its end: on this host alone, or as one of several hosts' agents.

    Args:
        config: Checked configuration.
        entrypoint: Function or executable.
        args: Its arguments.
        log: Function that receives a line about each event.
        on_end: Function that receives the outcome while log files and failure records still exist.
        own_descendants: Whether all descendants of this process are the job's.

    Returns:
        The outcome of the last attempt.

    Raises:
        DistError: A limit of this process or host is reached.
    """
    config.run_id = config.run_id or uuid.uuid4().hex
    settings = worker_settings(config, entrypoint, args, own_descendants=own_descendants)
    report, began = LaunchReport(config, entrypoint_name(entrypoint, args)), time.monotonic()
    try:
        with LocalWorkers(settings, log) as workers:
            outcome = _run_attempts(workers, config, log)
            report.end(outcome, time.monotonic() - began, log)
            on_end(outcome)
    except (OSError, RuntimeError, MemoryError) as error:
        if not (advice := advice_on_limit(error)) and not isinstance(error, BlockingIOError):
            raise
        reason = str(getattr(error, "strerror", "") or error).rstrip(".")
        raise DistError(f"the launcher cannot go on: {reason}. {advice}".rstrip()) from error
    return outcome


def worker_settings(
    config: LaunchConfig, entrypoint: Any, args: list[Any], *, own_descendants: bool = False
) -> WorkerSettings:
    """Return what a configuration says about the workers of this host."""
    return WorkerSettings(
        entrypoint,
        args,
        Job(config.run_id, config.role, config.max_restarts),
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        signals=config.signals_to_handle,
        shutdown_timeout=float(config.shutdown_timeout or 0),
        prefix=config.log_line_prefix_template,
        duplicate_stdout_filters=config.duplicate_stdout_filters or (),
        duplicate_stderr_filters=config.duplicate_stderr_filters or (),
        virtual_local_rank=config.virtual_local_rank,
        cpus=binding(config.numa_options),
        own_descendants=own_descendants,
    )


def _run_attempts(workers: LocalWorkers, config: LaunchConfig, log: Callable[[str], None]) -> AttemptOutcome:
    if config.max_nodes > 1:
        return _run_with_other_hosts(workers, config, log)
    host, port = parse_endpoint(config.rdzv_endpoint or LOCALHOST, 0)
    host = parse_host(config.local_addr) if config.local_addr else loopback_address() if host == LOCALHOST else host
    return run_with_restarts(workers.run, config.nproc_per_node, config.max_restarts, host, port, log)


def _run_with_other_hosts(workers: LocalWorkers, config: LaunchConfig, log: Callable[[str], None]) -> AttemptOutcome:
    """Run the ranks of this host in a job of several hosts.

    Raises:
        ArgumentError: An option is wrong or differs between hosts, or hosts are missing.
    """
    from torchdist_ref.elastic.agent_settings import agent_settings
    from torchdist_ref.elastic.host_agent import BAD_INPUT_CODE, run_agent
    from torchdist_ref.elastic.roster import Rules

    rules = Rules(config.run_id, config.min_nodes, config.max_nodes, config.max_restarts)
    settings = agent_settings(
        rules,
        config.rdzv_endpoint,
        config.nproc_per_node,
        config.rdzv_backend,
        config.rdzv_configs,
        config.role,
        config.local_addr,
    )
    end = run_agent(settings, workers, log)
    if end.code == BAD_INPUT_CODE and end.failure is None:
        raise ArgumentError(end.text)
    found = end.outcome or AttemptOutcome(end.code, ())
    if end.text and not end.is_own:
        text = end.text
        if end.failure and "rank" in end.failure:
            from torchdist_ref.launcher.child_failures import describe_remote

            text += f"\n{describe_remote(end.failure)}"
        log(f"the job failed; first failure: {text}")
        return replace(found, code=end.code, first_failure=None, reason=text)
    return replace(found, code=end.code, signal=max(0, end.code - 128) if not end.text else 0)


def entrypoint_name(entrypoint: Any, args: list[Any]) -> str:
    """Return the name of a job: that of its function, of its script, or of its executable."""
    if callable(entrypoint):
        return str(entrypoint.__name__)
    return next((arg for arg in args if arg[:1] != "-"), "") if entrypoint == sys.executable else str(entrypoint)


def _check(config: LaunchConfig, entrypoint: Any) -> None:
    if not callable(entrypoint) and not isinstance(entrypoint, str):
        expected = "a function or the name of a command"
        raise ArgumentTypeError(explain("launch_agent", "entrypoint", expected, entrypoint))
    if config.nproc_per_node < 1 or config.max_restarts < 0:
        got = config.nproc_per_node, config.max_restarts
        raise ArgumentError(explain("launch_agent", "config", "one rank or more, and 0 restarts or more", got))
    if not 1 <= config.min_nodes <= config.max_nodes:
        got = config.min_nodes, config.max_nodes
        raise ArgumentError(explain("launch_agent", "config", "1 <= min_nodes <= max_nodes", got))
    if config.start_method not in ("spawn", "fork", "forkserver"):
        expected = "'spawn', 'fork' or 'forkserver'"
        raise ArgumentError(explain("launch_agent", "config.start_method", expected, config.start_method))
    if config.logs_specs is not None and not hasattr(config.logs_specs, "reify"):
        expected = "a LogsSpecs or None"
        raise ArgumentTypeError(explain("launch_agent", "config.logs_specs", expected, config.logs_specs))
    try:
        parse_endpoint(config.rdzv_endpoint or LOCALHOST, 0)
    except ValueError as error:
        expected, hint = "HOST:PORT with a port from 0 to 65535", f"The reason: {error}."
        endpoint = config.rdzv_endpoint
        raise ArgumentError(explain("launch_agent", "config.rdzv_endpoint", expected, endpoint, hint=hint)) from None


def _raise(outcome: AttemptOutcome, name: str) -> None:
    if not outcome.code:
        return
    from torchdist_ref.launcher.child_failures import (
        ChildFailedError,
        ProcessFailure,
        SignalException,
        as_torchs,
        failure_of,
        import_torchs,
    )

    import_torchs()
    first = outcome.first_failure
    if outcome.reason:
        raise RankDiedError(f"{name}: {outcome.reason}")
    if first is None:
        signum = signal.Signals(outcome.signal)
        message = f"{name}: the launcher received {signum.name}"
        raise as_torchs(SignalException, "api")(message, sigval=signum)
    failure = failure_of(first, as_torchs(ProcessFailure, "errors"))
    raise as_torchs(ChildFailedError, "errors")(name, {first.rank: failure})
