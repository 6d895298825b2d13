"""Process groups of torch's type: each method translates one call of torch's into one of ours.

torch's DDP, DTensor, FSDP2, functional collectives and compiled functions call these methods, from Python and from
C++, under torch's names (those of 2.13; older names are aliases). A method checks that the tensors fit, reads every
field of torch's options, and calls `Backend.submit`. An option that no backend of ours supports is an error: a silently
different reduction gives gradients that look right and are not.

`CallsFromTorch` is the base class of this library's groups, so torch accepts them as its own. `RefProcessGroup` is the
group that torch makes for ``torch.distributed.init_process_group("ref")``; `creation` creates it.

C++ keeps no reference to these objects: torch's table of groups keeps the group. Callers keep their Works, or the group
does (`HandedWork`).
Registration with torch is in `backends`. Do not add collectives: this module only translates.
"""

# torch's stubs leave out some of its names, and give each collective several signatures.
# mypy: disable-error-code="attr-defined, override, assignment"

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import (
    Backend,
    InheritedBackend,
    MissingBackend,
    UnusableBackend,
    close_all,
    never_release,
)
from torchdist_ref.backends.operands import (
    Request,
    RowBlocks,
    are_apart,
    check_distinct_outputs,
    check_writable,
    flat_operands,
    refuse_unsupported,
    without_overlap,
)
from torchdist_ref.backends.reductions import divide, start_sum
from torchdist_ref.backends.reductions import reduction as combination
from torchdist_ref.backends.ref_in_torch.dispatcher import dispatch_call
from torchdist_ref.backends.ref_in_torch.method_forms import (
    Operand,
    both_forms,
    check_type,
    device_type,
    seconds_of_timeout,
)
from torchdist_ref.backends.ref_in_torch.work import (
    HandedWork,
    RefWork,
    check_alike,
    check_some,
    completed_work,
    hide_from_compilers,
    keep_flight_recorder_off,
    limit,
    only,
    reduction,
    refuse,
    require_dense,
    with_local_step,
)
from torchdist_ref.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
    checked_tag,
)
from torchdist_ref.debug.flight_recorder import answer_requests
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    PicklingError,
    UnsupportedError,
    adopt_torch,
    explain,
    message_of,
    on_rank,
)
from torchdist_ref.processes.living_objects import LivingObjects
from torchdist_ref.stores.sealed import may_unpickle
from torchdist_ref.torch_internals import torch_private

if TYPE_CHECKING:
    from torchdist_ref.backends.hooked import HookedBackend, PostHookArgs, PreHookArgs
    from torchdist_ref.backends.ref import Ref
    from torchdist_ref.recorder import Recorder, StoreCalls
    from torchdist_ref.stores import Store

Tensors = Sequence[Tensor]
Lists = Sequence[Sequence[Tensor]]
_TENSORS = Operand("tensors tensor", 1, single=True)
_TAG = Operand("tag")
_DROPPED_WORKS, _SMALL_BYTES = 64, 4096
"""Works that a group keeps for C++ (see `HandedWork`), and the largest size of the tensors of one: they stay in memory.
In `join`, where C++ needs that, there is one for each model that a step trains, of one number."""
_ALIKE, _ONE_OUTPUT = "requires input/output tensor lists to have the same length", "only supports 1 output"
# torch's phrases for a list with another number of tensors than ranks.
_WRONG_COUNTS = {
    ("all_gather", "outputs"): "invalid output tensor list at index 0 (expected length {size}, got {got})",
    ("gather", "output_lists"): "Incorrect output list size {got}. Output list size should be {size}",
    ("scatter", "input_lists"): "Incorrect input list size {got}. Input list size should be {size}",
    ("all_to_all", "inputs"): "input tensor list size {got} does not match world size {size}",
    ("all_to_all", "outputs"): "output tensor list size {got} does not match world size {size}",
}
adopt_torch()


def _check_absent(op: str, argument: str, lists: Lists, phrase: str) -> None:
    """Raise MethodArgumentError if a rank other than the root passes the root's operands."""
    if lists:
        refuse(op, argument, "an empty list on ranks other than the root", len(lists), phrase)


def _in_place(call: Call, tensor: Tensor) -> Request:
    """Return the request of a call whose one tensor is its input and its output."""
    operand = (tensor,)
    return call, operand, operand


def _is_apart(requests: Sequence[Request]) -> bool:
    """Return whether a request is the only one and no output of it shares memory with another tensor, at little cost.

    False where only `without_overlap` can tell.
    """
    if len(requests) > 1:
        return False
    _, inputs, outputs = requests[0]
    return not inputs or not outputs or inputs is outputs or are_apart(inputs, outputs)


