"""Skip connections of a pipeline: a module stashes a tensor, and a later module, perhaps of another partition, pops it.

`skippable` decorates module classes whose forward yields a `stash` or a `pop`. While a partition works on a
micro-batch, stashed tensors are in a dict of its thread; the rest moves on with the micro-batch (`crossing` lists it).
Outside a pipeline each thread has one dict, so such a model runs there too.

Do not add knowledge of schedules or devices here.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import total_ordering
from typing import Any, ClassVar

from torch import Tensor, nn

from torchdist_ref.errors import ArgumentError, ArgumentTypeError

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]


class SkipError(ArgumentError, KeyError):
    """A tensor is popped that was not stashed."""

    __str__ = Exception.__str__


@total_ordering
class Namespace:
    """Scope of names, so that a module with skip connections can be used several times in a model.

    A copy of a namespace is the same namespace.

    Example:
        >>> from copy import deepcopy
        >>> from torchdist_ref.pipeline.sync.skip import Namespace
        >>> first, second = Namespace(), Namespace()
        >>> first == second, first == deepcopy(first)
        (False, True)

    Elsewhere:
        None in MPI, NCCL and JAX. The package ``torchgpipe`` has the same interface.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {str(self._id)[:8]}>"

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __lt__(self, other: object) -> bool:
        # None is the default namespace.
        return isinstance(other, Namespace) and self._id < other._id


Key = tuple[Namespace | None, str]
Skips = dict[Key, Tensor | None]


class _StashedTensors(threading.local):
    """The stashed tensors of a thread."""

    def __init__(self) -> None:
        self.skips: Skips = {}


_stashed = _StashedTensors()


@contextlib.contextmanager
def using(skips: Skips) -> Iterator[Skips]:
    """Stash to a dict, and pop from it, for the duration of a block."""
    former, _stashed.skips = _stashed.skips, skips
    try:
        yield skips
    finally:
        _stashed.skips = former


class _SkipOperation:
    """Base of what the forward of a skippable module yields."""

    name: str


