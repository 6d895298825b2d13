"""Forms in which torch's process groups take arguments: lists and options, or tensors and values.

torch's C++ passes a list of one tensor and an options object. Programs also write ``group.allreduce(tensor, op)`` and
``group.broadcast(tensor, root=1)``. `both_forms` lets a method that takes the first form take the others, and refuses
arguments of other types.

torch's own groups pass each call to torch's dispatcher, where modes and tensors with a dispatch of their own may act
in place of a backend: those of ``FakeTensorMode`` return at once, DTensor raises. `both_forms` does so while a mode
runs, and for tensors that our backend refuses since they are not in memory (`dispatcher`). Our backend gets the tensor
inside (`unwrapped`) if the dispatcher would pass that to a backend of C++. Do not add checks of shapes, dtypes or
memory here.
"""

# torch's stubs leave out some of its names.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from itertools import repeat
from typing import Any, NoReturn

from torch import Tensor, device

from torchdist_ref.backends.operands import RowBlocks, unwrapped
from torchdist_ref.backends.ref_in_torch.dispatcher import METHODS, Method, dispatch
from torchdist_ref.backends.ref_in_torch.work import MethodArgumentError
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, explain, explain_type, on_rank
from torchdist_ref.timeouts import from_torch
from torchdist_ref.torch_internals.torch_modes import dispatch_modes, outside_modes

# Attributes of torch's options by the name of the argument, and their types in words.
_ATTRIBUTES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_TYPES = {"op": "a ReduceOp (SUM, AVG, PRODUCT, MIN, ...)", "root": "an int, a group rank"}
_TENSORS_ONLY = frozenset([Tensor])


def check_type(method: str, argument: str, value: Any, kind: type, expected: str) -> None:
    """Raise ArgumentTypeError unless an argument of a method has a type; `expected` names that."""
    if not isinstance(value, kind):
        raise ArgumentTypeError(explain(f"ProcessGroup.{method}", argument, expected, value))


def device_type(method: str, value: Any) -> str:
    """Return the type of a device, such as "cpu".

    Raises:
        ArgumentTypeError: It is not a device.
    """
    try:
        return device(value).type
    except (TypeError, RuntimeError):
        expected = "a torch.device, or the name of one"
        raise ArgumentTypeError(explain(f"ProcessGroup.{method}", "device", expected, value)) from None


def seconds_of_timeout(method: str, timeout: Any) -> float:
    """Return a time-out in seconds.

    Raises:
        ArgumentTypeError: Not a timedelta.
        BackendArgumentError: Not positive.
    """
    if not isinstance(timeout, timedelta):
        expected = "Expected timeout argument to be of type datetime.timedelta"
        raise ArgumentTypeError(f"{method}: {expected}, got {timeout!r}{on_rank()}.")
    if (limited := from_torch(timeout)) <= timedelta(0):
        raise BackendArgumentError(explain(method, "timeout", "more than zero", timeout))
    return limited.total_seconds()