def _is_small(requests: Sequence[Request]) -> bool:
    """Return whether the tensors of some requests have few bytes together."""
    operands = (each for _, inputs, outputs in requests for each in (*flat_operands(inputs), *flat_operands(outputs)))
    return sum(tensor.nbytes for tensor in operands) <= _SMALL_BYTES


class CallsFromTorch(c10d.ProcessGroup):
    """Process group of torch's type whose calls run on a backend of ours.

    In a forked child of its process, it answers questions as before, and every call raises.

    Args:
        rank: Group rank of this rank.
        size: Number of ranks.

    Attributes:
        backend: The backend that runs the calls; a `MissingBackend` until the group's maker sets it.
        members: The global rank of every member, in group order.
        store: Store with a key prefix that only this group uses, whose values are sealed.
    """

    backend: Backend = MissingBackend()
    members: tuple[int, ...]
    store: Store
    _name = _description = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Exclude the methods of a subclass from torch's compiler too."""
        super().__init_subclass__(**kwargs)
        hide_from_compilers(cls)

    @cached_property
    def _dropped(self) -> deque[RefWork]:
        """The last Works of the group's callers in C++."""
        return deque(maxlen=_DROPPED_WORKS)

    @property
    def recorder(self) -> Recorder:
        """The last calls of this group on this rank."""
        return self.backend.recorder

    @property
    def pickles_objects(self) -> bool:
        """Whether ranks may unpickle what others send; else they exchange plain data."""
        return self.size() == 1 or may_unpickle(self.store)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied: a group consists of this process's connections and threads.

        Raises:
            PicklingError: Always.
        """
        raise PicklingError(
            f"cannot pickle {type(self).__name__!r} object: group {self._shown_name!r} works in its own process only"
            f"{on_rank()}. Send its ranks, from get_process_group_ranks, and create the group with new_group in the "
            f"other process."
        )

    @property
    def _shown_name(self) -> str:
        """The name for messages: torch describes a group without a description as "undefined"."""
        return self._name if self._description in ("", "undefined") else self._description

    # Facts that torch asks a group for. C++ and Python use different names for the same fact.

    def name(self) -> str:
        """Return the name of the backend, as torch's method does; the group's name is `group_name`."""
        return str(self.backend.name)

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Return a name for C++, which takes a group named "gloo" or "nccl" for its own class."""
        return f"{self.backend.name} of torchdist_ref"

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the group's name.

        Raises:
            ArgumentTypeError: It is not text.
        """
        check_type("setGroupName", "name", name, str, "a str")
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the group's description.

        Raises:
            ArgumentTypeError: It is not text.
        """
        check_type("setGroupDesc", "description", description, str, "a str")
        self._description = description

    group_name = property(attrgetter("_name"), doc="Name of the group, unique among the groups of this process.")
    group_desc = property(attrgetter("_description"), doc="Description of the group: the name that its creator chose.")
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives of this group that have ended on this rank."""
        return 1 + max((record.sequence for record in self.recorder), default=-1)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers of calls start at 0 on every rank."""

    def _set_default_backend(self, backend_type: Any) -> None:
        """Set the type of the default backend, which C++ asks for.

        Raises:
            ArgumentTypeError: It is not a type of a backend.
        """
        kind = c10d.ProcessGroup.BackendType
        check_type("_set_default_backend", "backend_type", backend_type, kind, "a ProcessGroup.BackendType")
        super()._set_default_backend(backend_type)

    supports_splitting = supports_coalescing = property(lambda self: False)

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], Any]) -> None:
        """Have a function called on this rank before each call of the group. Since torch 2.15.

        Args:
            hook_id: Number under which to unregister it; a hook registered under it before is replaced.
            hook: ``hook(args)``, with a `torchdist_ref.backends.hooked.PreHookArgs`. Its exceptions are raised to the
                caller, and the call is not made: raise them on all ranks.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def refuse_nan(args):
            ...     if any(tensor.isnan().any() for tensor in args.input_tensors):
            ...         raise ValueError(f"not a number in {args.name.name}")
            >>> def program(rank):
            ...     dist.group.WORLD.register_pre_hook(1, refuse_nan)
            ...     try:
            ...         dist.all_reduce(torch.tensor([1.0, float("nan")]))
            ...     except ValueError as error:
            ...         return str(error)
            >>> run(program, 2)[0]
            'not a number in ALLREDUCE'
        """
        self._hooked("register_pre_hook").before[hook_id] = hook

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], Any]) -> None:
        """Have a function called on this rank after each call of the group has been started. Since torch 2.15.

        Args:
            hook_id: Number under which to unregister it; a hook registered under it before is replaced.
            hook: ``hook(args)``, with a `torchdist_ref.backends.hooked.PostHookArgs`.
        """
        self._hooked("register_post_hook").after[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Have the function of `register_pre_hook` called no more; an unknown number does nothing."""
        self._unhook("unregister_pre_hook", "before", hook_id)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Have the function of `register_post_hook` called no more; an unknown number does nothing."""
        self._unhook("unregister_post_hook", "after", hook_id)

    def _hooked(self, operation: str) -> HookedBackend:
        from torchdist_ref.backends.hooked import HookedBackend

        if isinstance(self.backend, UnusableBackend):
            self.backend.refuse(operation)
        if not isinstance(self.backend, HookedBackend):
            self.backend = HookedBackend(self.backend)
        return self.backend

    def _unhook(self, operation: str, kind: str, hook_id: int) -> None:
        hooked = self._hooked(operation)
        getattr(hooked, kind).pop(hook_id, None)
        if not (hooked.before or hooked.after):
            self.backend = hooked.wrapped

    # Experiments of torch 2.15 that no backend here has: torch's functions ask before they use them.
    supports_reconfigure = supports_window = supports_completion_hooks = property(lambda self: False)
    supports_abort_hooks = property(lambda self: False)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], Any]) -> NoReturn:
        """Raise UnsupportedError, as torch does on Gloo: calls of an aborted group raise a `GroupAbortedError`."""
        self._lacks("register_abort_hook", "the GroupAbortedError of a call")

    def unregister_abort_hook(self, hook_id: int) -> NoReturn:
        """Raise UnsupportedError."""
        self._lacks("unregister_abort_hook", "the GroupAbortedError of a call")

    def new_window(self, tensor: Tensor | None = None) -> NoReturn:
        """Raise UnsupportedError: no backend has one-sided windows."""
        self._lacks("new_window", "send and recv, or a collective")

    def get_reconfigure_handle(self) -> NoReturn:
        """Raise UnsupportedError: no backend can be reconfigured."""
        self._lacks("get_reconfigure_handle", "shrink_group, or new_group on the remaining ranks")

    def reconfigure(self, opts: Any) -> NoReturn:
        """Raise UnsupportedError: no backend can be reconfigured."""
        self._lacks("reconfigure", "shrink_group, or new_group on the remaining ranks")

    def _lacks(self, method: str, instead: str) -> NoReturn:
        raise UnsupportedError(
            f"ProcessGroup.{method}: backend {self.backend.name!r} does not support {method}{on_rank()}. Use {instead}."
        )

    def _backend_names(self) -> Mapping[str, str]:
        """Return the name of the backend for each device type; here one, for those that it takes."""
        return dict.fromkeys(self.backend.device_types, self.backend.name)

    _device_types = property(lambda self: [torch.device(kind) for kind in self._backend_names()])

    def _get_backend(self, device: torch.device) -> CallsFromTorch:
        """Return the backend of a device type, which is this group for those of its backends.

        Raises:
            ArgumentTypeError: It is not a device.
            UnsupportedError: The group has no backend for it.
        """
        if device_type("_get_backend", device) not in self._backend_names():
            raise UnsupportedError(
                f"No backend type associated with device type {device}: the group's backend is {self.backend.name!r}. "
                f"Name a backend for each device: init_process_group('cpu:gloo,cuda:nccl')."
            )
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of the calls that begin from now on, on every backend of the group.

        Args:
            timeout: The time-out, more than zero.

        Raises:
            ArgumentTypeError: Not a timedelta.
            BackendArgumentError: Not positive.
        """
        self.backend.set_timeout(seconds_of_timeout("set_timeout", timeout))

    def _check_tensors(self, call: Call, inputs: Tensors, outputs: Tensors) -> None:
        """Raise if the group does not support a tensor; by default the check is the backend's."""

    dispatch = dispatch_call

    def _submit(self, opts: Any, *requests: Request) -> RefWork:
        """Start the calls, and wait for them unless torch asked for an asynchronous call."""
        for call, inputs, outputs in requests:
            self._check_tensors(call, flat_operands(inputs), flat_operands(outputs))
        # The backend checks the first call before anything begins.
        for call, inputs, outputs in requests[1:] if self.backend.name != "fake" else ():
            refuse_unsupported(call, inputs, outputs, self.backend.name)
        seconds = limit(opts)
        wait = opts is not None and not opts.asyncOp and seconds is None
        written = [tensor for request in requests for tensor in flat_operands(request[2])]
        for tensor in written:
            if not tensor.is_contiguous():
                check_writable(requests[0][0].op, "output", tensor)
        apart, copy_back = (requests, None) if _is_apart(requests) else without_overlap(self.rank(), requests)
        if copy_back is not None:
            check_distinct_outputs(requests)
        works = [self.backend.submit(*request, wait) for request in apart]
        if copy_back is not None:
            RefWork(works, written, seconds).wait()
            copy_back()
            return completed_work(written)
        if opts is not None and opts.asyncOp and _is_small(requests):
            return HandedWork(works, written, seconds, self._dropped)
        work = completed_work(written) if wait else RefWork(works, written, seconds)
        if opts is not None and not opts.asyncOp:
            work.wait()
        return work

    def _sum_sparse(self, tensor: Tensor, seconds: float | None) -> RefWork:
        """Sum sparse tensors, and return a completed work."""
        works, add_up = start_sum(self.backend, self.size(), tensor)
        RefWork(works, [tensor], seconds).wait()
        add_up()
        return completed_work([tensor], "all_reduce")

    def _root(self, op: str, opts: Any, tensors: int = 1) -> int:
        """Return the root that options name, for a call of a number of tensors.

        Raises:
            MethodArgumentError: The root is not a group rank, or rootTensor is not the index of a tensor.
        """
        if not 0 <= opts.rootRank < self.size():
            expected = f"a group rank from 0 to {self.size() - 1}"
            refuse(op, "rootRank", expected, opts.rootRank, f"invalid root rank: {opts.rootRank}")
        entry = getattr(opts, "rootTensor", 0)
        if not 0 <= entry < tensors:
            refuse(op, "rootTensor", f"an index from 0 to {tensors - 1}", entry, f"invalid root tensor: {entry}")
        return int(opts.rootRank)

    def _row_blocks(self, op: str, argument: str, tensor: Tensor, phrase: str = "") -> Tensors:
        """Return a tensor as one equal block for each rank; a phrase is torch's for one that does not divide."""
        size = self.size()
        if tensor.numel() % size or not (tensor.is_contiguous() or tensor.shape[0] % size == 0):
            expected = f"a tensor that divides into {size} equal blocks, by its first dimension if it is not contiguous"
            if phrase:
                refuse(op, argument, expected, list(tensor.shape), phrase)
            raise ArgumentError(explain(op, argument, expected, list(tensor.shape), rank=self.rank()))
        return RowBlocks(tensor, size) if size > 1 else (tensor,)

    def _parts(self, op: str, argument: str, tensor: Tensor, sizes: Any) -> Tensors:
        """Return a tensor as one block for each rank: equal ones, or of these numbers of rows.

        Raises:
            MethodArgumentError: The numbers do not divide the tensor.
        """
        if sizes is None or (isinstance(sizes, Sequence) and not sizes):
            return self._row_blocks(op, argument, tensor, "Tensor's dim 0 does not divide equally across group size")
        argument = f"{argument}_split_sizes"
        if isinstance(sizes, Sequence) and len(sizes) != self.size():
            expected = f"a list of {self.size()} numbers, one for each rank"
            refuse(op, argument, expected, sizes, "Number of tensor splits not equal to group size")
        with suppress(TypeError, RuntimeError):
            blocks: Tensors = tensor.split(list(sizes))
            return blocks
        rows = tensor.shape[0] if tensor.dim() else 1
        expected = f"numbers that add up to the tensor's {rows} rows"
        refuse(op, argument, expected, sizes, "Split sizes doesn't match total dim 0 size")

    def _peer(self, op: str, argument: str, peer: int) -> int:
        """Return the other rank of a message.

        Raises:
            ArgumentTypeError: It is not an integer.
            ArgumentError: It is not a group rank.
        """
        expected = f"a group rank from 0 to {self.size() - 1}"
        try:
            peer = index(peer)
        except TypeError:
            raise ArgumentTypeError(explain(op, argument, f"an int, {expected}", peer, rank=self.rank())) from None
        if not 0 <= peer < self.size():
            raise ArgumentError(explain(op, argument, expected, peer, rank=self.rank()))
        return peer

    def _check_count(self, op: str, argument: str, blocks: Tensors) -> None:
        """Raise MethodArgumentError unless there is a block for each rank."""
        if len(blocks) != self.size():
            expected = f"a list of {self.size()} tensors, one for each rank"
            phrase = _WRONG_COUNTS.get((op, argument), "invalid input tensor list size, must be world size")
            refuse(op, argument, expected, len(blocks), phrase.format(got=len(blocks), size=self.size()))

    def _check_blocks(self, op: str, argument: str, blocks: Tensors, tensor: Tensor) -> None:
        """Raise MethodArgumentError unless there is a block for each rank, and this rank's has the tensor's size."""
        self._check_count(op, argument, blocks)
        whole = blocks.tensor if isinstance(blocks, RowBlocks) else blocks[self.rank()]
        mine = whole.numel() // (len(blocks) if isinstance(blocks, RowBlocks) else 1)
        if mine != tensor.numel():
            phrase = f"invalid tensor size at index 0 (expected {tensor.numel()}, got {mine} elements)"
            refuse(op, argument, f"{tensor.numel()} elements a rank", mine, phrase)
        if whole.dtype != tensor.dtype:
            expected = f"of one dtype, {tensor.dtype}: all tensors need one dtype"
            refuse(op, argument, expected, whole.dtype, "invalid tensor type at index 0")

    @both_forms(options.AllreduceOptions, "op timeout", _TENSORS)
    def allreduce(self, tensors: Tensors, opts: Any) -> RefWork:
        """Start torch's `allreduce`."""
        name = reduction("all_reduce", opts)
        if len(tensors) != 1:
            check_some("all_reduce", "tensors", tensors)
            return self._reduce_several(tensors, name, opts)
        tensor = tensors[0]
        if tensor.layout is torch.sparse_coo and name == "sum":
            return self._sum_sparse(tensor, limit(opts))
        return self._submit(opts, _in_place(AllReduce(name), tensor))

    def _reduce_several(self, tensors: Tensors, name: str, opts: Any) -> RefWork:
        """Reduce several tensors of each rank to one, and write it to all of them."""
        check_alike("all_reduce", "tensors", tensors[0], tensors[1:])
        first, *others = (tensor.detach() for tensor in tensors)
        reduction = combination("sum" if name == "avg" else name, first.dtype, "all_reduce")
        whole = first
        for other in others:
            whole = reduction.of_two(whole, other)

        def copy_back() -> None:
            result = divide(whole, len(tensors)) if name == "avg" else whole
            for tensor in (first, *others):
                tensor.copy_(result)

        return self._submit_one(opts, _in_place(AllReduce(name), whole), tensors, copy_back)

    def _submit_one(self, opts: Any, request: Request, outputs: Tensors, copy_back: Callable[[], None]) -> RefWork:
        """Start a call on behalf of several tensors of this rank, to which `copy_back` copies its result."""
        return with_local_step(self._submit(None, request), request[0].op, outputs, copy_back, opts)

    @both_forms(options.AllreduceCoalescedOptions, "op timeout", Operand("tensors", 1))
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> RefWork:
        """Start torch's `allreduce_coalesced`."""
        check_some("all_reduce_coalesced", "tensors", tensors)
        call = AllReduce(reduction("all_reduce_coalesced", opts))
        return self._submit(opts, *(_in_place(call, tensor) for tensor in tensors))

    @both_forms(options.ReduceOptions, "root op timeout", _TENSORS)
    def reduce(self, tensors: Tensors, opts: Any) -> RefWork:
        """Start torch's `reduce`."""
        tensor = only("reduce", "tensors", tensors)
        call = Reduce(self._root("reduce", opts), reduction("reduce", opts))
        return self._submit(opts, _in_place(call, tensor))

    @both_forms(options.BroadcastOptions, "root timeout", _TENSORS)
    def broadcast(self, tensors: Tensors, opts: Any) -> RefWork:
        """Start torch's `broadcast`."""
        check_some("broadcast", "tensors", tensors)
        call = Broadcast(self._root("broadcast", opts, len(tensors)))
        if len(tensors) == 1:
            return self._submit(opts, _in_place(call, tensors[0]))
        check_alike("broadcast", "tensors", tensors[0], tensors[1:])
        written = [tensor.detach() for tensor in tensors]
        entry = opts.rootTensor if call.root == self.rank() else 0
        source = written.pop(entry)

        def copy_back() -> None:
            for tensor in written:
                tensor.copy_(source)

        return self._submit_one(opts, _in_place(call, source), tensors, copy_back)

    @both_forms(
        options.AllgatherOptions,
        "timeout",
        Operand("output_tensors output_lists", 2, single=True),
        Operand("input_tensors input_tensor inputs", 1, single=True),
    )
    def allgather(self, output_lists: Lists, inputs: Tensors, opts: Any) -> RefWork:
        """Start torch's `allgather`."""
        check_some("all_gather", "inputs", inputs)
        if len(output_lists) != len(inputs):
            refuse(
                "all_gather",
                "output_lists",
                f"a list of {len(inputs)} lists, one for each input",
                len(output_lists),
                _ALIKE,
            )
        if len(inputs) == 1:
            return self._submit(opts, self._gather_request("all_gather", output_lists[0], inputs[0]))
        return self._gather_several(output_lists, inputs, opts)

    def _gather_several(self, output_lists: Lists, inputs: Tensors, opts: Any) -> RefWork:
        """Gather several tensors of each rank; tensor `j` of rank `k` is entry ``k * len(inputs) + j`` of each list."""
        op, first, total = "all_gather", inputs[0], len(inputs) * self.size()
        for number, outputs in enumerate(output_lists):
            if len(outputs) != total:
                phrase = f"invalid output tensor list at index {number} (expected length {total}, got {len(outputs)})"
                refuse(
                    op,
                    "output_lists",
                    f"a list of {total} tensors, one for each input of each rank",
                    len(outputs),
                    phrase,
                )
        check_alike(op, "inputs", first, inputs[1:], 1)
        for outputs in output_lists:
            check_alike(op, "output_lists", first, outputs)
        rows = torch.stack([tensor.detach() for tensor in inputs])
        gathered = rows.new_empty((self.size(), *rows.shape))

        def copy_back() -> None:
            for outputs in output_lists:
                for block, output in zip(gathered.flatten(0, 1), outputs, strict=True):
                    output.detach().copy_(block)

        request = AllGather(), (rows,), list(gathered)
        return self._submit_one(opts, request, [o for outputs in output_lists for o in outputs], copy_back)

    @both_forms(options.AllgatherOptions, "timeout", Operand("output_lists", 2), Operand("input_list inputs", 1))
    def allgather_coalesced(self, output_lists: Lists, inputs: Tensors, opts: Any) -> RefWork:
        """Start torch's `allgather_coalesced`."""
        requests = (
            self._gather_request("all_gather_coalesced", [outputs[i] for outputs in output_lists], tensor)
            for i, tensor in enumerate(inputs)
        )
        return self._submit(opts, *requests)

    @both_forms(options.AllgatherOptions, "timeout", Operand("output", 0), Operand("input", 0))
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> RefWork:
        """Start torch's `all_gather_single`."""
        op = "all_gather_single"
        return self._submit(opts, self._gather_request(op, self._row_blocks(op, "output", output), input))

    @both_forms(options.AllgatherOptions, "timeout", Operand("outputs", 1), Operand("inputs", 1))
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> RefWork:
        """Start torch's `all_gather_single_coalesced`."""
        op, pairs = "all_gather_single", zip(outputs, inputs, strict=True)
        return self._submit(opts, *(self._gather_request(op, self._row_blocks(op, "output", o), i) for o, i in pairs))

    @both_forms(
        options.GatherOptions,
        "root timeout",
        Operand("output_tensors output_lists", 2, single=True),
        Operand("input_tensors input_tensor inputs", 1, single=True),
    )
    def gather(self, output_lists: Lists, inputs: Tensors, opts: Any) -> RefWork:
        """Start torch's `gather`."""
        tensor = only("gather", "inputs", inputs, "requires a single-element input tensor list")
        call = Gather(self._root("gather", opts))
        phrase = f"requires a single-element output list containing a list with {self.size()} tensors"
        if call.root != self.rank():
            _check_absent("gather", "output_lists", output_lists, "requires empty output on non-root")
            return self._submit(opts, (call, (tensor,), ()))
        outputs = only("gather", "output_lists", output_lists, phrase)
        self._check_blocks("gather", "output_lists", outputs, tensor)
        return self._submit(opts, (call, (tensor,), outputs))

    @both_forms(options.GatherOptions, "root timeout", Operand("output", 0), Operand("input", 0))
    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> RefWork:
        """Start torch's `gather_single`; the output counts on the root only."""
        call = Gather(self._root("gather_single", opts))
        outputs = self._row_blocks("gather_single", "output", output) if call.root == self.rank() else ()
        if outputs:
            self._check_blocks("gather_single", "output", outputs, input)
        return self._submit(opts, (call, (input,), outputs))

    gather_into_tensor = gather_single

    @both_forms(
        options.ScatterOptions,
        "root timeout",
        Operand("output_tensors output_tensor outputs", 1, single=True),
        Operand("input_tensors input_lists", 2, single=True),
    )
    def scatter(self, outputs: Tensors, input_lists: Lists, opts: Any) -> RefWork:
        """Start torch's `scatter`."""
        tensor = only("scatter", "outputs", outputs, "requires a single-element output tensor list")
        call = Scatter(self._root("scatter", opts))
        phrase = f"requires a single-element input list containing a list with {self.size()} tensors"
        if call.root != self.rank():
            _check_absent("scatter", "input_lists", input_lists, "requires empty input on non-root")
            return self._submit(opts, (call, (), (tensor,)))
        inputs = only("scatter", "input_lists", input_lists, phrase)
        self._check_blocks("scatter", "input_lists", inputs, tensor)
        return self._submit(opts, (call, inputs, (tensor,)))

    @both_forms(
        options.ReduceScatterOptions,
        "op timeout",
        Operand("output_tensors output outputs", 1, single=True),
        Operand("input_tensors input input_lists", 2, single=True),
    )
    def reduce_scatter(self, outputs: Tensors, input_lists: Lists, opts: Any) -> RefWork:
        """Start torch's `reduce_scatter`."""
        op = "reduce_scatter"
        tensor, inputs = only(op, "outputs", outputs, _ONE_OUTPUT), only(op, "input_lists", input_lists, _ONE_OUTPUT)
        return self._submit(opts, self._scatter_request(op, tensor, inputs, opts))

    @both_forms(options.ReduceScatterOptions, "op timeout", Operand("output", 0), Operand("input", 0))
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> RefWork:
        """Start torch's `reduce_scatter_single`."""
        op = "reduce_scatter_single"
        return self._submit(opts, self._scatter_request(op, output, self._row_blocks(op, "input", input), opts))

    @both_forms(options.ReduceScatterOptions, "op timeout", Operand("outputs", 1), Operand("inputs", 1))
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> RefWork:
        """Start torch's `reduce_scatter_single_coalesced`."""
        op, pairs = "reduce_scatter_single", zip(outputs, inputs, strict=True)
        return self._submit(
            opts, *(self._scatter_request(op, o, self._row_blocks(op, "input", i), opts) for o, i in pairs)
        )

    @both_forms(
        options.AllToAllOptions, "timeout", Operand("output_tensors outputs", 1), Operand("input_tensors inputs", 1)
    )
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> RefWork:
        """Start torch's `alltoall`."""
        check_some("all_to_all", "inputs", inputs)
        self._check_count("all_to_all", "inputs", inputs)
        self._check_blocks("all_to_all", "outputs", outputs, inputs[self.rank()])
        self._check_blocks("all_to_all", "inputs", inputs, outputs[self.rank()])
        return self._exchange(opts, outputs, inputs)

    @both_forms(
        options.AllToAllOptions,
        "timeout",
        Operand("output outputTensor", 0),
        Operand("input inputTensor", 0),
        Operand("output_split_sizes outputSplitSizes output_splits"),
        Operand("input_split_sizes inputSplitSizes input_splits"),
    )
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> RefWork:
        """Start torch's `all_to_all_single`."""
        op = "all_to_all_single"
        outputs, inputs = (
            self._parts(op, "output", output, output_splits),
            self._parts(op, "input", input, input_splits),
        )
        work: RefWork = self.alltoall(outputs, inputs, opts)
        return work

    @both_forms(options.BarrierOptions, "timeout")
    def barrier(self, opts: Any) -> RefWork:
        """Start torch's `barrier`."""
        # The options' device is where NCCL would run the barrier; `ref` needs no device for it.
        return self._submit(opts, (Barrier(), (), ()))

    @both_forms(None, "", _TENSORS, Operand("dstRank dst"), _TAG)
    def send(self, tensors: Tensors, dst: int, tag: int) -> RefWork:
        """Start torch's `send`."""
        tensor = only("send", "tensors", tensors, "takes a single tensor")
        target = self._peer("send", "dst", dst)
        return self._submit(None, (Send(target, checked_tag("send", tag)), (tensor,), ()))

    @both_forms(None, "", _TENSORS, Operand("srcRank src"), _TAG)
    def recv(self, tensors: Tensors, src: int | None, tag: int) -> RefWork:
        """Start torch's `recv`."""
        tensor = only("recv", "tensors", tensors, "takes a single tensor")
        source = src if src is None else self._peer("recv", "src", src)
        return self._submit(None, (Recv(source, checked_tag("recv", tag)), (), (tensor,)))

    @both_forms(None, "", _TENSORS, _TAG)
    def recv_anysource(self, tensors: Tensors, tag: int) -> RefWork:
        """Start torch's `recv_anysource`."""
        work: RefWork = self.recv(tensors, None, tag)
        return work

    # The names of the same methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _gather_request(self, op: str, outputs: Tensors, tensor: Tensor) -> Request:
        """Return an all-gather, after checking the blocks."""
        self._check_blocks(op, "outputs", outputs, tensor)
        return AllGather(), (tensor,), outputs

    def _scatter_request(self, op: str, tensor: Tensor, inputs: Tensors, opts: Any) -> Request:
        """Return a reduce-scatter, after checking the blocks."""
        self._check_blocks(op, "inputs", inputs, tensor)
        return ReduceScatter(reduction(op, opts)), inputs, (tensor,)

    def _exchange(self, opts: Any, outputs: Tensors, inputs: Tensors) -> RefWork:
        """Start an all-to-all with blocks of any sizes, since other ranks' blocks may have other sizes."""
        return self._submit(opts, (AllToAll(uneven=True), list(inputs), list(outputs)))


