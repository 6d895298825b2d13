"""DistributedDataParallel: the module that a user wraps around a model.

Forward is the model's own; before it buffers are synchronized, after it the reducer is prepared. `reducer` handles
backward, `construction` and `exchange` check arguments, `synchronization` keeps replicas equal. The methods under
"torch's private names" exist because frameworks call them on torch's class. Do not add gradient handling here.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, builtin_hook
from torchdist_ref.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _AllreduceUpcastHookState,
    _apply_optim_in_backward_hook,
    _hook_then_optimizer,
    _OptimizerHookState,
    _reducer_allreduce_and_upcast_hook,
)
from torchdist_ref.algorithms.join import FunctionJoinHook, Join, Joinable, JoinHook
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, explain
from torchdist_ref.parallel import bucketing, construction, logging_data, synchronization
from torchdist_ref.parallel.exchange import HookExchange, check_hook
from torchdist_ref.parallel.modes import DelayedParameters, LowPrecision, MixedPrecision, take_over_optimizers
from torchdist_ref.parallel.reducer import Reducer
from torchdist_ref.parallel.synchronization import BufferHook, ModuleStates, _BufferCommHookLocation

logger = logging.getLogger("torchdist_ref.parallel")

__all__ = ["DistributedDataParallel"]

P = ParamSpec("P")
R = TypeVar("R")

# Name that programs look for in torch's module.
_MixedPrecision = MixedPrecision


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude ``function``, and the functions that it calls, from ``torch.compile``.

    ``torch.compiler.disable`` does that too, but imports the compiler when it decorates, which takes seconds.
    """
    disabled: list[Any] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # While another thread is importing the compiler, the module exists but has no `disable` yet. Nothing is
        # compiled in that state, so the plain function runs.
        disable = None if disabled else getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is not None:
            disabled.append(disable(function))
        result: R = (disabled[0] if disabled else function)(*args, **kwargs)
        return result

    vars(call)["_torchdynamo_disable"] = True
    return call


