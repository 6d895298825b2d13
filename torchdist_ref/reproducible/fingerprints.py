"""Fingerprints of tensors by name and step: where do the bits of two ranks, or of two runs, begin to differ?

Do not add here: reasons for a difference (`conditions`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, MismatchError, explain, explain_type

__all__ = ["Difference", "Fingerprints", "fingerprint", "first_difference"]

Record = list[dict[str, str]]
"""For each step the fingerprints by name."""

DIGEST_BYTES = 8


class Difference(NamedTuple):
    """First place at which two records differ.

    Attributes:
        step: Number of the step, from 0.
        name: Name of the tensor.
        found: Fingerprint in the one and in the other record; None where the record has no such step or tensor.
    """

    step: int
    name: str
    found: tuple[str | None, str | None]


def fingerprint(tensors: nn.Module | Mapping[str, Tensor], gradients: bool = False) -> dict[str, str]:
    """Return a hash of each tensor: of its bits, shape and dtype, not of its strides or device.

    Args:
        tensors: A module, whose parameters and buffers are taken in their order; or tensors by name.
        gradients: Whether the gradients of a module's parameters are taken too, as ``NAME.grad``. They come first: a
            step computes them before it changes the parameters. Default False.

    Returns:
        Hashes as text, by name.

    Example:
        >>> import torch
        >>> from torchdist_ref.reproducible import fingerprint
        >>> zeros, negative = fingerprint({"a": torch.zeros(3)}), fingerprint({"a": -torch.zeros(3)})
        >>> len(zeros["a"]), zeros == negative, zeros == fingerprint({"a": torch.zeros(6)[::2]})
        (16, False, True)
    """
    if isinstance(tensors, nn.Module):
        parameters = dict(tensors.named_parameters())
        found = {f"{name}.grad": p.grad for name, p in parameters.items() if gradients and p.grad is not None}
        named: Mapping[str, Any] = {**found, **parameters, **dict(tensors.named_buffers())}
    elif isinstance(tensors, Mapping):
        named = tensors
    else:
        raise ArgumentTypeError(explain_type("fingerprint", "tensors", "a module, or tensors by name", type(tensors)))
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            expected = f"a module, or tensors by name, and {name!r} is none"
            raise ArgumentTypeError(explain_type("fingerprint", "tensors", expected, str(type(tensor))))
    return {name: _hash(tensor) for name, tensor in named.items()}


def _hash(tensor: Tensor) -> str:
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    digest = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=DIGEST_BYTES)
    digest.update(values.reshape(-1).clone().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Fingerprints:
    """Record of a run's fingerprints, step by step, which the ranks compare at each step.

    Args:
        path: File to which rank 0 writes a line of JSON for each step, so that `first_difference` can compare two runs.
            A file that exists is replaced. Default: none.
        group: Group whose ranks compare. Default: the default group. Without one, nothing is compared.

    Attributes:
        steps: For each step the fingerprints by name.

    Example:
        >>> import torch
        >>> from torchdist_ref.reproducible import Fingerprints
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     record = Fingerprints()
        ...     record.add({"weight": torch.ones(2), "bias": torch.ones(1)})
        ...     try:
        ...         record.add({"weight": torch.ones(2), "bias": torch.ones(1) + (rank == 2)})
        ...     except RuntimeError as error:
        ...         return str(error)
        >>> print(run(program, 4)[0])
        Fingerprints: ranks differ at step 1, first in 'bias': ranks 0, 1, 3 have one value and rank 2 another.
    """

    def __init__(self, path: str | PathLike[str] | None = None, group: Any = None) -> None:
        self.steps: Record = []
        self._group = group if group is not None or groups.is_initialized() else None
        self._together = group is not None or groups.is_initialized()
        writes = path is not None and (not self._together or groups.get_rank(self._group) == 0)
        self._path = Path(path) if writes and path is not None else None
        if self._path is not None:
            self._path.write_text("", encoding="utf-8")

    def add(self, tensors: nn.Module | Mapping[str, Tensor], gradients: bool = False) -> None:
        """Take the fingerprints of one step, and compare them on all ranks.

        Args:
            tensors: As for `fingerprint`.
            gradients: As for `fingerprint`. Default False.

        Raises:
            MismatchError: Ranks differ. The message names the step, the first tensor and the ranks.
        """
        found = fingerprint(tensors, gradients)
        self.steps.append(found)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        if self._together:
            self._compare(found)

    def _compare(self, mine: dict[str, str]) -> None:
        size = groups.get_world_size(self._group)
        whole = hashlib.blake2b(json.dumps(mine).encode(), digest_size=DIGEST_BYTES).hexdigest()
        wholes: list[Any] = [None] * size
        groups.all_gather_object(wholes, whole, self._group)
        if len(set(wholes)) == 1:
            return
        everyone: list[Any] = [None] * size
        groups.all_gather_object(everyone, mine, self._group)
        raise MismatchError(_sentence(len(self.steps) - 1, everyone))


def _sentence(step: int, everyone: list[dict[str, str]]) -> str:
    """Return the message for ranks whose fingerprints differ."""
    names = dict.fromkeys(name for found in everyone for name in found)
    name = next(name for name in names if len({found.get(name) for found in everyone}) > 1)
    holders: dict[str | None, list[int]] = {}
    for rank, found in enumerate(everyone):
        holders.setdefault(found.get(name), []).append(rank)
    parts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in holders.values()]
    verb = "have" if len(next(iter(holders.values()))) > 1 else "has"
    rest = " and ".join(f"{part} another" for part in parts[1:])
    return f"Fingerprints: ranks differ at step {step}, first in {name!r}: {parts[0]} {verb} one value and {rest}."


def first_difference(
    one: str | PathLike[str] | Fingerprints, other: str | PathLike[str] | Fingerprints
) -> Difference | None:
    """Return the first step and tensor in which two records differ, or None.

    Args:
        one: A `Fingerprints`, or the path of a file that one wrote.
        other: The same, of another run.

    Raises:
        ArgumentError: A file is not a record.
        ArgumentTypeError: An argument is neither.

    Example:
        >>> import torch
        >>> from torchdist_ref.reproducible import Fingerprints, first_difference
        >>> runs = Fingerprints(), Fingerprints()
        >>> for step in range(5):
        ...     for number, record in enumerate(runs):
        ...         bias = torch.full((2,), 1.0 + number * (step > 2))
        ...         record.add({"weight": torch.ones(2), "bias": bias})
        >>> found = first_difference(*runs)
        >>> found.step, found.name
        (3, 'bias')
    """
    records = _steps(one), _steps(other)
    for step in range(max(map(len, records))):
        a, b = (record[step] if step < len(record) else {} for record in records)
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                return Difference(step, name, (a.get(name), b.get(name)))
    return None


def _steps(record: str | PathLike[str] | Fingerprints) -> Record:
    if isinstance(record, Fingerprints):
        return record.steps
    if not isinstance(record, (str, PathLike)):
        raise ArgumentTypeError(explain_type("first_difference", "record", "Fingerprints, or a path", type(record)))
    try:
        found = [json.loads(line) for line in _lines(record)]
    except ValueError as error:
        raise ArgumentError(explain("first_difference", "record", "a file that Fingerprints wrote", record)) from error
    if not all(isinstance(step, dict) for step in found):
        raise ArgumentError(explain("first_difference", "record", "a file that Fingerprints wrote", record))
    return found


def _lines(path: str | PathLike[str]) -> Iterable[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()
