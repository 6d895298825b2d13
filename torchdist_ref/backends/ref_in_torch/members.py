"""Members of a group that torch makes for the backend `ref`: how they find each other, and learn that one has failed.

torch's launcher keeps one store through all attempts of a job, with the keys that a failed attempt has left. The ranks
of a world therefore meet under keys of their own (`meeting`), and the groups of that world have theirs below those. A
group beside a world of another backend meets as a world does.

Do not add the connection of the members (`creation`) here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch.distributed as c10d

from torchdist_ref.backends.base import Backend
from torchdist_ref.backends.ref_in_torch.process_group import CallsFromTorch, RefProcessGroup
from torchdist_ref.membership.blame import Wait
from torchdist_ref.membership.meeting import Meeting, Presence
from torchdist_ref.membership.trust import KeyAgreement
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.stores import PrefixStore


@contextmanager
def members_met(
    store: PrefixStore, rank: int, members: tuple[int, ...], operation: str, seconds: float, keys: KeyAgreement
) -> Iterator[tuple[MemberWatch, Sequence[bytes] | None]]:
    """Announce this rank and its keys, and yield a watch over the members, with the values of the awaited keys.

    The values are None if the members have not met yet.
    """
    world = c10d.group.WORLD
    if isinstance(world, CallsFromTorch):
        part = PrefixStore(_prefix(world), store) if isinstance(world, RefProcessGroup) else store
        presence = Presence(part, rank, len(members))
        watch = _watch_in_world(part, rank, members, operation, presence, world.backend)
        with closing(presence):
            with watch.published():
                own: dict[str, str | bytes] = {**presence.announcement(), **keys.own}
                for key, value in own.items():
                    part.set(key, value)
            yield watch, None
        return
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = Meeting(
        store, rank, len(members), has_agent=has_agent, operation=operation, members=members, nonce=keys.nonce
    )
    with meeting.watched(seconds, published=keys.own, awaited=keys.awaited, on_round=keys.connect) as watch:
        yield watch, meeting.values


def _prefix(world: RefProcessGroup) -> str:
    """Return the prefix of the keys under which a world has met, which no attempt before it has used."""
    assert isinstance(world.store, PrefixStore) and isinstance(world.store.underlying_store, PrefixStore)
    return world.store.underlying_store.prefix


def _watch_in_world(
    store: PrefixStore, rank: int, members: tuple[int, ...], operation: str, presence: Presence, world: Backend
) -> MemberWatch:
    """Return a watch over the members of a new group, who may have ended or left before they called `new_group`."""

    def find_failure(ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
        found = world.failure([members[each] for each in ranks], description, wait)
        return found or presence.failure(ranks, description)

    return MemberWatch(store, rank, members, operation, find_failure)
