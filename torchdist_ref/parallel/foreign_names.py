"""Names without documentation under which programs written for torch's DDP reach into it: answered, not extended.

Training frameworks and model code read these attributes and call these methods of torch's class although they
begin with an underscore. Each stands for something that the constructor or a public method does. New abilities
belong there; here are only names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchdist_ref.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _hook_then_optimizer, _OptimizerHookState
from torchdist_ref.errors import DistError
from torchdist_ref.parallel.reducer import Reducer

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
        before, ddp.reducer = ddp.reducer, Reducer(ddp._entries, ddp.process_group, ddp._options)
        ddp.reducer.precision = before.precision
        if before.exchange is not before.average:
            ddp.reducer.use(before.exchange)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers of these names to each rank, when ``module`` is wrapped later."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

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
