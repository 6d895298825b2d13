"""Where the members of a new group meet: a part of the store that no other group uses, found without asking anybody.

Groups that all ranks make are counted, so all ranks know the next one's number; whoever comes first writes down its
members, so that ranks which disagree are told. Groups that only their members make are counted by their members, list
by list, because nobody else hears of them. Don't add how members connect: that is the backends'.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from torchdist_ref.backends.base import decline
from torchdist_ref.errors import MismatchError
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.world import World
from torchdist_ref.stores import PrefixStore
from torchdist_ref.stores.watched import WatchedStore

Members = tuple[int, ...]


def next_place(world: World) -> PrefixStore:
    """Where the next group of the count meets."""
    assert world.store is not None
    place = PrefixStore(f"group/{world.made}", world.store)
    world.made += 1
    return place


def agreed_place(world: World, default: ProcessGroup, members: Members) -> PrefixStore:
    """Where a group meets that all ranks make, members or not.

    Raises:
        MismatchError: Another rank gave other members for it.
    """
    assert world.store is not None
    mine = ",".join(map(str, members))
    said = world.store.compare_set(f"members/{world.made}", "", mine).decode()
    place = next_place(world)
    if said != mine:
        raise _disagreement(place, default.members[default.rank()], mine, said)
    return place


def _disagreement(place: PrefixStore, me: int, mine: str, said: str) -> MismatchError:
    """Tell those who wait for this rank, and give the error for this one."""
    reason = (
        f"new_group: rank {me} gives members [{mine}], another rank gave [{said}]. "
        f"All ranks must make the same groups in the same order."
    )
    theirs = [int(member) for member in said.split(",")]
    if me in theirs:
        decline(place, theirs.index(me), reason)
    return MismatchError(reason)


def watched(place: PrefixStore, parent: ProcessGroup, ranks: Sequence[int], operation: str) -> WatchedStore:
    """The same place, to wait there for these ranks of an older group: not in vain, if that knows that they died."""
    return WatchedStore(place.prefix, place.underlying_store, lambda: parent.backend.trouble(ranks, operation))


def place_of_members(world: World, members: Members) -> PrefixStore:
    """Where a group meets that only its members make."""
    assert world.store is not None
    # A list of thousands of ranks would be too long for a key.
    these = sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    place = PrefixStore(f"members_only/{these}/{world.by_members[members]}", world.store)
    world.by_members[members] += 1
    return place