class Operand:
    """Operand of a method.

    Args:
        names: Names of the argument, in any of the forms.
        depth: 0 for a tensor, 1 for a list of tensors, 2 for a list of such lists; None for any value. Default None.
        single: Whether an operand of one depth less stands for a list of one. Default False.
    """

    def __init__(self, names: str, depth: int | None = None, single: bool = False) -> None:
        self.names, self._depth, self._single = names.split(), depth, single

    def read(self, method: str, value: Any) -> Any:
        """Return the operand as the first form has it.

        Raises:
            ArgumentTypeError: Its type is another one.
        """
        # What torch passes, at little cost.
        if self._depth == 1 and type(value) is list and _TENSORS_ONLY.issuperset(map(type, value)):
            return value
        if self._depth is None:
            return value
        if self._depth == 0:
            return value if isinstance(value, Tensor) else self._refuse(method, "torch.Tensor", value)
        if self._single and (isinstance(value, Tensor) if self._depth == 1 else _is_list(value) and value):
            value = [value]
        if self._depth == 1:
            return value if _is_list(value) else self._refuse(method, "List[torch.Tensor]", value)
        if not isinstance(value, Sequence) or not all(map(_is_list, value)):
            self._refuse(method, "List[List[torch.Tensor]]", value)
        return value

    def _refuse(self, method: str, expected: str, value: Any) -> NoReturn:
        got = f"{type(value)}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            got = f"a {type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value}))}"
        raise ArgumentTypeError(explain_type(f"ProcessGroup.{method}", self.names[0], expected, got))


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of tensors."""
    if isinstance(value, list | tuple):
        return _TENSORS_ONLY.issuperset(map(type, value)) or all(isinstance(item, Tensor) for item in value)
    # The views of blocks are made on first use.
    return isinstance(value, RowBlocks)


def _dispatch_refused(group: Any, method: str, arguments: Sequence[Any], refused: BackendArgumentError) -> Any:
    """Run a call whose operands the backend has refused on the tensors inside them, or pass it to the dispatcher."""
    inside = unwrapped(arguments)
    if inside is not arguments:
        with outside_modes():
            return getattr(group, method)(*inside)

    def refuse(operands: Any) -> NoReturn:
        # Neither a mode nor a tensor has acted in place of the backend.
        raise refused

    try:
        return dispatch(group, method, arguments, refuse)
    except (BackendArgumentError, TypeError, AttributeError):
        # Others than the first one: the argument is wrong for torch too.
        raise refused from None


def both_forms(options: Any, fields: str, *operands: Operand) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method of ``(self, operands..., opts)``, so that it takes the values of options as arguments too.

    torch's dispatcher gets the calls while a mode runs, and those with tensors that our backend refuses.

    Args:
        options: Class of the options; None for a method without.
        fields: Names of the values that may stand in place of options, in order.
        operands: The operands, in order.

    Returns:
        A decorator.
    """
    order, count = fields.split(), len(operands)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            given: Sequence[Any] = arguments
            if named or len(arguments) != count + (options is not None) or type(given[-1]) is not options is not None:
                first = [*arguments[:count]]
                for operand in operands[len(first) :]:
                    first.append(_popped(method.__name__, operand.names, named))
                opts = _options(method.__name__, options, order, arguments[count:], named)
                given = first if options is None else [*first, opts]
            given = [*map(Operand.read, operands, repeat(method.__name__), given), *given[count:]]
            if dispatch_modes():
                return dispatch(self, method.__name__, given)
            try:
                return method(self, *given)
            except MethodArgumentError:
                raise
            except BackendArgumentError as refused:
                return _dispatch_refused(self, method.__name__, given, refused)

        METHODS[method.__name__] = Method(call, method, options, count)
        return call

    return decorate


def _popped(method: str, names: Sequence[str], named: dict[str, Any]) -> Any:
    for name in names:
        if name in named:
            return named.pop(name)
    raise ArgumentTypeError(f"ProcessGroup.{method}: missing argument {names[0]!r}{on_rank()}.")


def _options(method: str, kind: Any, order: Sequence[str], values: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return the options that are passed, or new ones with the values that are passed."""
    if values and hasattr(values[0], "asyncOp"):
        named["opts"], values = values[0], values[1:]
    opts = named.pop("opts", None) if kind is not None else None
    opts = kind() if opts is None and kind is not None else opts
    if not all(hasattr(opts, _ATTRIBUTES[name]) for name in order if name != "timeout"):
        raise ArgumentTypeError(explain(f"ProcessGroup.{method}", "opts", f"{kind.__name__}", opts))
    if len(values) > len(order) and values != (None,):
        raise ArgumentTypeError(
            f"ProcessGroup.{method}: {len(values)} values after the tensors{on_rank()}; it takes {order}."
        )
    for name, value in [*zip(order, values, strict=False), *named.items()]:
        if name not in order:
            raise ArgumentTypeError(
                f"ProcessGroup.{method}: unexpected argument {name!r}{on_rank()}; it takes {order} or opts."
            )
        if value is not None:
            _set(method, opts, name, value)
    return opts


def _set(method: str, opts: Any, name: str, value: Any) -> None:
    try:
        setattr(opts, _ATTRIBUTES[name], value)
    except TypeError:
        if name == "timeout":
            expected = "Expected timeout argument to be of type datetime.timedelta"
            message = f"ProcessGroup.{method}: {expected}, got {value!r}{on_rank()}."
        else:
            message = explain(f"ProcessGroup.{method}", name, _TYPES[name], value)
        raise ArgumentTypeError(message) from None
