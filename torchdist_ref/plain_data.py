"""Codec for plain data: objects of ranks that are not authenticated, as bytes whose decoding runs no code.

Unpickling runs code that the sender chose, and restrictions of pickle were circumvented again and again. This format
has no instructions: a tag, then a number, a length with bytes, or a count with items. The decoder takes no more bytes
than there are. It limits the memory of objects that have few bytes, and the keys that share a hash: those of numbers
are not secret, and each such key is compared with all others. Only the types of `PLAIN_TYPES` themselves are encoded,
not their subclasses::

    value → u8 tag | fields     bytes, text, int: u64 length, bytes     list, dict, ...: u64 count, values
    tensor → u8 dtype | u8 requires_grad | u8 dimensions | u64 sizes... | bytes of the elements

`pickling` decides whether a group pickles its objects. Do not add types whose construction runs a user's code.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

MAX_DEPTH = 64
_LENGTH, _FLOAT, _COMPLEX = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct("<dd")
_DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32 uint16 "
        "uint32 uint64 float8_e4m3fn float8_e5m2"
    ).split()
)
_DTYPES_BY_NAME = {str(dtype): dtype for dtype in _DTYPES}
_MAX_DIMENSIONS = 64
_MAX_SAME_HASH = 16
"""Keys of a dict, or items of a set, that may share a hash. -1 and -2 do, and so do tuples of them."""
_FREE_COST, _COST_PER_BYTE = 64 << 20, 16
"""Memory that the objects of a message may use: an amount, and a multiple of its bytes."""


class NotPlainError(ValueError):
    """A value has no encoding as plain data, or bytes are not an encoding."""


def encode(value: Any) -> bytes:
    """Return plain data as bytes.

    Raises:
        NotPlainError: The value, or one inside it, is of another type, or is nested too deeply.

    >>> decode(encode({"loss": 0.5, "steps": [1, 2**70], "shape": (3, None)}))
    {'loss': 0.5, 'steps': [1, 1180591620717411303424], 'shape': (3, None)}
    >>> encode(print)
    Traceback (most recent call last):
    torchdist_ref.plain_data.NotPlainError: a builtin_function_or_method
    """
    out = _Output()
    _write(out, value, 0)
    _require_cost(out.cost, len(out))
    return bytes(out)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value at the start of these bytes; the rest is ignored.

    Raises:
        NotPlainError: The bytes are not an encoding.
    """
    return _Decoder(memoryview(data)).value(0)


def _require_cost(cost: int, size: int) -> None:
    if cost > _FREE_COST + _COST_PER_BYTE * size:
        raise NotPlainError("too many small tensors or containers; combine them into fewer, larger ones")


# Encoding


class _Output(bytearray):
    """Bytes of an encoding.

    Attributes:
        cost: memory that its objects will use beside their bytes.
    """

    cost = 0


def _write(out: _Output, value: Any, depth: int) -> None:
    tag = _TAGS.get(type(value))
    if tag is None:
        raise NotPlainError(f"a {type(value).__qualname__}")
    if depth > MAX_DEPTH:
        raise NotPlainError(f"a value in more than {MAX_DEPTH} others, or in itself")
    out.append(tag)
    out.cost += _COSTS[tag]
    writer = _CODECS[tag][1]
    if writer is not None:
        writer(out, value, depth + 1)


def _write_bytes(out: _Output, value: bytes, depth: int) -> None:
    out += _LENGTH.pack(len(value))
    out += value


def _write_int(out: _Output, value: int, depth: int) -> None:
    _write_bytes(out, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), depth)


def _write_items(out: _Output, items: Iterable[Any], depth: int) -> None:
    values = list(items)
    out += _LENGTH.pack(len(values))
    for value in values:
        _write(out, value, depth)


def _write_tensor(out: _Output, tensor: Tensor, depth: int) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _DTYPES:
        raise NotPlainError(f"a tensor of dtype {tensor.dtype}, layout {tensor.layout} on {tensor.device}")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    out += bytes([_DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim()])
    out += b"".join(map(_LENGTH.pack, tensor.shape))
    out += ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


# Decoding


