"""SealedStore: a namespace of another store whose values carry a code that only members of the job can compute.

Anybody who reaches a store can write it: torch's protocol has no authentication, and torch's clients and servers cannot
be given one. So the values that ranks believe are sealed: an HMAC of key and value, with the job's session key, is put
before each value. A value with a wrong code raises `AuthenticationError`. The code covers the key, so a value cannot be
moved to another key. Values hold no secrets, since everybody who reads the store reads them.

Counters of `add` and `barrier` and the lengths of queues cannot be sealed: do not trust them. Do not add ways to get
a session key here: `torchdist_ref.membership.trust` has those.
"""

from __future__ import annotations

from _operator import _compare_digest as same_code
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

from torchdist_ref.errors import AuthenticationError
from torchdist_ref.stores.base import Store, Text, key_text, pair_list, value_bytes
from torchdist_ref.stores.prefix import PrefixStore
from torchdist_ref.stores.sockets import trusts_network

KEY_BYTES = 32
_CODE_BYTES = 16
_PREFIX = "sealed"
_BLOCK_BYTES = 64
_INNER, _OUTER = (bytes(each ^ pad for each in range(256)) for pad in (0x36, 0x5C))


def _built_in_sha256() -> Callable[[bytes], Any]:
    """Return Python's own SHA-256: `hashlib` and `hmac` load OpenSSL, 3.5 MB in each launcher and agent."""
    for name in ("_sha2", "_sha256"):
        try:
            built_in: Callable[[bytes], Any] = import_module(name).sha256
        except ImportError:
            continue
        return built_in
    from hashlib import sha256

    return sha256


_sha256 = _built_in_sha256()


def message_code(key: bytes, data: bytes) -> bytes:
    """Return the HMAC-SHA256 of the data, 32 bytes (RFC 2104). Compare codes with `same_code`.

    >>> message_code(b"key", b"The quick brown fox jumps over the lazy dog").hex()[:16]
    'f7bc83f430538424'
    """
    if len(key) > _BLOCK_BYTES:
        key = _sha256(key).digest()
    block = key.ljust(_BLOCK_BYTES, b"\0")
    inner = _sha256(block.translate(_INNER) + data).digest()
    code: bytes = _sha256(block.translate(_OUTER) + inner).digest()
    return code


