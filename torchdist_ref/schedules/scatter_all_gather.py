"""Scatter, then all-gather: a long broadcast in which nobody sends the whole tensor more than twice.

The root hands a different chunk to every rank (down a binomial tree), and the chunks then go round a ring.
The root has all of them already, so the arrows to it are left out.

Steps ``ceil(log2 n) + n - 1``, bytes ``2 (n - 1)/n m``.
Source: Barnett, Gupta, Payne, Shuler, van de Geijn, Watts, "Interprocessor collective communication library", 1994.

Do not add here: other two-part algorithms; compose them in a file of their own.
"""

from __future__ import annotations

from torchdist_ref.schedules import ring, tree
from torchdist_ref.schedules.compose import only, rooted, then
from torchdist_ref.schedules.schedule import Schedule


def broadcast(world: int, root: int = 0) -> Schedule:
    """A tree scatter, then a ring all-gather."""
    spread = only(ring.all_gather_in_place(world), lambda m: m.dst != 0)
    return rooted(then(tree.scatter_in_place(world), spread, name="scatter_all_gather broadcast"), root)
