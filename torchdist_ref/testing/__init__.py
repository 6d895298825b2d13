"""Tools for testing programs that run on several ranks, and for testing new stores, transports, backends and hooks.

`run` calls a function on N ranks, which are threads or forked processes, and raises an error that names the rank.
`fill` makes test data that reveals wrong collectives. The ``check_`` functions test an implementation against its whole
contract, clause by clause. Modules here may import the rest of the package; nothing in it imports them.
"""

from torchdist_ref.ranks.outcomes import Outcome, RankError, RankTimeoutError, RemoteError
from torchdist_ref.testing.backend_contract import check_backend
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.hook_contract import check_hook
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
