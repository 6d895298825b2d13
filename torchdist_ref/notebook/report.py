"""What became of a request to the ranks, and the errors that say it.

The words are made here and nowhere else, so that a notebook, a test and a script read the same. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchdist_ref.errors import DistError
from torchdist_ref.notebook.cell import Failure
from torchdist_ref.processes import describe_exit as how_it_ended

_AGAIN = "Its variables are gone: stop the ranks (%spmd_stop) and run again from the first %%spmd cell."
_STUCK = "Stop the ranks (%spmd_stop), which kills them, and run again from the first %%spmd cell."


@dataclass(slots=True)
class Report:
    """How each rank came out of one request.

    Attributes:
        values: What it sent back, for those that succeeded.
        failures: What went wrong in it, for those that raised.
        died: The exit status, for those that ended.
        late: Those that were interrupted because they had not answered in time.
        silent: Those that did not answer the interrupt either.
        waited: Seconds that the late ones had.
        after: The rank whose failure the late ones were waited for after; None where the time-out was up.
        interrupted: Whether the user interrupted.
    """

    values: dict[int, bytes | None] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    waited: float = 0.0
    after: int | None = None
    interrupted: bool = False

    def raise_if_bad(self) -> None:
        """Raise the error that this report calls for, if any.

        Raises:
            CellInterrupted: If the user interrupted.
            CellError: If a rank failed, died, or did not answer.
        """
        if self.interrupted:
            raise CellInterrupted(self)
        if self.failures or self.died or self.silent:
            raise CellError(self)

    def summary(self) -> str:
        """Say in one line for each kind of trouble which ranks it befell."""
        lines = [f"{names([rank])} {how_it_ended(status)}. {_AGAIN}" for rank, status in sorted(self.died.items())]
        lines += [f"{names(ranks)} failed with {what}" for what, ranks in self._by_failure().items()]
        if self.interrupted:
            lines.append(f"interrupted by you: {names(self._broken_off()) or 'no rank was still running'}")
        elif self.late - self.silent:
            since = "" if self.after is None else f" after rank {self.after} had ended"
            late = names(self.late - self.silent)
            lines.append(f"{late} did not answer within {self.waited:g} s{since}: interrupted")
        if self.silent:
            lines.append(f"{names(self.silent)} did not answer the interrupt. {_STUCK}")
        return "\n".join(lines)

    def traces(self) -> str:
        """Show the tracebacks, each line with its rank; ranks with the same one share it."""
        shared: dict[str, list[int]] = {}
        # First what went wrong, then where the others were.
        for rank in sorted(self.failures, key=lambda rank: (rank in self._broken_off(), rank)):
            shared.setdefault(self.failures[rank].trace, []).append(rank)
        return "".join(f"[{names(ranks)}] {line}\n" for trace, ranks in shared.items() for line in trace.splitlines())

    def _by_failure(self) -> dict[str, list[int]]:
        shared: dict[str, list[int]] = {}
        for rank in sorted(self.failures.keys() - self._broken_off()):
            shared.setdefault(str(self.failures[rank]), []).append(rank)
        return shared

    def _broken_off(self) -> set[int]:
        """The ranks whose failure is only that they were interrupted."""
        return {rank for rank, failure in self.failures.items() if failure.kind == "KeyboardInterrupt"}


class PoolError(DistError):
    """The ranks cannot be asked: they were stopped, or one of them is gone."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class _Reported(BaseException):
    """An error made of a report; notebooks show the ranks' tracebacks in place of ours."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.summary())
        self.report = report

    def _render_traceback_(self) -> list[str]:
        # IPython's hook for exceptions that know better how to show themselves.
        return [f"{self.report.traces()}{type(self).__name__}: {self}"]


class CellError(_Reported, RuntimeError):
    """A rank failed, died or did not answer while it ran a cell.

    Attributes:
        report: What became of each rank.
    """


class CellInterrupted(_Reported, KeyboardInterrupt):
    """The user interrupted a cell; the ranks that were running it have been interrupted too.

    Attributes:
        report: What became of each rank.
    """


def names(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence.

    >>> names([2]), names({3, 0, 1}), names([])
    ('rank 2', 'ranks 0, 1, 3', '')
    """
    listed = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(listed) > 1)} {', '.join(listed)}" if listed else ""