class _Decoder:
    """Reader of one value from bytes that anybody may have written."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at, self._cost, self._frozensets = data, 0, 0, 0

    def take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self._data):
            raise NotPlainError("the data end inside a value")
        piece, self._at = self._data[self._at : end], end
        return piece

    def length(self) -> int:
        """Return a length or count. A wrong one fails at the end of the data, before it costs memory."""
        return int(_LENGTH.unpack(self.take(8))[0])

    def value(self, depth: int) -> Any:
        tag = self.take(1)[0]
        if tag >= len(_CODECS) or depth > MAX_DEPTH:
            raise NotPlainError(f"a value of unknown type {tag}, or nested too deeply")
        if cost := _COSTS[tag]:
            self._cost += cost
            _require_cost(self._cost, len(self._data))
        return _CODECS[tag][2](self, depth + 1)

    def bytes(self) -> bytes:
        return bytes(self.take(self.length()))

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self.length())]

    def pairs(self, depth: int) -> list[tuple[Any, Any]]:
        found = [(self.value(depth), self.value(depth)) for _ in range(self.length())]
        _require_hashes([key for key, _ in found])
        return found

    def distinct(self, depth: int) -> list[Any]:
        """Return the items of a set."""
        found = self.items(depth)
        _require_hashes(found)
        return found

    def frozen(self, depth: int) -> list[Any]:
        """Return the items of a frozenset. Comparing those in others could take a time exponential in the depth."""
        before = self._frozensets
        found = self.items(depth)
        _require_hashes(found, 1 if self._frozensets > before else _MAX_SAME_HASH)
        self._frozensets += 1
        return found

    def tensor(self) -> Tensor:
        code, requires_grad, dimensions = self.take(3)
        if code >= len(_DTYPES) or dimensions > _MAX_DIMENSIONS:
            raise NotPlainError(f"a tensor of unknown dtype {code}, or with {dimensions} dimensions")
        dtype, shape = _DTYPES[code], [_LENGTH.unpack(self.take(8))[0] for _ in range(dimensions)]
        elements = bytearray(self.take(math.prod(shape) * dtype.itemsize))
        # An element of bool must be 0 or 1, and an empty tensor may be of any sizes.
        stored = torch.uint8 if dtype is torch.bool else dtype
        try:
            flat = torch.frombuffer(elements, dtype=stored) if elements else torch.empty(0, dtype=stored, device="cpu")
            tensor = (flat != 0 if dtype is torch.bool else flat).reshape(shape)
            return tensor.requires_grad_() if requires_grad else tensor
        except (RuntimeError, TypeError) as error:
            raise NotPlainError(f"a tensor that does not exist: {error}") from error


def _require_hashes(keys: Collection[Any], most: int = _MAX_SAME_HASH) -> None:
    """Raise if more keys share a hash than chance explains: to make a dict of them would take quadratic time."""
    try:
        hashes = list(map(hash, keys))
    except TypeError as error:
        raise NotPlainError(str(error)) from error
    if len(set(hashes)) < len(hashes) and max(Counter(hashes).values()) > most:
        raise NotPlainError(f"a dict or set with more than {most} keys of the same hash")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _parameter(tensor: Tensor) -> Parameter:
    try:
        return Parameter(tensor.detach(), tensor.requires_grad)
    except RuntimeError as error:
        raise NotPlainError(f"a parameter that does not exist: {error}") from error


def _device(name: bytes) -> torch.device:
    try:
        return torch.device(name.decode("ascii", "replace"))
    except RuntimeError as error:
        raise NotPlainError(f"a device that does not exist: {error}") from error


def _checked(make: Callable[[Any], Any], content: Any) -> Any:
    try:
        return make(content)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        # A key or an item of a set that cannot be hashed, text that is not UTF-8.
        raise NotPlainError(str(error)) from error


def _pairs_of(out: _Output, value: dict[Any, Any], depth: int) -> None:
    out += _LENGTH.pack(len(value))
    for key, item in value.items():
        _write(out, key, depth)
        _write(out, item, depth)


_Writer = Callable[[_Output, Any, int], None]
_Reader = Callable[[_Decoder, int], Any]
_CODECS: tuple[tuple[type, _Writer | None, _Reader], ...] = (
    (type(None), None, lambda d, depth: None),
    (bool, lambda out, value, depth: out.append(value), lambda d, depth: bool(d.take(1)[0])),
    (int, _write_int, lambda d, depth: int.from_bytes(d.bytes(), "little", signed=True)),
    (float, lambda out, value, depth: out.extend(_FLOAT.pack(value)), lambda d, depth: _FLOAT.unpack(d.take(8))[0]),
    (
        complex,
        lambda out, value, depth: out.extend(_COMPLEX.pack(value.real, value.imag)),
        lambda d, depth: complex(*_COMPLEX.unpack(d.take(16))),
    ),
    (
        str,
        lambda out, value, depth: _write_bytes(out, value.encode("utf-8", "surrogatepass"), depth),
        lambda d, depth: _checked(_text, d.bytes()),
    ),
    (bytes, _write_bytes, lambda d, depth: d.bytes()),
    (bytearray, _write_bytes, lambda d, depth: bytearray(d.bytes())),
    (list, _write_items, lambda d, depth: d.items(depth)),
    (tuple, _write_items, lambda d, depth: tuple(d.items(depth))),
    (set, _write_items, lambda d, depth: _checked(set, d.distinct(depth))),
    (frozenset, _write_items, lambda d, depth: _checked(frozenset, d.frozen(depth))),
    (dict, _pairs_of, lambda d, depth: _checked(dict, d.pairs(depth))),
    (OrderedDict, _pairs_of, lambda d, depth: _checked(OrderedDict, d.pairs(depth))),
    (torch.Size, _write_items, lambda d, depth: _checked(torch.Size, d.items(depth))),
    (
        torch.dtype,
        lambda out, value, depth: _write_bytes(out, str(value).encode(), depth),
        lambda d, depth: _checked(_DTYPES_BY_NAME.__getitem__, d.bytes().decode("ascii", "replace")),
    ),
    (Tensor, _write_tensor, lambda d, depth: d.tensor()),
    (Parameter, _write_tensor, lambda d, depth: _parameter(d.tensor())),
    (
        torch.device,
        lambda out, value, depth: _write_bytes(out, str(value).encode(), depth),
        lambda d, depth: _device(d.bytes()),
    ),
)
_TAGS: dict[type, int] = {kind: tag for tag, (kind, _, _) in enumerate(_CODECS)}
_LARGE = {Tensor: 1000, Parameter: 1000, OrderedDict: 400, set: 216, frozenset: 216}
_COSTS = tuple(_LARGE.get(kind, 0) for kind, _, _ in _CODECS)
"""Memory in bytes of an empty object of each type, if that is much more than its encoding."""
PLAIN_TYPES = ", ".join(kind.__name__ for kind in _TAGS)
