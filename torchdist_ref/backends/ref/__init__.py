"""Backend `ref`: collectives of this project's own schedules, run over its own transports.

Reading order: `backend` (one call), `plan` (one rank's part of a schedule), `handshake` (calls that differ between
ranks), `execute` (the rounds, to be read). Then `fast` with `steps` and `zero_copy` (the same, optimized), `contiguous`
(copies of strided tensors, and of those on GPUs) and `tag_matching` (send and recv). Threads and the order of calls are
in `backends.worker_threads`, memory and semaphores in `torchdist_ref.transports`.
"""

from torchdist_ref.backends.ref.backend import Ref

__all__ = ["Ref"]
