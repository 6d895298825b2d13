"""Modules with skip connections: their forward yields a `stash` or a `pop`, and gets tensors back from `pop`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from torchdist_ref.errors import ArgumentError, ArgumentTypeError
from torchdist_ref.pipeline.sync.skip.namespace import Namespace
from torchdist_ref.pipeline.sync.skip.tracker import Key, current

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]


class _Operation:
    name: str


class stash(_Operation):
    """Yield this in a skippable module's forward to send a tensor ahead: ``yield stash("name", tensor)``.

    Args:
        name: One of the names that the module was declared to stash.
        tensor: The tensor, or None.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop(_Operation):
    """Yield this in a skippable module's forward to get a tensor: ``tensor = yield pop("name")``.

    Args:
        name: One of the names that the module was declared to pop.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """What `skippable` makes of a module class. It has the module inside, as ``module``."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Put names of this module in a namespace, so that other modules can use them otherwise.

        Args:
            ns: The namespace.
            only: Which names. Default: all.

        Returns:
            This module.
        """
        names = self.stashable_names | self.poppable_names if only is None else only
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def _key(self, name: str) -> Key:
        return self.namespaces.get(name), name

    def stashable(self) -> set[Key]:
        """What this module stashes."""
        return {self._key(name) for name in self.stashable_names}

    def poppable(self) -> set[Key]:
        """What this module pops."""
        return {self._key(name) for name in self.poppable_names}

    def forward(self, *inputs: Any) -> Any:
        """Run the module, carrying out what it yields.

        Raises:
            ArgumentError: It stashed or popped what it was not declared to, or did not what it was declared to.
        """
        result = self.module(*inputs)
        wanted = {stash: set(self.stashable_names), pop: set(self.poppable_names)}
        if isinstance(result, Generator):
            result = self._carry_out(result, wanted)
        for kind, names in wanted.items():
            if names:
                raise ArgumentError(
                    f"{type(self).__name__} is declared to {kind.__name__} {sorted(names)}, but did not."
                )
        return result

    def _carry_out(self, steps: Generator[Any, Any, Any], wanted: dict[Any, set[str]]) -> Any:
        answer = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._one(operation, wanted)

    def _one(self, operation: Any, wanted: dict[Any, set[str]]) -> Tensor | None:
        kind, name = type(operation), getattr(operation, "name", None)
        if kind not in wanted:
            raise ArgumentTypeError(f"{type(self).__name__} yielded {operation!r}; yield stash(...) or pop(...).")
        if name not in wanted[kind]:
            raise ArgumentError(f"{type(self).__name__} is not declared to {kind.__name__} {name!r} (once).")
        wanted[kind].discard(name)
        if isinstance(operation, pop):
            return current().pop(self._key(operation.name))
        current()[self._key(operation.name)] = operation.tensor
        return None


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module class whose forward stashes or pops.

    Args:
        stash: The names that it stashes.
        pop: The names that it pops.

    Returns:
        A decorator.

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
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        here = {"__module__": module_cls.__module__, "__doc__": module_cls.__doc__, "module_cls": module_cls}
        return type(module_cls.__name__, (Skippable,), {**here, **names})

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Check that everything that is stashed is popped later, once, and the other way round.

    Args:
        module: The model.

    Raises:
        ArgumentTypeError: It is not so; all that is wrong is named.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.skip import skippable, verify_skippables
        >>> @skippable(pop=["x"])
        ... class Pops(torch.nn.Module):
        ...     pass
        >>> verify_skippables(torch.nn.Sequential(Pops()))
        Traceback (most recent call last):
        torchdist_ref.errors.ArgumentTypeError: skip connections don't fit: module '0' pops 'x', which is not there.
    """
    there: dict[Key, str] = {}
    ever: set[Key] = set()
    wrong = []
    for name, layer in module.named_children():
        if isinstance(layer, Skippable):
            for key in sorted(layer.poppable(), key=str):
                if there.pop(key, None) is None:
                    wrong.append(f"module {name!r} pops {key[1]!r}, which is not there")
            for key in sorted(layer.stashable(), key=str):
                if key in ever:
                    wrong.append(f"module {name!r} stashes {key[1]!r}, as one before it does (isolate one of them)")
                there[key] = name
                ever.add(key)
    wrong += [f"module {name!r} stashes {key[1]!r}, which nobody pops" for key, name in there.items()]
    if wrong:
        raise ArgumentTypeError(f"skip connections don't fit: {'; '.join(wrong)}.")
