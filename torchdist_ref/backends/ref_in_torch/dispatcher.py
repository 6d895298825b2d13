"""torch's dispatcher: how modes and tensor subclasses see the calls of our groups.

A process group of torch passes each call to the dispatcher as an operator, such as ``c10d::allreduce_``. There modes
(every ``TorchDispatchMode``: ``CommDebugMode``, ``FakeTensorMode``, ``make_fx``) and tensors with a dispatch of their
own see it, and may act in place of a backend. `dispatch` makes a call of ours take that way. It costs three times the
call of one rank, so a group does so only while a mode runs on the calling thread, or if its backend has refused the
tensors.

At the end of that way is torch's kernel, which asks the group for a backend in C++; ours are in Python. So a kernel of
this module takes its place, for as long as a call is being dispatched: it calls the method of a group of ours. Kernels
are of the process, so a group of torch's own whose call comes meanwhile, on another thread, gets to its backend in C++
by way of Python. The first version left the kernels in place from the first dispatched call on. Each later call of
every group of torch's own then ran in Python: the compiler traced into it, messages of errors differed, and a group
whose store is in Python hung. Only where `make_fx` records a call does the kernel stay, as the recorded function makes
that call outside of any mode.

Two operators of functional collectives call methods in C++ that a group in Python cannot have. They get kernels when
this module is loaded.

Do not add methods of groups here, nor the decision whether a call is dispatched: `method_forms` and the public
functions have it.
"""

# torch's stubs leave out some of its names.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.library import Library, get_kernel

from torchdist_ref.backends.operands import RowBlocks, flat_operands
from torchdist_ref.backends.ref_in_torch.work import hide_from_compilers
from torchdist_ref.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)
from torchdist_ref.errors import UnsupportedError, on_rank
from torchdist_ref.torch_internals import accelerators, torch_private
from torchdist_ref.work import Done, Work


class Method(NamedTuple):
    """Method of a group of ours, as the kernels call it.

    Attributes:
        function: Attribute of the class.
        run: The method: a function of the group, the operands, and the options if there are any.
        options: Class of the options; None for a method without.
        operands: Number of operands.
    """

    function: Callable[..., Any]
    run: Callable[..., Any]
    options: Any
    operands: int

    def is_of(self, group: Any) -> bool:
        """Return whether a group has this method."""
        return getattr(type(group), self.run.__name__, None) is self.function


METHODS: dict[str, Method] = {}
"""The methods by their names."""