with_backends: WeakSet[CallsFromTorch] = WeakSet()
"""The groups of this process on backends of ours."""


def _after_fork() -> None:
    for group in list(with_backends):
        backend = group.backend
        if not isinstance(backend, UnusableBackend):
            never_release([backend])
            rank = group.members[group.rank()]
            group.backend = InheritedBackend(backend.name, backend.recorder, group._shown_name, rank)  # noqa: SLF001 - its class


def refuse_in_forked_child(operation: str) -> None:
    """Raise if torch's default group is one of ours, and belongs to the process that forked this one.

    Raises:
        DestroyedGroupError: It does.
    """
    default: Any = c10d.group.WORLD
    for device in () if default is None else default._device_types:  # noqa: SLF001 - torch's
        backend = getattr(torch_private.BACKEND_OF_GROUP.of(default)(device), "backend", None)
        if isinstance(backend, InheritedBackend):
            backend.refuse(operation)


os.register_at_fork(after_in_child=_after_fork)


class RefProcessGroup(CallsFromTorch):
    """Process group that torch makes for the backend `ref`. Its calls are in the flight recorder, as our groups' are.

    Args:
        backend: The backend that runs the calls.
        members: The global rank of every member, in group order.
        store: Store of the group, whose values are sealed.
        store_calls: Record of the group's creation, which dumps hold as long as the group exists.

    Attributes:
        timeout: Time-out of a call in seconds.
        failure: First failure that this rank has met in any of these groups, as text; found when it leaves one.
    """

    failure = ""

    def __init__(self, backend: Ref, members: Sequence[int], store: Store, store_calls: StoreCalls) -> None:
        super().__init__(backend.link.rank, backend.link.size)  # type: ignore[call-arg]
        self.backend, self.store, self.store_calls = backend, store, store_calls
        self.members = tuple(members)
        self.timeout = backend.link.timeout
        backend.group = ref(self)
        with_backends.add(self)
        self._on_end = [answer_requests()]
        _joined.add(self)

    def _check_tensors(self, call: Call, inputs: Tensors, outputs: Tensors) -> None:
        """Raise unless the tensors are dense, and on a device with memory: torch's callers pass what they have."""
        require_dense(call, inputs, outputs)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "ref"

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank of the group has called this: torch's method, whose error names the missing ranks.

        Args:
            timeout: Longest wait for the other ranks. Default: the group's time-out.
            wait_all_ranks: Accepted for compatibility with torch: an error at the time-out names all missing ranks.
        """
        from torchdist_ref.debug.monitored import run_monitored_barrier
        from torchdist_ref.recorder import StoreCall

        operation, rank = "monitored_barrier", self.rank()
        with self.store_calls.recorded(
            StoreCall(operation, "", self.members), operation, self.members, rank, self.timeout
        ):
            run_monitored_barrier(
                self.store,
                rank,
                self.members,
                timeout or timedelta(seconds=self.timeout),
                self.group_desc,
                self.backend.failure,
            )

    def shutdown(self) -> None:
        """Leave the group in an orderly way. Members that miss this rank there read which failure it has met."""
        broken = next(filter(None, (group.backend.broken for group in _joined.all())), None)
        if broken is not None:
            # The group that has failed may be gone when this rank leaves the others.
            for group in _joined.all():
                group.failure = group.failure or message_of(broken)
        self._stop_answers()
        if self.failure:
            self.backend.explain_leave(self.failure)
        close_all([self.backend])

    def abort_with(self, error: BaseException) -> None:
        """See `GroupOwner.abort_with`."""
        self.backend.abort(f"its program ended with {message_of(error)}")

    def exit(self) -> None:
        """See `GroupOwner.exit`."""
        self.backend.announce_exit()
        self.shutdown()

    def abort(self) -> None:
        """End the group's calls at once. A rank that keeps the group may still create others with its members."""
        self._stop_answers()
        self.backend.abort("torch.distributed aborted the group")
        # torch drops a group that it has aborted, and calls nothing: the others would wait for this rank in new_group.
        finalize(self, self.backend.link.announce_close, os.getpid()).atexit = False

    def _stop_answers(self) -> None:
        """End the answers to requests for dumps on behalf of this group, once. It is left from now on."""
        _joined.discard(self)
        while self._on_end:
            self._on_end.pop()()


_joined: LivingObjects[RefProcessGroup] = LivingObjects()
"""The groups that this rank has not left. Once it has, `Backend.broken` says nothing of a failure."""
hide_from_compilers(CallsFromTorch)
keep_flight_recorder_off("ref")
