"""Events and metrics of a launch, for the handlers of torch.distributed.elastic that a program or an option names.

torch's modules `events` and `metrics` have the handlers. Events are recorded if the option ``event_log_handler`` names
another one than ``null``; only then is torch imported. Metrics go to what the program has configured, which has then
imported torch's module itself. Names and fields are those of torch's agent. Do not add other readers of outcomes here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torchdist_ref.elastic.attempt import AttemptOutcome, Exit
from torchdist_ref.errors import ArgumentError

_EVENTS, _METRICS = "torch.distributed.elastic.events", "torch.distributed.elastic.metrics"


def recorder(handler: str) -> Callable[[str, str, dict[str, Any]], None] | None:
    """Return the function that records an event: its name, its source and its metadata. None for ``"null"``.

    Args:
        handler: Name of a handler of torch's events.

    Raises:
        ArgumentError: There is no such handler.
    """
    if handler == "null":
        return None
    try:
        events = import_module(_EVENTS)
        events.get_logging_handler(handler)
    except ImportError as error:
        raise ArgumentError(
            f"--event-log-handler {handler}: it is torch's, which cannot be imported: {error}"
        ) from None
    except KeyError:
        raise ArgumentError(f"--event-log-handler {handler}: there is no such handler; give console or null.") from None

    def record(name: str, source: str, metadata: dict[str, Any]) -> None:
        events.record(events.Event(name, events.EventSource[source], metadata=metadata), handler)

    return record


class LaunchReport:
    """Report on one launch.

    Args:
        config: Its configuration.
        name: Name of its function or command.

    Raises:
        ArgumentError: There is no such handler of events.
    """

    def __init__(self, config: Any, name: str) -> None:
        self._config, self._name = config, name
        self._record = recorder(config.event_log_handler)

    def end(self, outcome: AttemptOutcome, seconds: float, log: Callable[[str], None]) -> None:
        """Report the end: an event of each worker and one of the agent, and the agent's metrics.

        The workers have ended, so a report that fails changes nothing about the job: it is only logged.

        Args:
            outcome: Outcome of the last attempt.
            seconds: Duration of the launch.
            log: Function that receives a line about what a handler raises.
        """
        try:
            self._report(outcome, seconds)
        except Exception as error:
            log(f"the end of the job could not be reported: {error!r}")

    def _report(self, outcome: AttemptOutcome, seconds: float) -> None:
        if self._record is not None:
            record = partial(self._event, self._record, outcome, int(seconds))
            for worker in outcome.exits:
                record(_state(worker, outcome), worker)
            record("FAILED" if outcome.signal else "SUCCEEDED", None)
        if not outcome.signal:
            self._metrics(bool(outcome.code), outcome.restarts)

    def _event(
        self,
        record: Callable[[str, str, dict[str, Any]], None],
        outcome: AttemptOutcome,
        seconds: int,
        state: str,
        worker: Exit | None,
    ) -> None:
        assignment = outcome.assignment
        more: dict[str, Any] = {"group_world_size": assignment and assignment.group_world_size}
        more["entry_point"] = self._name
        failed = worker is not None and state == "FAILED"
        if worker is not None:
            roles = (assignment and assignment.role_ranks) or {worker.local_rank: worker.rank}
            more |= {"local_rank": [worker.local_rank], "role_rank": [roles[worker.local_rank]]}
            more |= {"role_world_size": [assignment and (assignment.role_world_size or assignment.world_size)]}
            more |= {"exit_code": [worker.status if failed else None], "worker_pid": [worker.pid if failed else None]}
        metadata = {
            "run_id": self._config.run_id,
            "global_rank": worker.rank if worker else None,
            "group_rank": assignment and assignment.group_rank,
            "worker_id": str(worker.pid) if worker else None,
            "role": self._config.role,
            "hostname": _host_name(),
            "state": state,
            "total_run_time": seconds,
            "rdzv_backend": self._config.rdzv_backend,
            "raw_error": _content(worker.error_file) if worker and failed else None,
            "metadata": json.dumps(more),
            "agent_restarts": outcome.restarts,
            "duration_ms": None,
        }
        record(f"torchelastic.worker.status.{state}", "WORKER" if worker else "AGENT", metadata)

    def _metrics(self, failed: bool, restarts: int) -> None:
        module = sys.modules.get(_METRICS)
        if module is None:
            return
        flakiness = 100.0 if failed else 100.0 * restarts / (self._config.max_restarts + 1)
        values = {"flakiness": int(flakiness), "run_total": 1}
        for word, happened in (("success", not failed), ("failed", failed)):
            values[f"run_{word}_with_retries"] = int(happened and restarts > 0)
            values[f"run_{word}_no_retries"] = int(happened and restarts == 0)
        for name, value in values.items():
            module.put_metric(f"workers.{self._config.role}.{name}", value)


def _state(worker: Exit, outcome: AttemptOutcome) -> str:
    """Return torch's name of a worker's end."""
    if outcome.succeeded:
        return "SUCCEEDED"
    # The agent has ended the others.
    return "FAILED" if worker is outcome.first_failure else "TERMINATED"


def _host_name() -> str:
    try:
        return socket.getfqdn()
    except (OSError, UnicodeError):
        # A host may be named as DNS does not allow it, with 64 characters for instance.
        return os.uname().nodename


def _content(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return json.dumps({"message": "<NONE>"})