# The operators of c10d, and the names of the method of a group: that of torch 2.13, and an older one.
_OPERATORS = {
    "allreduce_": ("allreduce",),
    "allreduce_coalesced_": ("allreduce_coalesced",),
    "broadcast_": ("broadcast",),
    "reduce_": ("reduce",),
    "allgather_": ("allgather",),
    "allgather_coalesced_": ("allgather_coalesced",),
    "_allgather_base_": ("all_gather_single", "_allgather_base"),
    "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "gather_": ("gather",),
    "scatter_": ("scatter",),
    "reduce_scatter_": ("reduce_scatter",),
    "_reduce_scatter_base_": ("reduce_scatter_single", "_reduce_scatter_base"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    "alltoall_": ("alltoall",),
    "alltoall_base_": ("all_to_all_single", "alltoall_base"),
    "barrier": ("barrier",),
    "send": ("send",),
    "recv_": ("recv",),
    "recv_any_source_": ("recv_anysource",),
}
_OPERATOR_OF = {names[0]: name for name, names in _OPERATORS.items()}
_OLDER = {names[0]: names[-1] for names in _OPERATORS.values()}
# Arguments of operators that are attributes of the options of a method; torch has spelled some in two ways.
_ATTRIBUTES = {
    "reduceop": "reduceOp",
    "rootrank": "rootRank",
    "roottensor": "rootTensor",
    "asyncop": "asyncOp",
    "timeout": "timeout",
}
_NO_OPERANDS = {*_ATTRIBUTES, "processgroup", "sparseindices", "deviceids"}

_Mode: Any = torch_private.DISPATCH_MODE.get()


class _Current(threading.local):
    """Call that the calling thread is passing to the dispatcher: its end, and the Work once it has been there."""

    end: Callable[[Sequence[Any]], Any] | None = None
    work: Any = None


_current = _Current()


class _InNameOf(_Mode):  # type: ignore[misc]
    """Mode on top of all others that puts a group in the place of the group whose method passes a call on."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if func.namespace == "c10d":
            named = [each.name for each in func._schema.arguments].index("process_group")  # noqa: SLF001
            args = (*args[:named], torch_private.BOX_GROUP.get()(self._group), *args[named + 1 :])
        return func(*args, **(kwargs or {}))


def dispatch(
    group: Any, method: str, operands: Sequence[Any], end: Callable[[Sequence[Any]], Any] | None = None
) -> Any:
    """Pass a call of a group to torch's dispatcher, and return its Work.

    Args:
        group: The group.
        method: Name of the method of torch 2.13.
        operands: The operands, and the options if the method has any.
        end: Function of the operands that runs at the end of the dispatcher and returns a Work; None there stands for
            the method of the group. Default: that method.

    Returns:
        The Work of the group; another one if a mode or a tensor has acted in its place.
    """
    if torch.compiler.is_exporting():
        _refuse_export(method)
    # A method of a group in C++ makes the operator's arguments; one of our group would call itself.
    plain: Any = ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    call = _method(plain, method)
    # A mode may call other collectives meanwhile.
    outer = _current.end, _current.work
    _current.end, _current.work = end, None
    try:
        with _KERNELS[_OPERATOR_OF[method]].in_place(), _InNameOf(group):
            handed = call(*operands)
        return handed if _current.work is None else _current.work
    finally:
        _current.end, _current.work = outer


def dispatch_call(
    group: Any, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool, start: Callable[[], Work]
) -> Work:
    """Pass a call of this library to torch's dispatcher, and return its Work.

    Args:
        group: The group.
        call: The call.
        inputs: See `Backend.submit`.
        outputs: See `Backend.submit`.
        wait: See `Backend.submit`.
        start: Function that submits the call. It runs at the end of the dispatcher, unless a mode or a tensor has acted
            in its place, or a mode has passed other tensors on.
    """
    method, operands, values = _as_method(call, inputs, outputs)
    if torch.compiler.is_exporting():
        return _export(group, call, method, operands)
    options = _options(METHODS[method].options, {**values, "asyncop": not wait})
    given = _tensors(operands)
    work = dispatch(group, method, (*operands, *options), lambda last: start() if _tensors(last) == given else None)
    if isinstance(work, Work):
        return work
    work.wait()
    return Done(call.op, flat_operands(outputs))


def _export(group: Any, call: Call, method: str, operands: Sequence[Any]) -> Work:
    """Have ``torch.export`` record a call of this library as it does a call of torch's function.

    torch rewrites its function as a functional collective.
    """
    reduction = getattr(call, "reduction", "sum").removeprefix("premul_").upper()
    op = getattr(ReduceOp, reduction)
    match method:
        case "allreduce":
            torch.distributed.all_reduce(operands[0][0], op, group)
        case "allgather":
            torch.distributed.all_gather(operands[0][0], operands[1][0], group)
        case "all_gather_single":
            torch.distributed.all_gather_into_tensor(operands[0], operands[1], group)
        case "reduce_scatter_single":
            torch.distributed.reduce_scatter_tensor(operands[0], operands[1], op, group)
        case "all_to_all_single":
            torch.distributed.all_to_all_single(operands[0], operands[1], group=group)
        case _:
            _refuse_export(call.op)
    return Done(call.op, [])


def _refuse_export(operation: str) -> NoReturn:
    raise UnsupportedError(
        f"{operation}: torch.export has no functional form of this collective{on_rank()}. Export a model with "
        f"all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor or all_to_all_single only, or call it "
        f"outside the model."
    )


def _as_method(
    call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the method of torch's groups for a call, its operands, and the values of its options."""
    read, written = flat_operands(inputs), flat_operands(outputs)
    # A public function on one tensor in place of a list passes a tuple of one where the group has one rank.
    match call:
        case AllReduce():
            return "allreduce", [[*written]], {"reduceop": call.reduction}
        case Broadcast():
            return "broadcast", [[*written]], {"rootrank": call.root}
        case Reduce():
            return "reduce", [[*written]], {"reduceop": call.reduction, "rootrank": call.root}
        case AllGather() if isinstance(outputs, RowBlocks | tuple):
            return "all_gather_single", [written[0], read[0]], {}
        case AllGather():
            return "allgather", [[[*written]], [*read]], {}
        case Gather():
            return "gather", [[[*written]] if outputs else [], [*read]], {"rootrank": call.root}
        case Scatter():
            return "scatter", [[*written], [[*read]] if inputs else []], {"rootrank": call.root}
        case ReduceScatter() if isinstance(inputs, RowBlocks | tuple):
            return "reduce_scatter_single", [written[0], read[0]], {"reduceop": call.reduction}
        case ReduceScatter():
            return "reduce_scatter", [[*written], [[*read]]], {"reduceop": call.reduction}
        case AllToAll() if isinstance(inputs, RowBlocks | tuple):
            return "all_to_all_single", [written[0], read[0], [], []], {}
        case AllToAll():
            return "alltoall", [[*written], [*read]], {}
        case Send():
            return "send", [[*read], call.dst, call.tag], {}
        case Recv(src=None):
            return "recv_anysource", [[*written], call.tag], {}
        case Recv():
            return "recv", [[*written], call.src, call.tag], {}
    return "barrier", [], {}


def _tensors(operands: Any) -> list[int]:
    """Return the identities of the tensors in operands, in order."""
    if isinstance(operands, list | tuple):
        return [identity for each in operands for identity in _tensors(each)]
    return [id(operands)] if isinstance(operands, Tensor) else []


class _Kernels:
    """Kernels of one operator, in place of torch's while they are needed.

    Args:
        name: Name of the operator.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._library: Library | None = None
        self._users, self._stays = 0, False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the kernels in the place of torch's in a context, which several threads may enter."""
        with self._lock:
            self._users += 1
            self._stays = self._stays or _is_recorded()
            if self._library is None:
                self._library = self._registered()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not (self._users or self._stays):
                    self._library._destroy()  # noqa: SLF001 - the one way to end a registration at once
                    self._library = None

    def _registered(self) -> Library:
        library, operator = Library("c10d", "IMPL"), getattr(torch.ops.c10d, self._name).default
        with warnings.catch_warnings():
            # torch warns that its kernels are replaced.
            warnings.simplefilter("ignore")
            for kind in accelerators.usable_types():
                key = torch_private.KEY_OF_DEVICE.get()(kind)
                original = get_kernel(f"c10d::{self._name}", key)
                kernel = _kernel(operator, _OPERATORS[self._name], torch.device(kind), original)
                library.impl(self._name, kernel, key, with_keyset=True)
        return library


def _is_recorded() -> bool:
    """Return whether `make_fx` records the calls of this thread: the recorded function makes them outside of a mode."""
    loaded = torch_private.PROXY_MODE.module in sys.modules
    return loaded and torch_private.PROXY_MODE.get()() is not None


_KERNELS = {name: _Kernels(name) for name in _OPERATORS}


def _kernel(operator: Any, methods: Sequence[str], device: torch.device, original: Any) -> Callable[..., Any]:
    """Return the kernel of an operator: a method for groups of ours, and of the backend in C++ for others."""
    arguments = {each.name.replace("_", "").lower(): each.default_value for each in operator._schema.arguments}  # noqa: SLF001
    has_outputs = len(operator._schema.returns) > 1  # noqa: SLF001

    def kernel(keyset: Any, *given: Any) -> Any:
        values = {**arguments, **dict(zip(arguments, given, strict=False))}
        group = torch_private.UNBOX_GROUP.get()(values["processgroup"])
        method = METHODS[methods[0]]
        operands = [value for label, value in values.items() if label not in _NO_OPERANDS][: method.operands]
        options = _options(method.options, values)
        if method.is_of(group):
            work = None if _current.end is None else _current.end(operands)
            if work is None:
                work = method.run(group, *operands, *options)
            _current.work = work
            # C++ may keep the Work longer than Python keeps ours.
            work = torch_private.WORK_OF_FUTURE.get()(work.get_future())
        else:
            backend = torch_private.BACKEND_OF_GROUP.of(group)(device)
            call = getattr(backend, methods[-1], None)
            if call is None:
                return original.call_boxed(keyset, *given)
            # torch's kernel would run under the interpreter's lock, for which a thread of the backend may wait.
            work = call(*operands, *options)
        boxed = torch_private.BOX_WORK.get()(work)
        return (given[0], boxed) if has_outputs else boxed

    hide_from_compilers(kernel)
    return kernel


def _options(kind: Any, values: dict[str, Any]) -> Sequence[Any]:
    """Return the options that the arguments of an operator state, in a list; an empty one for a method without."""
    if kind is None:
        return ()
    options = kind()
    for label, attribute in _ATTRIBUTES.items():
        value = values.get(label)
        if label == "reduceop" and value is not None:
            # A text in calls of ours, whose operands have been multiplied if it is PREMUL_SUM.
            name = value.removeprefix("premul_").upper() if isinstance(value, str) else value.op()
            value = getattr(ReduceOp, name) if isinstance(name, str) else ReduceOp(ReduceOp.RedOpType(name))
        elif label == "timeout":
            value = timedelta(milliseconds=value) if value is not None and value > 0 else None
        if value is not None:
            setattr(options, attribute, value)
    return (options,)


def _method(group: Any, name: str) -> Any:
    """Return the method of a group that has a name in torch 2.13; groups of an older torch have an older name."""
    return getattr(group, name, None) or getattr(group, _OLDER[name])


def _gather_into(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    """Run ``all_gather_into_tensor_out``."""
    group = torch_private.RESOLVE_NAME.get()(group_name)
    torch_private.REGISTER_WORK.get()(out, _method(group, "all_gather_single")(out, input))
    return out


def _messages(
    ops: list[str], peers: list[int], tags: list[int], tensors: list[Tensor], group_name: str
) -> list[Tensor]:
    """Run ``batch_p2p_ops``. The result of a send is an empty tensor, for which the program waits."""
    group = torch_private.RESOLVE_NAME.get()(group_name)
    results = [tensor if op == "irecv" else tensor.new_empty(0) for op, tensor in zip(ops, tensors, strict=True)]
    with group.backend.coalescing() if METHODS["send"].is_of(group) else nullcontext():
        works = [
            (group.recv if op == "irecv" else group.send)([tensor], peer, tag)
            for op, tensor, peer, tag in zip(ops, tensors, peers, tags, strict=True)
        ]
    for result, work in zip(results, works, strict=True):
        torch_private.REGISTER_WORK.get()(result, work)
    return results


def _keys_of_build() -> list[str]:
    """Return the dispatch key of the accelerator that this build of torch has, in a list."""
    device = torch.accelerator.current_accelerator()
    return [] if device is None else [torch_private.KEY_OF_DEVICE.get()(device.type)]


def _register_functional() -> Library:
    library = Library("_c10d_functional", "IMPL")
    for name, kernel in {"all_gather_into_tensor_out": _gather_into, "batch_p2p_ops": _messages}.items():
        if hasattr(torch_private.FUNCTIONAL.get(), name):
            # The accelerator that this build of torch has, and one that a package may register later.
            for key in dict.fromkeys(("CPU", "PrivateUse1", *_keys_of_build())):
                library.impl(name, kernel, key)
    return library


_functional = _register_functional()
