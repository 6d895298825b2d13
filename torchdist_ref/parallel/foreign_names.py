"""Names without documentation under which programs written for torch's DDP reach into it: answered, not extended.

Training frameworks and model code read these attributes and call these methods of torch's class although they
begin with an underscore. Each stands for something that the constructor or a public method does. New abilities
belong there; here are only names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.builtin import builtin_hook
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchdist_ref.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _hook_then_optimizer, _OptimizerHookState
from torchdist_ref.errors import DistError
from torchdist_ref.parallel.exchange import Hooked
from torchdist_ref.parallel.reducer import Reducer
from torchdist_ref.parallel.states import States

if TYPE_CHECKING:
    from torchdist_ref.parallel.distributed_data_parallel import DistributedDataParallel


class ForeignNames:
    """The part of DDP that knows torch's private names."""

    is_multi_device_module = False

    @property
    def _ddp(self) -> DistributedDataParallel:
        return cast("DistributedDataParallel", self)

    def _set_static_graph(self) -> None:
        """What ``static_graph=True`` does, before the first iteration.

        Raises:
            DistError: There were iterations already.
        """
        ddp = self._ddp
        if ddp.static_graph:
            return
        if not ddp._fresh:
            raise DistError(
                "DistributedDataParallel._set_static_graph: there was a forward pass already "
                f"(on rank {groups.get_rank(ddp.process_group)}). Call it before, or pass static_graph=True."
            )
        ddp.static_graph = True
        ddp._options = replace(ddp._options, static_graph=True)
        self._begin_anew()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on in another group, larger or smaller: gradients and buffers are exchanged there from now on.

        Buckets begin anew. Hooks keep their state: to give them the new group is left to whoever gave them the old one.
        Ranks that are not in the new group keep what they have.
        """
        ddp = self._ddp
        if groups.get_rank(new_process_group) < 0:
            return
        ddp.process_group = new_process_group
        ddp.states = States(ddp.module, ddp.parameters_to_ignore, new_process_group)
        if ddp._delayed is not None:
            ddp._delayed.change_group(new_process_group)
        if ddp._buffer_hook is not None:
            ddp._buffer_hook.group = new_process_group
        self._begin_anew()

    def _begin_anew(self) -> None:
        """A reducer as of a new DDP, with the hooks that are registered."""
        ddp = self._ddp
        before, ddp.reducer = ddp.reducer, Reducer(ddp._entries, ddp.process_group, ddp._options)
        ddp.reducer.precision, ddp.reducer.at_the_end = before.precision, before.at_the_end
        hooked = before.exchange
        if isinstance(hooked, Hooked):
            ddp.reducer.use(Hooked(hooked.hook, hooked.state, ddp.process_group, not ddp._options.skip_unused))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register a hook that torch has in C++, by a member of `BuiltinCommHookType`."""
        hook = builtin_hook(comm_hook_type)
        self._ddp.register_comm_hook(self._ddp.process_group, hook)
        self._ddp._hook_name = str(comm_hook_type)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of a module, or names and parameters, without those that were named to be left alone."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers of these names to each rank, when ``module`` is wrapped later."""
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                vars(tensor)["_ddp_ignored"] = True

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Average gradients, and let an optimizer of this class step on each bucket inside backward."""
        from torch.distributed.optim.utils import as_functional_optim

        state = _OptimizerHookState(as_functional_optim(optim, *args, **kwargs), optim_params)
        self._ddp.register_comm_hook(self._ddp.process_group, _hook_then_optimizer(allreduce_hook, state))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """How this DDP works, under the names that torch's statistics have. Times are not among them."""
        ddp = self._ddp
        parameters = [entry.parameter for entry in ddp._entries]
        members = ([ddp.reducer.parameters[m] for m in bucket] for bucket in ddp.reducer.assignment)
        sizes = ", ".join(str(sum(parameter.nbytes for parameter in bucket)) for bucket in members)
        return {
            "backend_name": groups.get_backend(ddp.process_group),
            "broadcast_buffers": int(ddp.broadcast_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "rebuilt_bucket_sizes" if ddp.reducer.rebuilt else "bucket_sizes": sizes,
            "comm_hook": ddp._hook_name or "",
            "dtypes": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
            "find_unused_parameters": int(ddp._options.find_unused),
            "gradient_as_bucket_view": int(ddp._options.pointing),
            "has_rebuilt_buckets": int(ddp.reducer.rebuilt),
            "module_name": type(ddp.module).__name__,
            "num_parameter_tensors": len(parameters),
            "rank": groups.get_rank(ddp.process_group),
            "static_graph": int(ddp.static_graph),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
            "world_size": groups.get_world_size(ddp.process_group),
        }

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are final. Hooks ask for it."""
        return self._ddp.reducer.rebuilt or (self._ddp.find_unused_parameters and not self._ddp.static_graph)

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes at which all buckets are closed but those that have limits of their own."""
        return self._ddp._options.caps.rebuilt[-1]

    @property
    def device_type(self) -> str:
        """The kind of device that the parameters are on."""
        return self._ddp.device.type

    @property
    def forward_sync_buffers(self) -> bool:
        """`broadcast_buffers`, by its newer name."""
        return self._ddp.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, wanted: bool) -> None:
        self._ddp.broadcast_buffers = wanted