class stash(_SkipOperation):
    """Operation that stashes a tensor in a skippable module's forward: ``yield stash("name", tensor)``.

    Args:
        name: One of the names that the module is declared to stash.
        tensor: The tensor, or None.

    Elsewhere:
        None in MPI, NCCL and JAX. The package ``torchgpipe`` has the same interface.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop(_SkipOperation):
    """Operation that pops a tensor in a skippable module's forward: ``tensor = yield pop("name")``.

    Args:
        name: One of the names that the module is declared to pop.

    Elsewhere:
        None in MPI, NCCL and JAX. The package ``torchgpipe`` has the same interface.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """Base of the classes that `skippable` returns. The decorated module is its ``module``."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Put names of this module in a namespace, so that other modules can use the same names independently.

        Args:
            ns: The namespace.
            only: The names. Default: all.

        Returns:
            This module.

        Raises:
            ArgumentError: The module has no such name.
        """
        known = self.stashable_names | self.poppable_names
        names = known if only is None else set(only)
        if not names <= known:
            raise ArgumentError(
                f"{type(self).__name__}.isolate: it neither stashes nor pops {sorted(names - known)}, "
                f"but {sorted(known)}."
            )
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def _key(self, name: str) -> Key:
        return self.namespaces.get(name), name

    def stashable(self) -> set[Key]:
        """Return the keys that this module stashes."""
        return {self._key(name) for name in self.stashable_names}

    def poppable(self) -> set[Key]:
        """Return the keys that this module pops."""
        return {self._key(name) for name in self.poppable_names}

    def forward(self, *inputs: Any) -> Any:
        """Run the module and the operations that it yields.

        Raises:
            ArgumentError: It stashed or popped an undeclared name, or did not stash or pop a declared one, or popped a
                tensor that was not stashed (then it is a KeyError too).
        """
        result = self.module(*inputs)
        declared = {stash: set(self.stashable_names), pop: set(self.poppable_names)}
        if isinstance(result, Generator):
            result = self._run_operations(result, declared)
        for kind, names in declared.items():
            if names:
                raise ArgumentError(
                    f"{type(self).__name__} is declared to {kind.__name__} {sorted(names)}, but its forward did not."
                )
        return result

    def _run_operations(self, operations: Generator[Any, Any, Any], declared: dict[Any, set[str]]) -> Any:
        """Run the operations that a forward yields, and return its result."""
        popped = None
        while True:
            try:
                operation = operations.send(popped)
            except StopIteration as end:
                return end.value
            popped = self._run_operation(operation, declared)

    def _run_operation(self, operation: Any, declared: dict[Any, set[str]]) -> Tensor | None:
        """Run one operation, and return the tensor if it is a `pop`."""
        kind, name = type(operation), getattr(operation, "name", None)
        if kind not in declared:
            raise ArgumentTypeError(f"{type(self).__name__} yielded {operation!r}; yield stash(...) or pop(...).")
        if name not in declared[kind]:
            raise ArgumentError(f"{type(self).__name__} is not declared to {kind.__name__} {name!r} (once).")
        declared[kind].discard(name)
        if isinstance(operation, pop):
            key = self._key(operation.name)
            if key not in _stashed.skips:
                raise SkipError(f"{type(self).__name__} pops {name!r}, which no module before it has stashed.")
            return _stashed.skips.pop(key)
        _stashed.skips[self._key(operation.name)] = operation.tensor
        return None


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module class whose forward stashes or pops.

    Args:
        stash: The names that it stashes.
        pop: The names that it pops.

    Returns:
        A decorator.

    Raises:
        ArgumentTypeError: A string in place of a list.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.skip import pop, skippable, stash
        >>> @skippable(stash=["before"])
        ... class Keep(torch.nn.Module):
        ...     def forward(self, x):
        ...         yield stash("before", x)
        ...         return 2 * x
        >>> @skippable(pop=["before"])
        ... class Add(torch.nn.Module):
        ...     def forward(self, x):
        ...         before = yield pop("before")
        ...         return x + before
        >>> torch.nn.Sequential(Keep(), torch.nn.ReLU(), Add())(torch.tensor([1.0, -1.0]))
        tensor([ 3., -1.])

    Elsewhere:
        None in MPI, NCCL and JAX. The package ``torchgpipe`` has the same interface.
    """
    for argument, value in (("stash", stash), ("pop", pop)):
        if isinstance(value, str):
            raise ArgumentTypeError(f"skippable: {argument} must be a list of names, got {value!r}; pass [{value!r}].")
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        here = {"__module__": module_cls.__module__, "__doc__": module_cls.__doc__, "module_cls": module_cls}
        return type(module_cls.__name__, (Skippable,), {**here, **names})

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every stashed name is popped later, once, and that every popped name was stashed.

    Args:
        module: The model.

    Raises:
        ArgumentTypeError: Some are not; the message lists all faults.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.skip import skippable, verify_skippables
        >>> @skippable(pop=["x"])
        ... class Pops(torch.nn.Module):
        ...     pass
        >>> try:
        ...     verify_skippables(torch.nn.Sequential(Pops()))
        ... except TypeError as error:
        ...     print(error)
        skip connections don't fit: module '0' pops 'x', which is not stashed.

    Elsewhere:
        None in MPI, NCCL and JAX. The package ``torchgpipe`` has the same interface.
    """
    stashed: dict[Key, str] = {}
    ever: set[Key] = set()
    faults = []
    for name, layer in module.named_children():
        if isinstance(layer, Skippable):
            for key in sorted(layer.poppable(), key=str):
                if stashed.pop(key, None) is None:
                    faults.append(f"module {name!r} pops {key[1]!r}, which is not stashed")
            for key in sorted(layer.stashable(), key=str):
                if key in ever:
                    faults.append(f"module {name!r} stashes {key[1]!r}, as one before it does (isolate one of them)")
                stashed[key] = name
                ever.add(key)
    faults += [f"module {name!r} stashes {key[1]!r}, which no module pops" for key, name in stashed.items()]
    if faults:
        raise ArgumentTypeError(f"skip connections don't fit: {'; '.join(faults)}.")


def crossing(partitions: Sequence[nn.Module]) -> list[tuple[list[Key], list[Key]]]:
    """Find the skip connections that cross from one partition to another.

    Args:
        partitions: The partitions, in order.

    Returns:
        For each, the keys that it pops and an earlier one stashed, and the keys that it stashes for a later one.
    """
    found = []
    for partition in partitions:
        layers = [layer for layer in partition.modules() if isinstance(layer, Skippable)]
        stashed = _sorted_keys(layer.stashable() for layer in layers)
        popped = _sorted_keys(layer.poppable() for layer in layers)
        found.append(([key for key in popped if key not in stashed], [key for key in stashed if key not in popped]))
    return found


def _sorted_keys(sets: Iterable[set[Key]]) -> list[Key]:
    """Return the keys of sets in an order that is the same on each run."""
    return [key for keys in sets for key in sorted(keys, key=str)]
