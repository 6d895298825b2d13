"""Report of one request to the ranks, and the errors made of it.

All messages are made here, so that a notebook, a test and a script read the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchdist_ref.errors import DistError, indexed
from torchdist_ref.notebook.rank import CellFailure
from torchdist_ref.processes.control import describe_exit, name_ranks

_RESTART = "Its variables are lost: stop the ranks (%spmd_stop) and run again from the first %%spmd cell."
_KILL = "Stop the ranks (%spmd_stop), which kills them, and run again from the first %%spmd cell."


@dataclass(slots=True)
class Report:
    """Results of one request, by rank.

    Attributes:
        values: Value of each rank that succeeded.
        failures: Failure of each rank that raised.
        died: Exit status of each rank that ended.
        late: Ranks that were interrupted because they had not answered in time.
        silent: Ranks that did not answer the interrupt either.
        waited: Time that the late ranks had, in seconds.
        after: Rank whose failure started that time; None if it started with the request.
        interrupted: Whether the user interrupted.
    """

    values: dict[int, bytes | None] = field(default_factory=dict)
    failures: dict[int, CellFailure] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    waited: float = 0.0
    after: int | None = None
    interrupted: bool = False

    def raise_for_failures(self) -> None:
        """Raise the error that describes this report, if any.

        Raises:
            CellInterrupted: The user interrupted.
            CellError: A rank failed, died, or did not answer.
        """
        if self.interrupted:
            raise CellInterrupted(self)
        if self.failures or self.died or self.silent:
            raise CellError(self)

    def summary(self) -> str:
        """Return one line for each kind of failure, with the ranks concerned."""
        lines = [f"rank {rank} {describe_exit(status)}. {_RESTART}" for rank, status in sorted(self.died.items())]
        lines += [f"{name_ranks(ranks)} failed with {failure}" for failure, ranks in self._by_failure().items()]
        if self.interrupted:
            lines.append(f"interrupted by you: {name_ranks(self._interrupted_ranks()) or 'no rank was still running'}")
        elif self.late - self.silent:
            since = "" if self.after is None else f" after rank {self.after} had ended"
            late = name_ranks(self.late - self.silent)
            lines.append(f"{late} did not answer within {self.waited:g} s{since}: interrupted")
        if self.silent:
            lines.append(f"{name_ranks(self.silent)} did not answer the interrupt. {_KILL}")
        return "\n".join(lines)

    def traces(self) -> str:
        """Return the tracebacks, each line with its rank; ranks with equal tracebacks share one."""
        shared: dict[str, list[int]] = {}
        # First the failures, then the positions of the ranks that were only interrupted.
        for rank in sorted(self.failures, key=lambda rank: (rank in self._interrupted_ranks(), rank)):
            shared.setdefault(self.failures[rank].trace, []).append(rank)
        return "".join(
            f"[{name_ranks(ranks)}] {line}\n" for trace, ranks in shared.items() for line in trace.splitlines()
        )

    def _by_failure(self) -> dict[str, list[int]]:
        shared: dict[str, list[int]] = {}
        for rank in sorted(self.failures.keys() - self._interrupted_ranks()):
            shared.setdefault(str(self.failures[rank]), []).append(rank)
        return shared

    def _interrupted_ranks(self) -> set[int]:
        return {rank for rank, failure in self.failures.items() if failure.kind == "KeyboardInterrupt"}


class PoolError(DistError):
    """Error of a request to ranks that were stopped or of which one has died."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class _ReportedError(BaseException):
    """Error made of a report; notebooks show the ranks' tracebacks instead of this library's."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.summary())
        self.report = report

    def _render_traceback_(self) -> list[str]:
        # IPython calls this method of exceptions that render themselves.
        notes = getattr(self, "__notes__", [])
        return ["\n".join([f"{self.report.traces()}{type(self).__name__}: {self}", *notes])]


class CellError(_ReportedError, RuntimeError):
    """Failure, death or time-out of a rank while it ran a cell.

    Attributes:
        report: Results of all ranks.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        indexed(self)


class CellInterrupted(_ReportedError, KeyboardInterrupt):
    """Interrupt of a cell by the user; the ranks that were running it have been interrupted too.

    Attributes:
        report: Results of all ranks.
    """
