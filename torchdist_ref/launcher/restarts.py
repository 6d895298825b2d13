"""Starting all ranks anew when one of them fails: a loop around supervision, and nothing else.

Ranks that restart alone would meet others in the middle of something; so all are stopped and all begin again, at
a store that nobody has written to. What they had not saved is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from torchdist_ref.launcher.supervise import Supervisor


def supervise(attempt: Callable[[int], Supervisor], max_restarts: int, say: Callable[[str], None]) -> Supervisor:
    """Run all ranks, again and again while one fails by itself and restarts are left.

    Args:
        attempt: Runs them once; gets how often they were restarted, and returns the supervisor that has run them.
        max_restarts: How often they may be restarted.
        say: Takes a line about each restart.

    Returns:
        The supervisor of the last attempt.
    """
    for restarts in range(max_restarts):
        supervisor = attempt(restarts)
        if supervisor.first_failure is None:
            return supervisor
        say(f"restarting all ranks ({restarts + 1} of {max_restarts})")
    return attempt(max_restarts)
