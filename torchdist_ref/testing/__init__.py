"""Tools to test programs that run on several ranks, and to test new stores, transports, backends and hooks.

`run` calls a function on N ranks, as threads or as forked processes, and re-raises with the rank. `fill` makes data
that a wrong collective cannot hide behind. The ``check_`` functions put an implementation through its whole
contract, clause by clause. Everything here may import the rest of the package; nothing in it imports this.
"""

from torchdist_ref.testing.backend_contract import check_backend
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.hook_contract import check_hook
from torchdist_ref.testing.outcomes import Outcome, RankError, RankTimeoutError, RemoteError
from torchdist_ref.testing.running import run
from torchdist_ref.testing.store_contract import check_store
from torchdist_ref.testing.transport_contract import check_transport

__all__ = [
    "Outcome",
    "RankError",
    "RankTimeoutError",
    "RemoteError",
    "check_backend",
    "check_hook",
    "check_store",
    "check_transport",
    "fill",
    "run",
]
