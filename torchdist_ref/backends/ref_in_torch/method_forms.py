"""Forms in which torch's process groups take arguments: lists and options, or tensors and values.

torch's C++ passes a list of one tensor and an options object. Programs also write ``group.allreduce(tensor, op)`` and
``group.broadcast(tensor, root=1)``. `both_forms` lets a method that takes the first form take the others.

torch's own groups pass each call to torch's dispatcher, where modes and tensors with a dispatch of their own may act
in place of a backend: those of ``FakeTensorMode`` return at once, DTensor raises. `dispatched` does so for tensors that
our backend refuses since they are not in memory. Our backend gets the tensor inside (`unwrapped`) if the dispatcher
would pass that to a backend of C++. Do not add checks of tensors here.
"""

# torch's stubs leave out some of its names.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from torchdist_ref.backends.base import outside_transforms, unwrapped
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError

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


_Method = TypeVar("_Method", bound=Callable[..., Any])


def dispatched(method: _Method) -> _Method:
    """Decorate a method of a group: torch's dispatcher gets the calls with tensors that our backend refuses.

    A group without a backend passes them on, and raises where the dispatcher finds nobody to run them.
    """

    @wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except BackendArgumentError as refused:
            return _dispatch(self, method.__name__, arguments, refused)

    return cast(_Method, call)


def _dispatch(group: Any, method: str, arguments: Sequence[Any], refused: BackendArgumentError) -> Any:
    inside = unwrapped(arguments)
    if inside is not arguments:
        with outside_transforms():
            return getattr(group, method)(*inside)
    without_backend: Any = ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    try:
        return getattr(without_backend, method)(*arguments)
    except (RuntimeError, TypeError) as error:
        # The latter where an argument is wrong for torch too.
        if isinstance(error, TypeError) or "No backend type associated" in str(error):
            raise refused from None
        raise


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
            given: Sequence[Any] = arguments
            if named or len(arguments) != count + 1 or type(arguments[count]) is not options:
                first = [*arguments[:count]]
                for operand in operands[len(first) :]:
                    first.append(_popped(method.__name__, operand.names, named))
                given = [*first, _options(method.__name__, options, order, arguments[count:], named)]
            given = [*map(Operand.wrapped, operands, given), given[count]]
            try:
                return method(self, *given)
            except BackendArgumentError as refused:
                return _dispatch(self, method.__name__, given, refused)

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
