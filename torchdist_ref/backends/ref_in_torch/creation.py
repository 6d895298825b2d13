"""Creation of the group that torch makes for the backend `ref`: ranks meet, authenticate each other, and connect.

Do not add how the ranks find each other (`members`) or the translation of calls (`process_group`) here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.ref import Ref
from torchdist_ref.backends.ref_in_torch.members import members_met
from torchdist_ref.backends.ref_in_torch.process_group import RefProcessGroup, refuse_in_forked_child
from torchdist_ref.backends.torch_native.stores import StoreFromTorch
from torchdist_ref.debug.flight_recorder import answer_requests
from torchdist_ref.errors import BackendArgumentError, explain
from torchdist_ref.membership.trust import KeyAgreement
from torchdist_ref.processes.program_end import leave_at_end
from torchdist_ref.recorder import RecordedGroup, StoreCall, StoreCalls, include
from torchdist_ref.stores import PrefixStore
from torchdist_ref.timeouts import from_torch


def create(torchs_options: Any) -> RefProcessGroup:
    """Create the process group of one member; torch calls it with its options for each new group."""
    o = torchs_options
    members = tuple(o.global_ranks_in_group) or tuple(range(o.group_size))
    is_world = not o.global_ranks_in_group
    name, operation = ("world", "init_process_group") if is_world else (f"group {o.group_id}", "new_group")
    refuse_in_forked_child(operation)
    timeout = from_torch(o.timeout)
    if timeout <= timedelta(0):
        raise BackendArgumentError(explain(operation, "timeout", "more than zero", timeout, rank=o.group_rank))
    store = PrefixStore("ref", StoreFromTorch(o.store, timeout))
    seconds, store_calls = timeout.total_seconds(), StoreCalls()
    # Before any wait: a rank that hangs here has to answer requests for dumps.
    on_connected: list[Callable[[], None]] = [answer_requests()]
    call = StoreCall(operation, f"ranks={list(members)}", members)
    try:
        with store_calls.recorded(call, f"{operation} of {name!r}", members, o.group_rank, seconds):
            world_size = 0 if is_world else c10d.get_world_size()
            keys = KeyAgreement(store, o.group_rank, o.group_size, on_connected, world_size)
            with (
                members_met(store, o.group_rank, members, operation, seconds, keys) as (watch, values),
                watch.published(),
            ):
                sealed = keys.complete(watch.store, seconds, values)
                membership = Membership(sealed, o.group_rank, members, name, seconds, watch=watch)
                backend = Ref(membership)
                include(backend.recorder, RecordedGroup(name, "ref", members, o.group_rank, seconds, sealed.prefix))
                group = RefProcessGroup(backend, members, sealed, store_calls)
                leave_at_end(group)
                return group
    finally:
        for function in on_connected:
            function()
