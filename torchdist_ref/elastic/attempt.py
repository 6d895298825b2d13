"""One attempt of a job on one host, as values: the ranks that the host gets, its log files, and how its workers ended.

An agent assigns ranks and reads outcomes; the launcher starts workers and writes outcomes. Do not add behavior here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Assignment:
    """Ranks of the workers of one host in one attempt, and the address of the attempt's store.

    Attributes:
        global_ranks: Rank of each worker, by local rank.
        world_size: Number of workers on all hosts.
        master_addr: Host of the store.
        master_port: Port of the store.
        group_rank: Rank of this host.
        group_world_size: Number of hosts.
        role_ranks: Rank of each worker among those of its role, by local rank. Default: the global ranks.
        role_world_size: Number of workers of the role. Default 0: the world size.
        restart_count: Number of times that all workers have been started again.
        use_agent_store: Whether a launcher serves the store; otherwise rank 0 does.
        secret: Secret by which the ranks authenticate each other; empty for none.
        environment: Further variables of all workers.
    """

    global_ranks: Sequence[int]
    world_size: int
    master_addr: str
    master_port: int
    group_rank: int = 0
    group_world_size: int = 1
    role_ranks: Sequence[int] = ()
    role_world_size: int = 0
    restart_count: int = 0
    use_agent_store: bool = True
    secret: str = field(default="", repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class LogsDest:
    """Paths of one attempt, by local rank.

    Attributes:
        stdouts: File of standard output; an empty string for the console, `os.devnull` for none.
        stderrs: The same for standard error.
        tee_stdouts: Files of those workers whose standard output is shown on the console too.
        tee_stderrs: The same for standard error.
        error_files: Files for failure records.
        filtered_stdout: File of the lines of `tee_stdouts` that contain a filter's text.
        filtered_stderr: The same for standard error.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = field(default_factory=str)
    filtered_stderr: str = field(default_factory=str)


@dataclass(frozen=True)
class Exit:
    """End of one worker.

    Attributes:
        rank: Global rank.
        local_rank: Rank among the workers of this host.
        pid: Process id.
        status: Exit code, or the negative number of the signal that killed it.
        error_file: Path of its failure record, which need not exist.
        keeps_record: Whether the record remains when the job has ended.
        stderr_file: Log file of its standard error; empty for none.
        printed_traceback: Whether the traceback of an exception has appeared on the console.
        memory: Sentence on whether the memory was the cause of a SIGKILL; empty for other ends.
    """

    rank: int
    local_rank: int
    pid: int
    status: int
    error_file: str
    keeps_record: bool = True
    stderr_file: str = ""
    printed_traceback: bool = False
    memory: str = ""


@dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of one attempt on this host. No worker is left when it exists.

    Attributes:
        code: Exit code of the attempt: 0 if all workers exited with 0, else that of the first that did not, or 128
            plus the number of the signal that ended it or that the launcher received.
        exits: End of each worker, by local rank.
        first_failure: End of the worker that failed first, by itself. None if none did, if a signal to the launcher
            ended the attempt, or a request to stop.
        signal: Number of the signal to the launcher that ended the attempt; 0 for none. Such an attempt is not
            repeated.
        stopped: Whether `stop` ended the attempt.
        return_values: Result of each worker's function by local rank, if all succeeded; None for a command.
        logs: Paths of the log files.
        reason: Sentence about a failure on another host; empty otherwise.
        assignment: Ranks of the attempt; None if there was none.
        cause_is_elsewhere: Whether the first worker that failed has ended because of a rank on another host.
    """

    code: int
    exits: tuple[Exit, ...]
    first_failure: Exit | None = None
    signal: int = 0
    stopped: bool = False
    return_values: Mapping[int, Any] = field(default_factory=dict)
    logs: LogsDest = field(default_factory=LogsDest)
    reason: str = ""
    assignment: Assignment | None = None
    cause_is_elsewhere: bool = False

    @property
    def restarts(self) -> int:
        """Number of times that all workers were started again before this attempt."""
        return self.assignment.restart_count if self.assignment else 0

    @property
    def succeeded(self) -> bool:
        """Whether all workers exited with 0."""
        return self.code == 0 and not self.stopped
