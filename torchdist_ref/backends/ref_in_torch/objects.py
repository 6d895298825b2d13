"""Objects in torch's own object collectives on groups of ours: who may have code unpickled.

torch unpickles what arrives, and so do its checkpoints, FSDP's optimizer states and pipelines, which call its object
collectives. All of these convert objects with two functions of torch, which offers no hook. `limit_objects` puts
functions in their place, which do one of three things, as `groups.pickling` does for this library's own functions:

- Ranks that are not authenticated exchange plain data (`CallsFromTorch.pickles_objects`).
- Authenticated ranks on a backend whose connections are not put an HMAC before each pickle, and verify it before they
  unpickle::

      u8[32] HMAC by the group's key | u32 sender | u64 number | pickle

  A conversion knows its group, and neither operation nor peer. So the number only counts the objects that the sender
  converts for the group, and each receiver accepts a number once.
- Else, torch's functions pickle as before.

A group that torch made on a backend of its own, below a default group of ours, follows the default group: its ranks
met on that group's store. A group that torch does not list, such as the Gloo group that torch's RPC makes for itself,
met elsewhere: torch's functions pickle there as before. Do not add communication here, nor this library's own object
collectives (`groups.pickling`).
"""

from __future__ import annotations

import hmac
import itertools
import struct
from collections import defaultdict
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchdist_ref.errors import AuthenticationError, PicklingError, add_note, on_rank
from torchdist_ref.membership.trust import CURES
from torchdist_ref.plain_data import PLAIN_TYPES, NotPlainError, decode, encode
from torchdist_ref.stores import Store
from torchdist_ref.stores.sealed import channel_key
from torchdist_ref.stores.sockets import trusts_network
from torchdist_ref.torch_internals import torch_private

CODE_BYTES = 32
_HEADER = struct.Struct(f"<{CODE_BYTES}sIQ")
WINDOW = 4096
"""Numbers of a sender that a receiver remembers. An older one is refused: ranks convert objects nearly in order."""


def not_plain(operation: str, group: Any, cause: NotPlainError) -> PicklingError:
    """Return the error for an object of this rank that is not plain data.

    Args:
        operation: Function that the program called.
        group: Group of ours whose ranks are not authenticated.
        cause: Part of the object that has no encoding.
    """
    return PicklingError(
        f"{operation}: rank {group.members[group.rank()]}'s object has {cause} in it. The ranks of group "
        f"{group.group_desc or group.group_name!r} are not authenticated, so they exchange plain data only "
        f"({PLAIN_TYPES}; not their subclasses): unpickling would run code of everybody who reaches the network. "
        f"{CURES}"
    )


def needs_code(size: int, backend: str) -> bool:
    """Return whether authenticated ranks of a group put a code before each pickle.

    The mesh and the shared memory of `ref` authenticate their peers, and `fake` has no connections; those of Gloo, NCCL
    and MPI authenticate nobody.
    """
    return size > 1 and backend not in ("ref", "fake") and not trusts_network()


def object_code(store: Store, exchange: str, source: int, data: bytes | memoryview) -> bytes:
    """Return the HMAC of a pickle by the key of a group's store.

    Args:
        store: The store.
        exchange: Text that names the exchange, so that the pickle is of no use in another one.
        source: Group rank of the sender.
        data: The pickle.
    """
    code = hmac.new(channel_key(store, f"objects {exchange} of {source}"), digestmod="sha256")
    code.update(data)
    return code.digest()


