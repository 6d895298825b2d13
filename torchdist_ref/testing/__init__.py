"""Tools to test programs that run on several ranks, and to test new stores, transports and backends.

`run` calls a function on N ranks, as threads or as forked processes, and re-raises with the rank. `fill` makes data
that a wrong collective cannot hide behind. The ``check_`` modules beside them put an implementation through its whole
contract. Everything here may import the rest of the package; nothing in the rest of the package imports this.
"""

from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.outcomes import Outcome, RankError, RankTimeoutError, RemoteError
from torchdist_ref.testing.running import run

__all__ = ["Outcome", "RankError", "RankTimeoutError", "RemoteError", "fill", "run"]
