"""Codec for plain data: values survive, and no bytes run code, hang or fill the memory."""

from __future__ import annotations

import collections
import math
import pickle
import random
import struct
from typing import Any

import pytest
import torch

from torchdist_ref.plain_data import MAX_DEPTH, NotPlainError, decode, encode
from torchdist_ref.testing import fill

VALUES: list[Any] = [
    None,
    True,
    False,
    *(sign * 2**bits + off for bits in (0, 7, 8, 31, 63, 64, 200) for sign in (1, -1) for off in (-1, 0, 1)),
    0.1,
    -math.inf,
    1e-320,
    2 - 3.5j,
    "",
    "ß∂\ud800",
    b"\0\xff",
    bytearray(b"ab"),
    [],
    [1, ["two", (3.0, None)]],
    (),
    {1, "a"},
    frozenset({b"x"}),
    {"a": {1: (2,)}, None: []},
    collections.OrderedDict(b=1, a=2),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_survives(value: Any) -> None:
    found = decode(encode(value) + b"padding")
    assert type(found) is type(value) and found == value


def test_special_numbers_and_order_survive() -> None:
    assert math.isnan(decode(encode(math.nan))) and math.copysign(1, decode(encode(-0.0))) == -1
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]


DTYPES = [torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 4), (2, 0)], ids=str)
def test_a_tensor_survives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (fill(1, shape) * 3).to(dtype)
    found = decode(encode([tensor, tensor.t() if len(shape) == 2 else tensor]))
    assert all(each.dtype is dtype for each in found) and found[0].shape == shape
    assert torch.equal(found[0].to(torch.complex128), tensor.to(torch.complex128))
    if len(shape) == 2:
        assert torch.equal(found[1].to(torch.complex128), tensor.t().to(torch.complex128))


def test_a_conjugate_view_and_requires_grad_survive() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(decode(encode(tensor)), tensor.resolve_conj())
    leaf = torch.ones(2, requires_grad=True)
    found = decode(encode(leaf))
    assert found.requires_grad and found.is_leaf


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_survives(requires_grad: bool) -> None:
    found = decode(encode(torch.nn.Parameter(fill(3, (2, 2)), requires_grad)))
    assert type(found) is torch.nn.Parameter and found.requires_grad is requires_grad
    assert torch.equal(found, fill(3, (2, 2))) and found.is_leaf


@pytest.mark.parametrize("value", [torch.nn.Parameter(torch.ones(2)), torch.device("cpu")])
def test_bytes_of_no_parameter_and_of_no_device_are_refused(value: Any) -> None:
    data = bytearray(encode(value))
    # The dtype of the tensor becomes int64, which needs no gradient; the name of the device becomes none.
    data[1 if isinstance(value, torch.Tensor) else -1] = 4
    with pytest.raises(NotPlainError):
        decode(data)


class Mine(dict):  # type: ignore[type-arg]
    pass


class Odd(torch.Tensor):
    pass


nested: list[Any] = []
nested.append(nested)


@pytest.mark.parametrize(
    "value", [print, Mine(), object(), nested, torch.ones(1).as_subclass(Odd), torch.ones(2).to_sparse(), range(3)]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        encode({"inside": [value]})


def test_depth_is_limited_on_both_sides() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(NotPlainError, match="more than"):
        encode([value])
    one_list = encode([None])[:-1]
    with pytest.raises(NotPlainError, match="nested too deeply"):
        decode(one_list * 100_000)


@pytest.mark.parametrize("bits", [8, 31, 40, 63, 64])
@pytest.mark.parametrize("value", [b"x", [1], {1: 2}, torch.ones(2, 2)], ids=["bytes", "list", "dict", "tensor"])
def test_huge_lengths_allocate_nothing(value: Any, bits: int) -> None:
    data = bytearray(encode(value))
    at = 4 if isinstance(value, torch.Tensor) else 1
    data[at : at + 8] = struct.pack("<Q", 2**bits - 1)
    with pytest.raises(NotPlainError):
        decode(data)


MODULUS = 2**61 - 1
"""Python's hash of an integer is its remainder."""
SAME_HASH: dict[str, list[Any]] = {
    "int": [each * MODULUS for each in range(1, 101)],
    "complex": [complex(-1_000_003.0 * each, each) for each in range(1, 101)],
    "tuple": [(each * MODULUS,) for each in range(1, 101)],
    "frozenset": [frozenset({each * MODULUS}) for each in range(1, 101)],
    "frozensets": [frozenset({frozenset({each * MODULUS})}) for each in range(1, 101)],
}


def message(kind: type, items: list[bytes]) -> bytes:
    """Return the encoding of a container, whose items may be equal or unhashable."""
    return encode(kind())[:1] + struct.pack("<Q", len(items)) + b"".join(items)


@pytest.mark.parametrize("kind", SAME_HASH)
@pytest.mark.parametrize("container", [dict, collections.OrderedDict, set, frozenset])
def test_keys_of_the_same_hash_are_refused_before_they_are_compared(kind: str, container: type) -> None:
    assert len(set(map(hash, SAME_HASH[kind]))) == 1
    value = encode(None) if issubclass(container, dict) else b""
    data = message(container, [encode(key) + value for key in SAME_HASH[kind]])
    with pytest.raises(NotPlainError, match=r"a dict or set with more than 1?\d keys of the same hash"):
        decode(data)


def test_a_few_keys_of_the_same_hash_are_no_attack() -> None:
    grid = {(x, y, z): x for x in range(-2, 3) for y in range(-2, 3) for z in range(-2, 3)}
    assert len(set(map(hash, grid))) < len(grid) and decode(encode(grid)) == grid
    numbers = {frozenset({-1}), frozenset({-2}), frozenset({-1, -2, 5})}
    assert decode(encode(numbers)) == numbers


def test_frozensets_in_a_frozenset_that_share_a_hash_are_refused() -> None:
    """Each level would compare its items with each other, and with them those of all levels below."""
    value = frozenset({-1}), frozenset({-2})
    with pytest.raises(NotPlainError, match="more than 1 keys of the same hash"):
        decode(encode(frozenset(value)))
    with pytest.raises(NotPlainError, match="more than 1 keys of the same hash"):
        decode(encode(frozenset({(value[0],), (value[1],)})))


@pytest.mark.parametrize("value", [torch.ones(0), collections.OrderedDict()], ids=lambda each: type(each).__name__)
def test_small_objects_that_use_much_memory_are_refused_on_both_sides(value: Any) -> None:
    assert len(decode(encode([value] * 50_000))) == 50_000
    cost = 1000 if isinstance(value, torch.Tensor) else 400
    count = (64 << 20) // (cost - 16 * len(encode(value))) + 1
    with pytest.raises(NotPlainError, match="too many small tensors or containers"):
        encode([value] * count)
    with pytest.raises(NotPlainError, match="too many small tensors or containers"):
        decode(message(list, [encode(value)] * count))


def test_mutated_bytes_give_a_value_or_the_error() -> None:
    """4,000 mutations of one message with everything in it; and pickles are no plain data."""
    original = encode([*VALUES, fill(0, (3, 3)), torch.tensor([True])])
    generator = random.Random(11)
    for _ in range(4_000):
        data = bytearray(original)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)])
        try:
            decode(data[: generator.randint(1, len(data))] if generator.random() < 0.3 else data)
        except NotPlainError:
            pass
    with pytest.raises(NotPlainError):
        decode(pickle.dumps(print))
    with pytest.raises(NotPlainError):
        decode(b"")
