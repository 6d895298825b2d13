"""A backend whose collectives are compared before they run: what the debug level DETAIL adds to backends of others.

`ref` compares on every call anyway. Other backends hang, abort or return garbage where ranks disagree; so here every
rank writes its next call to the store, reads everybody's, and lets the backend go if all are alike. That costs some
round trips to the store a call, and a call that was asked for as asynchronous waits for all ranks to make it.

Messages between two ranks are not compared: a rank would have to wait for others that have no part in them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import product

from torch import Tensor

from torchdist_ref.backends.base import Backend, BackendWrapper, Membership
from torchdist_ref.calls import AllToAll, Call, Recv, Scatter, Send, signature
from torchdist_ref.debug.levels import DebugLevel, get_debug_level
from torchdist_ref.errors import MismatchError, RankStalledError, StoreTimeoutError
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
log = logging.getLogger("torchdist_ref.debug")


def apply_debug_level(backend: Backend, membership: Membership) -> Backend:
    """The backend as the debug level wants it: itself, reported, or compared."""
    level = get_debug_level()
    if level != DebugLevel.OFF:
        m = membership
        log.info(
            "group %r on %s: rank %d of members %s, time-out %g s", m.name, backend.name, m.rank, m.members, m.timeout
        )
    if level == DebugLevel.DETAIL and backend.name != "ref":
        return CheckedBackend(backend, membership)
    return backend


class CheckedBackend(BackendWrapper):
    """A backend that runs a collective only when all ranks make the same one."""

    def __init__(self, backend: Backend, membership: Membership) -> None:
        super().__init__(backend)
        self._membership = membership
        self._made = 0
        self._turn = threading.Lock()

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        if isinstance(call, (Send, Recv)):
            return self.wrapped.submit(call, inputs, outputs, wait)
        with self._turn:
            if isinstance(call, AllToAll) and call.uneven:
                self._fit(call, inputs, outputs)
            else:
                self._agree(call, outputs if isinstance(call, Scatter) else inputs)
            return self.wrapped.submit(call, inputs, outputs, wait)

    def _fit(self, call: Call, inputs: Tensors, outputs: Tensors) -> None:
        """Each rank has sizes of its own; what one gives is what the other takes."""
        mine = [tensor.numel() for tensor in (*inputs, *outputs)]
        said = [list(map(int, text.split())) for text in self._agree(call, (), " ".join(map(str, mine)))]
        size = len(said)
        for giver, taker in product(range(size), repeat=2):
            if (given := said[giver][taker]) != (taken := said[taker][size + giver]):
                m = self._membership
                raise MismatchError(
                    f"{call.op} (on rank {m.members[m.rank]} of group {m.name!r}): rank {m.members[giver]} gives rank "
                    f"{m.members[taker]} {given} elements, which expects {taken}. Nothing was written."
                )

    def _agree(self, call: Call, tensors: Tensors, own: str = "") -> list[str]:
        """What the ranks add of their own, once it is known that they make the same call."""
        number, self._made, m = self._made, self._made + 1, self._membership
        keys = [f"checked/{number}/{rank}" for rank in range(m.size)]
        m.store.set(keys[m.rank], f"{_described(call, tensors)}\n{own}")
        self._wait(keys, call)
        said = [answer.decode() for answer in m.store.multi_get(keys)]
        # Everybody has made this call, so nobody reads the last one's keys any more.
        m.store.delete_key(f"checked/{number - 1}/{m.rank}")
        if len({text.split("\n")[0] for text in said}) > 1:
            sides = "; ".join(
                f"rank {member}: {text.split(chr(10))[1]}" for member, text in zip(m.members, said, strict=True)
            )
            raise MismatchError(
                f"{call.op} (call {number} of group {m.name!r}, on rank {m.members[m.rank]}): ranks make different "
                f"calls. {sides}. Nothing was written; all ranks must make the same calls in the same order."
            )
        return [text.split("\n")[2] for text in said]

    def _wait(self, keys: list[str], call: Call) -> None:
        m = self._membership
        try:
            m.store.wait(keys, timedelta(seconds=m.timeout))
        except StoreTimeoutError:
            absent = [member for member, key in zip(m.members, keys, strict=True) if not m.store.check([key])]
            raise RankStalledError(
                f"{call.op} (in group {m.name!r}, on rank {m.members[m.rank]}): ranks {absent} made no call in "
                f"{m.timeout:g} s. See what they do."
            ) from None


def _described(call: Call, tensors: Tensors) -> str:
    """What is compared, and below it what a person reads: shapes may differ where sizes don't."""
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    sizes = signature(call, dtype, [(tensor.numel(),) for tensor in tensors])
    return f"{sizes}\n{signature(call, dtype, [tuple(tensor.shape) for tensor in tensors])}"