class DistributedDataParallel(nn.Module, Joinable):
    """A module whose gradients are averaged over the ranks of a group while backward runs.

    Every rank builds the same module and wraps it; at construction all ranks receive rank 0's parameters and buffers.
    After each backward pass every rank's ``.grad`` holds the average of all ranks' gradients, so equal optimizers keep
    the replicas equal. Gradients are communicated in buckets. A bucket is launched as soon as it is full, so that most
    of the communication overlaps with backward (S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data
    Parallel Training*, VLDB 2020). `NaiveDataParallel` does the same in 20 lines, without buckets and overlap.

    Args:
        module: The model of this rank; the same on every rank.
        device_ids: For a module on one accelerator: a list with this device; inputs are moved to it. Otherwise None.
        output_device: Device of the outputs; only with ``device_ids``. Default: ``device_ids[0]``.
        dim: Dimension over which inputs were divided; kept for compatibility. Default 0.
        broadcast_buffers: Whether buffers (running statistics, say) are received from rank 0 at construction and before
            each forward pass. Default None, which means True.
        init_sync: Whether ranks check and broadcast parameters at construction. Default True.
        process_group: The group. Default None: the default group.
        bucket_cap_mb: Size in MiB at which a bucket is closed. Default None: 25, and 1 for the first bucket.
        find_unused_parameters: Search, after each forward pass, for parameters on which the outputs do not depend, and
            do not wait for their gradients. Costs a walk through the graph. Default False.
        check_reduction: Without effect; kept for compatibility.
        gradient_as_bucket_view: Let ``.grad`` be views of the buckets, which saves a copy and memory. Default False.
        static_graph: Promise that every iteration runs the same graph. The first iteration records it, so that unused
            parameters and parameters used several times (activation checkpointing) work. Default False.
        delay_all_reduce_named_params: Names and parameters whose gradients are averaged together, in one tensor of
            their own that no hook receives, when the gradient of ``param_to_hook_all_reduce`` is ready.
        param_to_hook_all_reduce: A parameter whose gradient is computed after those of the delayed parameters.
        mixed_precision: A `MixedPrecision` (or torch's): dtypes of parameters in forward and backward, of gradients in
            communication, and of buffers. In between, parameters and gradients are in full precision.
        device_mesh: A one-dimensional mesh whose group is used, in place of ``process_group``.
        skip_all_reduce_unused_params: With ``find_unused_parameters``, do not communicate buckets without a used
            parameter. Every rank has to leave the same parameters unused. Default False.
        bucket_cap_mb_list: Sizes in MiB of the first bucket, the second, and so on; the last one applies to all others.
        batched_grad_copy: Without effect: gradients are copied while they are in the cache.
        forward_sync_buffers: Like ``broadcast_buffers``, for forward passes only: construction always sends buffers.
        lazy_bucket_allocation: Allocate each bucket with its first gradient and free it at the end of backward, so
            that buckets and activations share memory. Since torch 2.15. Default False.

    Raises:
        MismatchError: Ranks hold different parameters; the message names them and the ranks.
        ArgumentError: An argument does not fit the module.

    Example:
        Two ranks, different inputs, one average:

        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        ...     model(torch.tensor([[1.0, 10.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.tolist()
        >>> run(program, 2)
        [[[1.0, 5.0]], [[1.0, 5.0]]]
    """

    is_multi_device_module = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._divide_by_initial_world_size = True
        delayed = construction.delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = construction.choose_group(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        own = construction.entries(module, self.parameters_to_ignore)
        self.parameters_to_ignore.update(name for name, _ in delayed)
        self._entries = construction.entries(module, self.parameters_to_ignore)
        construction.check_parameters(module, own)
        self.device_ids = construction.check_devices(self._entries, device_ids, output_device)
        self.output_device = self.device_ids[0] if self.device_ids and output_device is None else output_device
        self.device = own[0].parameter.device
        construction.check_batch_norm(module, self.device)
        self.module = module
        self.dim = dim
        wanted = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = wanted is not False
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._finalizes_manually = False
        self._hook_name: str | None = None
        self._buffer_hook: BufferHook | None = None
        self._options = bucketing.ReducerOptions(
            bucketing.bucket_caps(bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters and not static_graph),
            find_unused_parameters,
            gradient_as_bucket_view,
            static_graph,
            skip_all_reduce_unused_params,
            lazy_bucket_allocation,
        )
        if init_sync:
            self._synchronize(self.broadcast_buffers or forward_sync_buffers is not None)
        self._delayed: DelayedParameters | None = None
        if delayed:
            synchronization.broadcast_tensors([parameter for _, parameter in delayed], self.process_group)
            self._delayed = DelayedParameters(delayed, param_to_hook_all_reduce, self.process_group)
        self._logs = groups.get_debug_level() != groups.DebugLevel.OFF
        self._build()
        if self._logs:
            logger.info("DistributedDataParallel: constructed: %s", logging_data.as_text(self._get_ddp_logging_data()))

    def _synchronize(self, with_buffers: bool) -> None:
        """Check that all ranks hold the same kinds of parameters, then receive rank 0's values."""
        kinds = [(e.parameter, e.name, e.sparse) for e in self._entries]
        parameters, names, sparse = zip(*kinds, strict=True) if kinds else ((), (), ())
        synchronization.verify(parameters, names, sparse, self.process_group, self.device)
        ModuleStates(self.module, self.parameters_to_ignore, self.process_group).broadcast(with_buffers)

    def _build(self) -> None:
        self.states = ModuleStates(self.module, self.parameters_to_ignore, self.process_group)
        statistics = logging_data.RuntimeStatistics()
        statistics.logs = self._logs
        self.reducer = Reducer(self._entries, self.process_group, self._options, statistics)
        self.reducer.finalizes_manually = self._finalizes_manually
        self._before_first_forward = True
        if self.mixed_precision is not None:
            self.reducer.precision = LowPrecision(self.module, self.mixed_precision, self.parameters_to_ignore)
            self.register_comm_hook(_AllreduceUpcastHookState(weakref.ref(self)), _reducer_allreduce_and_upcast_hook)

    # ---- one iteration

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and prepare for the averaging of gradients by the next backward pass."""
        inputs, kwargs = self._before_module(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._after_module(output)
        return output

    @_untraced
    def _before_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare the reducer, the buffers and the inputs before the forward pass of the module."""
        if self._before_first_forward:
            self._before_first_forward = False
            if take_over_optimizers(entry.parameter for entry in self._entries):
                self.register_comm_hook(weakref.ref(self), _apply_optim_in_backward_hook(self.gradient_as_bucket_view))
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.begin_iteration()
        joining = self._join_config.enable
        if joining:
            self._count_working_ranks()
        if torch.is_grad_enabled():
            self.reducer.new_forward()
            self.reducer.rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if joining:
            # Ranks without inputs learn whether this iteration's backward will communicate.
            synchronization.any_rank(self.require_backward_grad_sync, self.process_group, self.device)
        if self.device_ids is not None:
            inputs, kwargs = self._on_device((inputs, kwargs), self.device_ids[0])
        precision = self.reducer.precision
        if precision is None:
            return inputs, kwargs
        if precision.lower():
            self.reducer.register_autograd_hooks()
        return precision.cast(inputs), precision.cast(kwargs)

    def _on_device(self, value: Any, device_id: int) -> Any:
        """Return nested inputs with every tensor on a device of the parameters' type."""
        device = torch.device(self.device.type, device_id)
        return construction.mapped(value, lambda tensor: tensor.to(device, non_blocking=True))

    @_untraced
    def _after_module(self, output: Any) -> None:
        """Prepare the reducer for the backward pass of this output."""
        if self._buffer_hook is not None and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward(output)
        else:
            self.require_forward_param_sync = False
        if self.reducer.precision is not None and not torch.is_grad_enabled():
            self.reducer.precision.restore()
        if self._delayed is not None:
            self._delayed.point_gradients()

    # ---- methods that torch has kept from versions in which one process used several devices

    def to_kwargs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_id: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Move the arguments of a forward pass to a device.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments, or None.
            device_id: Index of a device of the type of the parameters' device.

        Returns:
            A tuple of the moved positional arguments as its only entry, and one of the moved keyword arguments. Both
            tuples are empty if there are no arguments.
        """
        if not inputs and not kwargs:
            return (), ()
        moved = self._on_device((inputs or (), kwargs or {}), device_id)
        return (moved[0],), (moved[1],)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[int | torch.device]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Divide the arguments of a forward pass over accelerators of this process, along `dim`; others are repeated.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments, or None.
            device_ids: Accelerators; tensors cannot be divided over CPUs.

        Returns:
            The positional arguments of each device, and the keyword arguments of each device.
        """
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:
        """Join the outputs of several accelerators of this process on one device, along `dim`.

        Args:
            outputs: Outputs of one structure, one for each device; tensors are on accelerators.
            output_device: Device of the result.
        """
        return gather(outputs, output_device, dim=self.dim)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: forward passes inside do not lead to communication.

        The first forward and backward pass after it averages all that was accumulated. A forward pass and its backward
        pass must both be inside.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            ...     x = torch.tensor([[1.0 + rank]])
            ...     with model.no_sync():
            ...         model(x).sum().backward()
            ...     alone = model.module.weight.grad.item()
            ...     model(x).sum().backward()
            ...     return alone, model.module.weight.grad.item()
            >>> run(program, 2)
            [(1.0, 3.0), (2.0, 3.0)]
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- the end of backward

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the program ends each backward pass by `finalize_backward`. Since torch 2.15. Default False.

        Gradients are then communicated as before, but nothing waits for them until the call: work that follows backward
        overlaps with their communication. Set it before a forward pass.

        Raises:
            DistError: Set between a forward pass and the end of its backward pass, or all parameters are delayed ones.
        """
        return self._finalizes_manually

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        rank = groups.get_rank(self.process_group)
        if required and self._delayed is not None and not self._entries:
            raise DistError(
                "DistributedDataParallel: Manual backward finalization is not supported when all DDP parameters use "
                f"delay_all_reduce_named_params (on rank {rank}). Leave one parameter out of them."
            )
        if self.reducer.expects_backward:
            raise DistError(
                "DistributedDataParallel: require_manual_backward_finalization cannot be set after forward while a "
                f"backward pass is expected or in progress (on rank {rank}). Set it before forward, or after backward "
                "finalization."
            )
        self._finalizes_manually = self.reducer.finalizes_manually = bool(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` may be called only after backward has returned. Valid after a forward pass.

        True until buckets are in the order of gradients, with mixed precision, and with ``find_unused_parameters``,
        which finds out only at the end of backward which gradients arrive. Otherwise a hook may call it during
        backward, once all gradients are ready. False without `require_manual_backward_finalization`. Since
        torch 2.15.
        """
        return self._finalizes_manually and self.reducer.is_known_at_end_only

    def finalize_backward(self) -> None:
        """Wait for the gradients in communication, and write them to the parameters' ``.grad``. Since torch 2.15.

        Call it once for each backward pass that communicates, if `require_manual_backward_finalization` is set.

        Raises:
            DistError: Manual finalization was not required, there is nothing to finalize, or gradients are pending.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            ...     model.require_manual_backward_finalization = True
            ...     model(torch.tensor([[1.0 + rank]])).sum().backward()
            ...     model.finalize_backward()
            ...     return model.module.weight.grad.item()
            >>> run(program, 2)
            [1.5, 1.5]
        """
        self.reducer.finalize_manually()

    # ---- hooks

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` exchange each bucket of gradients, in place of the average.

        Args:
            state: First argument of the hook; many hooks expect the process group here, or None.
            hook: ``hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]``. Called when a bucket is
                full. The Future's tensor has as many elements as ``bucket.buffer()`` and becomes the gradients
                unchanged, so a hook that sums must also divide.

        Raises:
            ArgumentTypeError: The hook cannot be called with two arguments.
            ArgumentError: Its annotations contradict its use.
            DistError: There is a hook already.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def keep_local(state, bucket):
            ...     future = torch.futures.Future()
            ...     future.set_result(bucket.buffer())
            ...     return future
            >>> def program(rank):
            ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            ...     model.register_comm_hook(None, keep_local)
            ...     model(torch.tensor([[1.0 + rank]])).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> run(program, 2)
            [1.0, 2.0]
        """
        check_hook(hook, self._hook_name, groups.get_rank(self.process_group))
        exchange = HookExchange(hook, state, self.process_group, fold=not self._options.skip_unused)
        self.reducer.use(exchange)
        self._hook_name = exchange.name

    # ---- uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context for a training loop in which ranks have different numbers of inputs; see `Join`.

        Args:
            divide_by_initial_world_size: Divide by the number of all ranks to the end, so that every input weighs the
                same; False divides by the number of ranks that still have inputs. Default True.
            enable: False makes the context do nothing. Default True.
            throw_on_early_termination: Raise on all ranks when one has no more inputs. Default False.

        Returns:
            The context manager.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            ...     with model.join():
            ...         for _ in range(1 + rank):
            ...             model.zero_grad()
            ...             model(torch.tensor([[4.0]])).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> run(program, 2)[1]
            2.0
        """
        divide = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook of a rank without inputs; takes ``divide_by_initial_world_size``."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return FunctionJoinHook(self._match_iteration, self._broadcast_final_states)

    @property
    def join_device(self) -> torch.device:
        """Device of the parameters."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Group over which gradients are averaged."""
        return self.process_group

    def _count_working_ranks(self) -> None:
        """Notify ranks without inputs that this rank has one, and learn how many ranks have."""
        work = Join.notify_join_context(self)
        if work is not None and not self._divide_by_initial_world_size:
            self.reducer.divisor.change(float(work.result()[0]))

    def _match_iteration(self) -> None:
        """Make the collectives of one iteration, in the order of `forward` and the reducer, contributing zeros."""
        self.reducer.rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers(working=False)
        communicate = synchronization.any_rank(False, self.process_group, self.device)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers(working=False)
        self.require_forward_param_sync = communicate
        if communicate:
            self.reducer.participate_with_zeros()

    def _broadcast_final_states(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that worked to the end to all ranks."""
        self.reducer.divisor.change(groups.get_world_size(self.process_group))
        root = synchronization.highest_rank(is_last_joiner, self.process_group, self.device)
        self.states.broadcast(self.broadcast_buffers, root)

    # ---- copies

    NOT_SAVED = ("process_group", "reducer", "states", "_buffer_hook", "_entries", "_delayed")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without groups, buckets and hooks, which belong to this process."""
        state = {key: value for key, value in self.__dict__.items() if key not in self.NOT_SAVED}
        return state | {"_delayed": self._delayed and self._delayed.chosen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy on the default group, without communication."""
        chosen = state["_delayed"]
        # Pickles of earlier releases lack the first two.
        earlier = {"_finalizes_manually": False, "_logs": False}
        nn.Module.__setstate__(self, earlier | state | {"_delayed": None})
        self._options = bucketing.completed(self._options)
        self.process_group = construction.choose_group(None, None)
        self._entries = construction.entries(self.module, self.parameters_to_ignore)
        self._hook_name = self._buffer_hook = None
        if chosen is not None:
            named, trigger = chosen
            self._delayed = DelayedParameters(named, trigger, self.process_group)
        self._build()

    # ---- torch's private names: buffers

    def will_sync_module_buffers(self) -> bool:
        """Return whether this iteration synchronizes buffers: by the buffer hook, else from rank 0."""
        wanted = self.require_forward_param_sync and self.broadcast_buffers
        return wanted and next(self.module.buffers(), None) is not None

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """Let ``hook`` synchronize buffers, in place of rank 0's before each forward pass.

        Args:
            state: First argument of the hook.
            hook: ``hook(state, buffers: dict[str, Tensor])``. May change the buffers, and return None, or a list of
                Futures, which are waited for at the end of the backward pass.
            comm_hook_location: Whether it is called before or after forward; a member of `_BufferCommHookLocation`,
                ours or torch's. Default: after.

        Raises:
            ArgumentTypeError: The hook cannot be called, or the location is none.
        """
        self._buffer_hook = BufferHook(hook, state, comm_hook_location, self.process_group)
        self.reducer.at_the_end = self._buffer_hook.wait

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Return whether buffers are synchronized before the forward pass."""
        hook = self._buffer_hook
        return self.will_sync_module_buffers() and (hook is None or not hook.after_forward)

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Return whether a hook synchronizes buffers after the forward pass."""
        hook = self._buffer_hook
        return self.will_sync_module_buffers() and hook is not None and hook.after_forward

    def _sync_buffers(self, working: bool = True) -> None:
        """Synchronize buffers now. In `join`, the source is a rank that has inputs (``working``)."""
        joining = self._join_config.enable
        root = synchronization.highest_rank(working, self.process_group, self.device) if joining else 0
        if self._buffer_hook is None:
            self.states.broadcast_buffers(root)
        else:
            self._buffer_hook.launch(self.states.buffers())

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Copy one rank's tensors, by default all buffers, to all ranks; buffer hooks call it."""
        chosen = list(self.states.buffers().values()) if bufs is None else bufs
        synchronization.broadcast_tensors(chosen, self.process_group, authoritative_rank)

    # ---- torch's private names: options, hooks and statistics

    def _set_static_graph(self) -> None:
        """Set ``static_graph=True``, before the first iteration.

        Raises:
            DistError: There were iterations already.
        """
        if self.static_graph:
            return
        if not self._before_first_forward:
            raise DistError(
                "DistributedDataParallel._set_static_graph: there was a forward pass already "
                f"(on rank {groups.get_rank(self.process_group)}). Call it before, or pass static_graph=True."
            )
        self.static_graph = True
        self._options = replace(self._options, static_graph=True)
        self._rebuild_reducer()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continue in another group, larger or smaller, over which gradients and buffers are exchanged from now on.

        Buckets are built anew. Hooks keep their state: the caller has to replace a group in it. Ranks that are not in
        the new group keep the old one.
        """
        if groups.get_rank(new_process_group) < 0:
            return
        self.process_group = new_process_group
        self.states = ModuleStates(self.module, self.parameters_to_ignore, new_process_group)
        if self._delayed is not None:
            self._delayed.change_group(new_process_group)
        if self._buffer_hook is not None:
            self._buffer_hook.group = new_process_group
        self._rebuild_reducer()

    def _rebuild_reducer(self) -> None:
        """Replace the reducer by one of the current group and options, with the registered hooks."""
        before = self.reducer
        self.reducer = Reducer(self._entries, self.process_group, self._options, before.statistics)
        self.reducer.precision, self.reducer.at_the_end = before.precision, before.at_the_end
        self.reducer.finalizes_manually = before.finalizes_manually
        former = before.exchange
        if isinstance(former, HookExchange):
            fold = not self._options.skip_unused
            self.reducer.use(HookExchange(former.hook, former.state, self.process_group, fold))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register a hook that torch has in C++, by a member of `BuiltinCommHookType`."""
        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))
        self._hook_name = str(comm_hook_type)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters of a module, or names and parameters, without those that DDP ignores."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers of these names to each rank, when ``module`` is wrapped later."""
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(explain("DistributedDataParallel", "module", "an nn.Module", module))
        if isinstance(params_and_buffers_to_ignore, str) or not isinstance(params_and_buffers_to_ignore, Iterable):
            argument, expected = "params_and_buffers_to_ignore", "a list of names"
            raise ArgumentTypeError(
                explain("DistributedDataParallel", argument, expected, params_and_buffers_to_ignore)
            )
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]  # noqa: SLF001 (torch's name)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                vars(tensor)["_ddp_ignored"] = True

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Average gradients, and let an optimizer of this class step on each bucket inside backward."""
        from torch.distributed.optim.utils import as_functional_optim

        state = _OptimizerHookState(as_functional_optim(optim, *args, **kwargs), optim_params)
        self.register_comm_hook(self.process_group, _hook_then_optimizer(allreduce_hook, state))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return how this DDP was constructed, its buckets, and times of the last sampled iteration, as torch does."""
        return {
            **logging_data.construction_data(self),
            **logging_data.runtime_data(self.reducer),
            **({"comm_hook": self._hook_name} if self._hook_name else {}),
            **({"static_graph": 1} if self.static_graph else {}),
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure the times of every iteration whose number divides by the rate, and of the first ten.

        Raises:
            ArgumentError: A rate below 1.
        """
        if not isinstance(sample_rate, int) or sample_rate < 1:
            expected = "equal or greater than 1"
            raise ArgumentError(explain("DistributedDataParallel", "sample_rate", expected, sample_rate))
        self.reducer.statistics.sample_rate = sample_rate

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are final. Hooks of torch's read it."""
        return self.reducer.rebuilt or (self.find_unused_parameters and not self.static_graph)

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes at which all buckets are closed but those that have limits of their own."""
        return self._options.caps.rebuilt[-1]

    @property
    def device_type(self) -> str:
        """Kind of device that the parameters are on."""
        return self.device.type

    @property
    def forward_sync_buffers(self) -> bool:
        """`broadcast_buffers`, by its newer name."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, wanted: bool) -> None:
        self.broadcast_buffers = wanted