class SealedStore(PrefixStore):
    """`PrefixStore` whose values are authenticated with a session key.

    Args:
        store: underlying store, which anybody may write.
        key: session key, `KEY_BYTES` long.
        authenticated: whether only members of the job know the key.

    Attributes:
        authenticated: see above.

    >>> from torchdist_ref.stores import HashStore
    >>> whole = HashStore()
    >>> sealed = SealedStore(whole, bytes(32))
    >>> sealed.set("address", "10.0.0.7")
    >>> sealed.get("address"), len(whole.get("sealed/address"))
    (b'10.0.0.7', 24)
    >>> whole.set("sealed/address", "10.6.6.6")
    >>> sealed.get("address")
    Traceback (most recent call last):
    torchdist_ref.errors.AuthenticationError: the value of key 'address' was not written by a member of this job...
    """

    def __init__(self, store: Store, key: bytes, authenticated: bool = True) -> None:
        super().__init__(_PREFIX, store)
        self._session_key = key
        self.authenticated = authenticated

    def set(self, key: Text, value: Text) -> None:
        super().set(key, self._seal("set", key, value))

    def get(self, key: Text) -> bytes:
        return self._open("get", key, super().get(key))

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        values = super().multi_get(keys)
        return [self._open("multi_get", key, value) for key, value in zip(keys, values, strict=True)]

    def wait_get(
        self,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        sealed = {key: self._seal("wait_get", key, value) for key, value in (publish or {}).items()}
        if on_disconnect is not None:
            on_disconnect = on_disconnect[0], self._seal("wait_get", *on_disconnect)
        values = super().wait_get(keys, timeout, sealed, on_disconnect)
        return [self._open("wait_get", key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        pairs = pair_list("multi_set", keys, values)
        super().multi_set(keys, [self._seal("multi_set", key, value) for key, value in pairs])

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        # An empty expected value means that the key does not exist.
        expected = self._seal("compare_set", key, expected_value) if expected_value else expected_value
        found = super().compare_set(key, expected, self._seal("compare_set", key, desired_value))
        return self._open("compare_set", key, found)

    def set_and_compare_set(
        self, publish: Mapping[str, Text], key: Text, expected_value: Text, desired_value: Text
    ) -> bytes:
        raise self._unsupported("set_and_compare_set")

    def append(self, key: Text, value: Text) -> None:
        raise self._unsupported("append")

    def queue_push(self, key: Text, value: Text) -> None:
        super().queue_push(key, self._seal("queue_push", key, value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        return self._open("queue_pop", key, super().queue_pop(key, block))

    def clone(self) -> SealedStore:
        return SealedStore(self.underlying_store.clone(), self._session_key, self.authenticated)

    def close(self) -> None:
        """Close the underlying store if it can be closed."""
        close = getattr(innermost(self), "close", None)
        if close is not None:
            close()

    def over(self, store: Store) -> SealedStore:
        """Return a store with the same session key over another store."""
        return SealedStore(store, self._session_key, self.authenticated)

    def replace(self, store: Store) -> None:
        """Put another store in place of the underlying one, for all who share this object."""
        self._store = store

    def set_on_disconnect(self, key: Text, value: Text, now: Mapping[str, Text] | None = None) -> bool:
        operation = "set_on_disconnect"
        set_now = {each: self._seal(operation, each, text) for each, text in (now or {}).items()}
        return super().set_on_disconnect(key, self._seal(operation, key, value) if value else value, set_now)

    def derived_key(self, purpose: str) -> bytes:
        """Return a key for one purpose; those of different purposes reveal nothing about each other."""
        return message_code(self._session_key, b"purpose\0" + purpose.encode())

    def _code(self, key: str, value: bytes) -> bytes:
        # A key of users contains any character but ends where its length says, so no two pairs have one text.
        name = key.encode("utf-8", "surrogateescape")
        data = b"value\0%d\0%b%b" % (len(name), name, value)
        return message_code(self._session_key, data)[:_CODE_BYTES]

    def _seal(self, operation: str, key: Text, value: Text) -> bytes:
        data = value_bytes(operation, value)
        return self._code(key_text(operation, key), data) + data

    def _open(self, operation: str, key: Text, sealed: bytes) -> bytes:
        name = key if isinstance(key, str) else key_text(operation, key)
        code, data = sealed[:_CODE_BYTES], bytes(sealed[_CODE_BYTES:])
        if not same_code(bytes(code), self._code(name, data)):
            raise AuthenticationError(
                f"the value of key {name!r} was not written by a member of this job, on {self.underlying_store!r}. "
                f"Either another program writes to this store, or the ranks have different job tokens: "
                f"TORCHDIST_REF_TOKEN_FILE and TORCHDIST_REF_TRUST_NETWORK must be the same on all ranks."
            )
        return data

    def __repr__(self) -> str:
        return f"SealedStore({self.underlying_store!r})"


def sealed_below(store: Store) -> tuple[SealedStore | None, str]:
    """Return the sealed store below some prefixes, or None, and the prefixes between."""
    below, path = store, ""
    while isinstance(below, PrefixStore):
        if isinstance(below, SealedStore):
            return below, path
        path = f"{below.prefix}/{path}"
        below = below.underlying_store
    return None, path


def innermost(store: Any) -> Any:
    """Return the store below all prefixes and adapters, which may be one of torch's."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def channel_key(store: Store, purpose: str) -> bytes:
    """Return the key of a channel among the ranks that share this part of a store.

    Without a sealed store below, it is a key that everybody can compute.
    """
    sealed, path = sealed_below(store)
    return (sealed or SealedStore(store, bytes(KEY_BYTES))).derived_key(f"{path}{purpose}")


def is_authenticated(store: Store) -> bool:
    """Return whether only members of the job can write values that this part of a store accepts."""
    sealed, _ = sealed_below(store)
    return sealed is not None and sealed.authenticated


def may_unpickle(store: Store) -> bool:
    """Return whether ranks that share this part of a store may unpickle what others send.

    Unpickling runs code that the sender chose: only members of the job may be senders, or the user trusts the network.
    """
    return is_authenticated(store) or trusts_network()
