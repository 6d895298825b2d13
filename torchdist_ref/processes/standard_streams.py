"""Standard streams of a process that was started with some of them closed (``program <&- >&-``).

The system gives the lowest free descriptor to what is opened next. If standard input, output or error is closed, a
socket, a pidfd or shared memory gets its number. A library that writes to standard error then writes into it,
and a forked process that redirects its output closes it. So the null device takes these descriptors when the
package is imported, before the package opens anything. Do not add redirections here: they belong to
`processes.control`.
"""

from __future__ import annotations

import os
import sys

_STREAMS = ("stdin", "stdout", "stderr")


def open_closed_streams() -> None:
    """Open the null device in place of each closed standard stream of this process.

    `sys.stdin`, `sys.stdout` and `sys.stderr`, which Python sets to None for a closed stream, become files of it.
    """
    for descriptor, name in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            mode = os.O_WRONLY if descriptor else os.O_RDONLY
            # The lowest free descriptor is this one, since those below are open.
            null = os.open(os.devnull, mode)
            os.set_inheritable(null, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(null, "w" if descriptor else "r", encoding="utf-8", closefd=False))
