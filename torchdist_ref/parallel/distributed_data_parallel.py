"""DistributedDataParallel: the module that a user wraps around a model.

Forward is the model's own, with a little before it (`buffers` from rank 0) and after it (the reducer is
armed). Everything that happens during backward is in `reducer`; checks of arguments are in
`construction` and `registration`. This file only ties them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchdist_ref import groups
from torchdist_ref.parallel import agreement, bucketing, construction, joining, registration, variants
from torchdist_ref.parallel.buffers import BufferHook, SharedBuffers
from torchdist_ref.parallel.buffers import _BufferCommHookLocation as _BufferCommHookLocation
from torchdist_ref.parallel.compiling import untraced
from torchdist_ref.parallel.exchange import Hooked
from torchdist_ref.parallel.foreign_names import ForeignNames
from torchdist_ref.parallel.options import Options
from torchdist_ref.parallel.precision import MixedPrecision
from torchdist_ref.parallel.reducer import Reducer
from torchdist_ref.parallel.states import States

__all__ = ["DistributedDataParallel"]

# Names that programs look for in torch's module.
_MixedPrecision = MixedPrecision


class DistributedDataParallel(nn.Module, joining.UnevenInputs, SharedBuffers, ForeignNames):
    """A module whose gradients are averaged over the ranks of a group while backward runs.

    Every rank builds the same module and wraps it; at construction all ranks take rank 0's parameters
    and buffers. After each backward pass every rank's ``.grad`` holds the average of all ranks' gradients,
    so equal optimizers keep the replicas equal. Gradients travel in buckets, and a bucket leaves as soon as
    it is full, so that most of the communication happens while backward still computes
    (S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020).

    Args:
        module: The model of this rank; the same on every rank.
        device_ids: For a module on one accelerator: a list of that device, to which inputs are moved. Else None.
        output_device: Where outputs belong; only with ``device_ids``. Default: ``device_ids[0]``.
        dim: Dimension over which inputs were divided; kept for compatibility. Default 0.
        broadcast_buffers: Whether buffers (running statistics, say) are taken from rank 0 at construction and before
            each forward pass. Default None, which means True.
        init_sync: Whether ranks check and share parameters at construction. Default True.
        process_group: The group. Default None: the default group.
        bucket_cap_mb: Size in MiB at which a bucket is closed. Default None: 25, and 1 for the first bucket.
        find_unused_parameters: Look, after each forward pass, which parameters the outputs don't depend on, and don't
            wait for them. Costs a walk through the graph. Default False.
        check_reduction: Without effect; kept for compatibility.
        gradient_as_bucket_view: Let ``.grad`` be views of the buckets, which saves a copy and memory. Default False.
        static_graph: Promise that every iteration runs the same graph: learned in the first, so that unused parameters
            and parameters used several times (activation checkpointing) work. Default False.
        delay_all_reduce_named_params: Names and parameters whose gradients are averaged together, in one tensor of
            their own that no hook sees, when the gradient of ``param_to_hook_all_reduce`` is there.
        param_to_hook_all_reduce: That parameter; its gradient has to come after those of the delayed ones.
        mixed_precision: A `MixedPrecision` (or torch's): dtypes of parameters in forward and backward, of gradients on
            their way, and of buffers. In between, parameters and gradients are in full precision.
        device_mesh: A one-dimensional mesh whose group is used, in place of ``process_group``.
        skip_all_reduce_unused_params: With ``find_unused_parameters``, don't communicate buckets in which nothing is
            used. Every rank has to leave out the same parameters. Default False.
        bucket_cap_mb_list: Sizes in MiB of the first bucket, the second, and so on; the last holds for the rest.
        batched_grad_copy: Without effect: gradients are copied while they are in the cache.
        forward_sync_buffers: Like ``broadcast_buffers`` for forward passes, while construction always shares buffers.

    Raises:
        MismatchError: Ranks hold different parameters; says which, and where.
        ArgumentError: An argument doesn't fit the module.

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
    ) -> None:
        super().__init__()
        joining.UnevenInputs.__init__(self)
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
        self._hook_name: str | None = None
        self._buffer_hook: BufferHook | None = None
        self._options = Options(
            bucketing.caps(bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters and not static_graph),
            find_unused_parameters,
            gradient_as_bucket_view,
            static_graph,
            skip_all_reduce_unused_params,
        )
        if init_sync:
            self._meet(self.broadcast_buffers or forward_sync_buffers is not None)
        self._delayed = variants.delay(delayed, param_to_hook_all_reduce, self.process_group)
        self._build()

    def _meet(self, with_buffers: bool) -> None:
        """Check that all ranks hold the same kinds of parameters, then take rank 0's values."""
        entries = self._entries
        agreement.verify(
            [e.parameter for e in entries],
            [e.name for e in entries],
            [e.sparse for e in entries],
            self.process_group,
            self.device,
        )
        States(self.module, self.parameters_to_ignore, self.process_group).share(with_buffers)

    def _build(self) -> None:
        self.states = States(self.module, self.parameters_to_ignore, self.process_group)
        self.reducer = Reducer(self._entries, self.process_group, self._options)
        self._fresh = True
        variants.lower_precision(self)

    # ---- one iteration

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and prepare for the averaging of gradients that the next backward pass does."""
        inputs, kwargs = self._before(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._after(output)
        return output

    @untraced
    def _before(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._fresh:
            self._fresh = False
            variants.adopt_optimizers(self)
        joining.count_ranks(self)
        if torch.is_grad_enabled():
            self.reducer.rebuild()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            joining.announce(self)
        if self.device_ids is not None:
            device = torch.device(self.device.type, self.device_ids[0])
            inputs, kwargs = construction.mapped((inputs, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
        return (inputs, kwargs) if self.reducer.precision is None else self._lowered(inputs, kwargs)

    def _lowered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.reducer.precision is not None
        if self.reducer.precision.lower():
            self.reducer.watch()
        return self.reducer.precision.cast(inputs), self.reducer.precision.cast(kwargs)

    @untraced
    def _after(self, output: Any) -> None:
        if self._buffer_hook is not None and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare(output)
        else:
            self.require_forward_param_sync = False
        if self.reducer.precision is not None and not torch.is_grad_enabled():
            self.reducer.precision.restore()
        if self._delayed is not None:
            self._delayed.point()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: forward passes inside don't lead to communication.

        The first forward and backward pass after it averages all that was accumulated. A forward pass has to be inside
        with its backward pass.

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

    # ---- hooks

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` decide how each bucket of gradients is exchanged, in place of the average.

        Args:
            state: Handed to the hook with every bucket; many hooks take the process group here, or None.
            hook: ``hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]``. Called when a bucket is
                full; the Future's tensor has as many elements as ``bucket.buffer()`` and becomes the gradients, as it
                is: a hook that sums also divides.

        Raises:
            ArgumentTypeError: The hook can't be called with two arguments.
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
        rank = groups.get_rank(self.process_group)
        registration.check_free(self._hook_name, rank)
        registration.check_hook(hook, rank)
        # A hook that was written for torch asks torch for its group.
        groups.mirror()
        hooked = Hooked(hook, state, self.process_group, not self._options.skip_unused)
        self.reducer.use(hooked)
        self._hook_name = hooked.name

    # ---- copies

    NOT_SAVED = ("process_group", "reducer", "states", "_buffer_hook")

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process; hooks are registered anew."""
        return {key: value for key, value in self.__dict__.items() if key not in self.NOT_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy works on the default group; nothing is communicated."""
        nn.Module.__setstate__(self, state)
        self.process_group = construction.choose_group(None, None)
        self._entries = construction.entries(self.module, self.parameters_to_ignore)
        self._hook_name = self._buffer_hook = None
        self._build()
