"""The hook of DDP's `mixed_precision`: gradients are summed in one dtype, and become full precision in the reducer.

DDP registers it itself. The names are torch's, underscores too. When parameters are in which precision is not
decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.peers import Peers, comm_hook
from torchdist_ref.parallel.bucket import GradBucket

__all__: list[str] = []


@dataclass
class _AllreduceUpcastHookState:
    """What the hook has to know.

    Attributes:
        ddp_weakref: A weak reference to the DDP; its group and its `mixed_precision` are used.
        upcast_stream: Accepted for torch's sake; nothing runs on it.
        wait_for_stream_enqueued: Accepted for torch's sake.
    """

    ddp_weakref: Any
    upcast_stream: Any = None
    wait_for_stream_enqueued: bool = False


@comm_hook
def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients in the dtype ``reduce_dtype``: added up first, then divided.

    Args:
        hook_state: Names the DDP.
        bucket: The gradients; they came as ``param_dtype``.

    Returns:
        A Future of the average, in ``reduce_dtype``.
    """
    ddp = hook_state.ddp_weakref()
    config = ddp.mixed_precision
    peers = Peers(ddp.process_group, bucket)
    travelling = bucket.buffer().to(config.reduce_dtype or config.param_dtype or bucket.buffer().dtype)
    return peers.sum(travelling).then(lambda done: done.value()[0].div_(peers.size))
