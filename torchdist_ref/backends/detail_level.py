"""Backend whose collectives are compared before they run, for debug level DETAIL.

`ref` compares every call anyway. Other backends hang, abort or return garbage if ranks call different collectives. Here
every rank writes its next call to the store and reads those of all ranks; the backend runs the call if all are equal.
This costs some round trips to the store, and an asynchronous call returns only when all ranks have made it.

Point-to-point calls are not compared: a rank would have to wait for others that take no part in them. Do not add other
checks of a backend's calls here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from torchdist_ref.backends.base import Backend, BackendWrapper, Membership
from torchdist_ref.backends.operands import flat_operands, operands_of
from torchdist_ref.calls import AllToAll, Call, Recv, Send, signature
from torchdist_ref.debug.call_sites import CallSites, SiteComparingExecutor, log_stack, record_stacks, warn_of_autograd
from torchdist_ref.debug.levels import DebugLevel
from torchdist_ref.errors import MismatchError, RankStalledError, StoreTimeoutError
from torchdist_ref.membership.blame import Wait
from torchdist_ref.membership.watch import unwatched
from torchdist_ref.recorder import FRAMES, Entry, alike
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
OFF = DebugLevel.OFF
current_level: Callable[[], DebugLevel] = getattr(c10d, "get_debug_level")  # noqa: B009 - torch's stubs leave it out
"""The same as `debug.levels.get_debug_level`, without a function of Python: every new group asks."""
log = logging.getLogger("torchdist_ref.debug")


def apply_debug_level(backend: Backend, membership: Membership) -> Backend:
    """Log a new group at a debug level other than OFF, and return its backend: itself, and at DETAIL wrapped."""
    m = membership
    log.info("group %r on %s: rank %d of members %s, time-out %g s", m.name, backend.name, m.rank, m.members, m.timeout)
    if current_level() != DebugLevel.DETAIL:
        return backend
    record_stacks(backend.recorder)
    if backend.name != "ref":
        return CheckedBackend(backend, membership)
    any_backend: Any = backend
    sites = CallSites(membership.name, membership.members)
    any_backend.wrap_executor(lambda each: SiteComparingExecutor(each, backend.recorder, m.store, m.rank, sites))
    return backend


class CheckedBackend(BackendWrapper):
    """Backend that runs a collective only if all ranks make the same one."""

    def __init__(self, backend: Backend, membership: Membership) -> None:
        super().__init__(backend)
        self._membership = membership
        self._store = unwatched(membership.store)
        self._count = 0
        self._sites = CallSites(membership.name, membership.members)
        self._submitting = threading.Lock()

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        if isinstance(call, (Send, Recv)):
            return self.wrapped.submit(call, inputs, outputs, wait)
        with self._submitting:
            # The backend does not record the call before the check has passed, which takes until all ranks make it.
            entry = self.recorder.begin((self._count, 0), call, operands_of(inputs, outputs))
            try:
                if isinstance(call, AllToAll) and call.uneven:
                    self._check_sizes(call, inputs, outputs, entry)
                else:
                    self._check_equal(call, alike(call, inputs, outputs, lambda tensor: tensor.shape), entry)
            except BaseException as error:
                self.recorder.fail(entry, error)
                raise
            self.recorder.drop(entry)
            warn_of_autograd(call.op, flat_operands(outputs))
            return self.wrapped.submit(call, inputs, outputs, wait)

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`."""
        self._membership = replace(self._membership, timeout=seconds)
        self.wrapped.set_timeout(seconds)

    def _check_sizes(self, call: Call, inputs: Tensors, outputs: Tensors, entry: Entry) -> None:
        """Compare the sizes of an uneven all_to_all: those that one rank sends are those that the other receives."""
        mine = [tensor.numel() for tensor in (*inputs, *outputs)]
        texts = self._check_equal(call, (), entry, " ".join(map(str, mine)))
        sizes = [list(map(int, text.split())) for text in texts]
        size = len(sizes)
        for source, target in product(range(size), repeat=2):
            if (sent := sizes[source][target]) != (expected := sizes[target][size + source]):
                m = self._membership
                raise MismatchError(
                    f"{call.op} (on rank {m.members[m.rank]} of group {m.name!r}): rank {m.members[source]} sends "
                    f"{sent} elements to rank {m.members[target]}, which expects {expected}. Nothing was written."
                )

    def _check_equal(self, call: Call, tensors: Tensors, entry: Entry, own: str = "") -> list[str]:
        """Compare the ranks' calls and their call sites, and return what each rank has added in `own`."""
        number, self._count, m = self._count, self._count + 1, self._membership
        frames = entry[FRAMES]
        text = f"{_described(call, tensors)}\n{own}\n{CallSites.text(frames)}"
        calls = [value.decode().split("\n") for value in self._exchange(number, call, text)]
        sites = [lines[3] for lines in calls]
        # All ranks have made this call, so none reads the keys of the previous one any more.
        self._store.delete_key(f"checked/{number - 1}/{m.rank}")
        if len({lines[0] for lines in calls}) > 1:
            sides = "; ".join(f"rank {member}: {lines[1]}" for member, lines in zip(m.members, calls, strict=True))
            error = MismatchError(
                f"{call.op} (call {number} of group {m.name!r}, on rank {m.members[m.rank]}): ranks make different "
                f"calls. {sides}. Nothing was written; all ranks must make the same calls in the same order. "
                f"Call sites: {self._sites.sides(sites)}."
            )
            log_stack(error, frames)
            raise error
        self._sites.compare(call, calls[0][0], (number, 0), sites)
        return [lines[2] for lines in calls]

    def _exchange(self, number: int, call: Call, text: str) -> list[bytes]:
        """Write the text of this rank's call, and return those of all ranks."""
        m = self._membership
        keys = [f"{number}/{rank}" for rank in range(m.size)]
        # A rank may end once it has made the call.

        def end() -> BaseException | None:
            missing, name = absent(), f"call {number}, {call.op}"
            return self.wrapped.failure(missing, name, Wait.PART)

        def absent() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not store.check([key])]

        store = WatchedStore("checked", self._store, end)

        try:
            return store.wait_get(keys, timedelta(seconds=m.timeout), {keys[m.rank]: text})
        except StoreTimeoutError:
            missing = [m.members[rank] for rank in absent()]
            raise RankStalledError(
                f"{call.op} (in group {m.name!r}, on rank {m.members[m.rank]}): ranks {missing} made no call in "
                f"{m.timeout:g} s. Check what they do."
            ).naming(missing) from None


def _described(call: Call, tensors: Tensors) -> str:
    """Return the line that is compared, and the one that errors show: shapes may differ if sizes do not."""
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    sizes = signature(call, dtype, [(tensor.numel(),) for tensor in tensors])
    return f"{sizes}\n{signature(call, dtype, [tuple(tensor.shape) for tensor in tensors])}"