def limit_objects() -> None:
    """Put functions in place of torch's two that convert objects, once; they stay until the process ends."""
    to_tensor, to_object = torch_private.OBJECT_TO_TENSOR.get(), torch_private.TENSOR_TO_OBJECT.get()
    if hasattr(to_tensor, "limits_objects"):
        return

    # torch 2.14 added an argument `weights_only`.
    @wraps(to_tensor)
    def object_to_tensor(obj: Any, device: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        limited = _limited(group)
        if limited is None:
            converted = to_tensor(obj, device, group, *args, **kwargs)
            link = _unauthenticated_link(group)
            return converted if link is None else link.seal(converted[0])
        try:
            data = encode(obj)
        except NotPlainError as cause:
            raise not_plain("torch.distributed", limited, cause) from None
        return _resizable(bytearray(data), device)

    @wraps(to_object)
    def tensor_to_object(tensor: Tensor, tensor_size: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _limited(group) is None:
            link = _unauthenticated_link(group)
            if link is not None:
                tensor = link.open(tensor, int(tensor_size))
                tensor_size = tensor.numel()
            return to_object(tensor, tensor_size, group, *args, **kwargs)
        try:
            return decode(tensor.cpu().numpy().tobytes()[: int(tensor_size)])
        except NotPlainError as error:
            add_note(error, f"The ranks are not authenticated, so pickles are not loaded. {CURES}")
            raise

    object_to_tensor.limits_objects = True  # type: ignore[attr-defined]
    torch_private.OBJECT_TO_TENSOR.set(object_to_tensor)
    torch_private.TENSOR_TO_OBJECT.set(tensor_to_object)


def _resizable(data: bytearray | memoryview, device: Any) -> tuple[Tensor, Tensor]:
    """Return bytes as a tensor that torch can resize, a copy, and their number, int64 of shape (1,)."""
    tensor = torch.frombuffer(data, dtype=torch.uint8).to(device, copy=True)
    return tensor, torch.tensor([len(data)], dtype=torch.int64, device=device)


def _deciding(group: Any) -> Any:
    """Return the group of ours that decides for a group of torch's functions.

    None below a default group of torch's, and for a group that torch does not list.
    """
    if hasattr(group, "pickles_objects"):
        return group
    tables = torch_private.TABLES.get()
    ours = tables.default_pg
    is_listed = group is None or group in tables.pg_map
    return ours if is_listed and hasattr(ours, "pickles_objects") else None


def _limited(group: Any) -> Any:
    """Return the group of ours whose ranks may not unpickle what the others of this group send; None if they may."""
    ours = _deciding(group)
    return None if ours is None or ours.pickles_objects else ours


class MessageNumbers:
    """Numbers of the objects of one group on this rank: the next one to send, and those that have arrived."""

    def __init__(self) -> None:
        self.next = itertools.count()
        # By sender, the newest number, and a bit for each that is so much older.
        self._arrived: dict[int, tuple[int, int]] = {}

    def accept(self, sender: int, number: int) -> bool:
        """Return whether a number arrives for the first time, which this call notes."""
        newest, bits = self._arrived.get(sender, (-1, 0))
        age = newest - number
        if age < 0:
            bits = (bits << min(-age, WINDOW) | 1) & (1 << WINDOW) - 1
        elif age >= WINDOW or bits >> age & 1:
            return False
        else:
            bits |= 1 << age
        self._arrived[sender] = max(newest, number), bits
        return True


class _Link(NamedTuple):
    """Connections of a group whose ranks are authenticated, while the connections are not.

    Attributes:
        store: Store whose key the ranks share.
        name: Name of the group, the same on all ranks; empty for a group of ours, which has a key of its own.
        rank: This rank in the group.
        backend: Name of the backend.
        numbers: Numbers of its objects.
    """

    store: Store
    name: str
    rank: int
    backend: str
    numbers: MessageNumbers

    def seal(self, pickled: Tensor) -> tuple[Tensor, Tensor]:
        """Return a pickle with a header before it, and the size of both, int64 of shape (1,)."""
        data = memoryview(bytearray(_HEADER.size + pickled.numel()))
        data[_HEADER.size :] = pickled.cpu().numpy().data
        number = next(self.numbers.next)
        _HEADER.pack_into(data, 0, self._code(self.rank, number, data), self.rank, number)
        return _resizable(data, pickled.device)

    def open(self, tensor: Tensor, size: int) -> Tensor:
        """Return the pickle in the first `size` bytes.

        Raises:
            AuthenticationError: A process outside this job wrote it, or it has arrived before.
        """
        whole = tensor.cpu()[: max(size, 0)]
        data = whole.numpy().data
        code, sender, number = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0, 0)
        if not hmac.compare_digest(code, self._code(sender, number, data)):
            raise AuthenticationError(
                f"torch.distributed: an object was not written by a member of this job for this group{on_rank()}. "
                f"{self._intruder()}"
            )
        if not self.numbers.accept(sender, number):
            raise AuthenticationError(
                f"torch.distributed: object {number} of rank {sender} in this group has arrived before{on_rank()}. "
                f"{self._intruder()}"
            )
        return whole[_HEADER.size :].to(tensor.device)

    def _code(self, sender: int, number: int, data: memoryview) -> bytes:
        return object_code(self.store, f"torch {self.name} {number}", sender, data[_HEADER.size :])

    def _intruder(self) -> str:
        return (
            f"Another process has connected to backend {self.backend!r}, whose connections are not authenticated. Keep "
            f"other programs off the network of the ranks, or use backend 'ref'."
        )


_numbers: WeakKeyDictionary[Any, defaultdict[str, MessageNumbers]] = WeakKeyDictionary()
"""Numbers by the group of ours that decides, and by the name of the group: one that torch makes again has its key."""


def _unauthenticated_link(group: Any) -> _Link | None:
    """Return the connections of a group whose pickles need codes; None if they need none."""
    ours = _deciding(group)
    if ours is None:
        return None
    tables = torch_private.TABLES.get()
    group = tables.default_pg if group is None else group
    own = group is ours
    backend = ours.backend.name if own else tables.pg_map.get(group, ("",))[0]
    if not needs_code(group.size(), backend):
        return None
    name = "" if own else group.group_name
    numbers = _numbers.setdefault(ours, defaultdict(MessageNumbers))[name]
    return _Link(ours.store, name, group.rank(), backend, numbers)
