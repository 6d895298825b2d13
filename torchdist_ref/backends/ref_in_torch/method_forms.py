"""Forms in which torch's process groups take arguments: lists and options, or tensors and values.

torch's C++ passes a list of one tensor and an options object. Programs also write ``group.allreduce(tensor, op)`` and
``group.broadcast(tensor, root=1)``. `both_forms` lets a method that takes the first form take the others. Do not add
checks of tensors here.
"""

# torch's stubs leave out some of its names.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

from torchdist_ref.errors import ArgumentTypeError

# Attributes of torch's options by the name of the argument.
_ATTRIBUTES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


class Operand:
    """Operand of a method.

    Args:
        names: Names of the argument, in any of the forms.
        depth: 0 for a tensor, 1 for a list of tensors in place of one tensor, 2 for a list of lists in place of a list.
    """

    def __init__(self, names: str, depth: int) -> None:
        self.names, self.depth = names.split(), depth

    def wrapped(self, value: Any) -> Any:
        """Return the operand as the first form has it."""
        if self.depth == 1 and isinstance(value, Tensor):
            return [value]
        if self.depth == 2 and isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
            return [value]
        return value


def both_forms(options: type, fields: str, *operands: Operand) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method of ``(self, operands..., opts)``, so that it takes the values of options as arguments too.

    Args:
        options: Class of the options.
        fields: Names of the values that may stand in place of options, in order.
        operands: The operands, in order.

    Returns:
        A decorator.
    """
    order = fields.split()

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            count = len(operands)
            if not named and len(arguments) == count + 1 and type(arguments[count]) is options:
                return method(self, *map(Operand.wrapped, operands, arguments), arguments[count])
            given = [*arguments[:count]]
            for operand in operands[len(given) :]:
                given.append(_popped(method.__name__, operand.names, named))
            opts = _options(method.__name__, options, order, arguments[count:], named)
            return method(self, *map(Operand.wrapped, operands, given), opts)

        return call

    return decorate


def _popped(method: str, names: Sequence[str], named: dict[str, Any]) -> Any:
    for name in names:
        if name in named:
            return named.pop(name)
    raise ArgumentTypeError(f"ProcessGroup.{method}: missing argument {names[0]!r}.")


def _options(method: str, kind: Any, order: Sequence[str], values: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return the options that are passed, or new ones with the values that are passed."""
    if values and hasattr(values[0], "asyncOp"):
        named["opts"], values = values[0], values[1:]
    opts = named.pop("opts", None) or kind()
    if len(values) > len(order):
        raise ArgumentTypeError(f"ProcessGroup.{method}: {len(values)} values after the tensors; it takes {order}.")
    for name, value in [*zip(order, values, strict=False), *named.items()]:
        if name not in order:
            raise ArgumentTypeError(f"ProcessGroup.{method}: unexpected argument {name!r}; it takes {order} or opts.")
        if value is not None:
            setattr(opts, _ATTRIBUTES[name], value)
    return opts
