"""Collectives for use inside a model: each returns its result as a new tensor, and gradients come back through it.

The names and arguments are those of ``torch.distributed.nn.functional``. Sums, averages and moves are linear, so their
gradients are collectives too (`transposes`); a product, minimum or maximum gathers the tensors and reduces them on each
rank, so that torch's own derivative applies. Calls that change their arguments are in `torchdist_ref.groups`. The
functions stand in `rooted` and `symmetric`.

The loss that is differentiated is the sum of the losses of all ranks. So every rank has to run backward, through
the same collectives in the same order.
"""

from __future__ import annotations

from torchdist_ref.nn.rooted import broadcast, gather, reduce, scatter
from torchdist_ref.nn.symmetric import all_gather, all_reduce, all_to_all, all_to_all_single, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
