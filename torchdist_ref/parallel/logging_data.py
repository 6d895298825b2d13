"""Logging data of DDP, under torch's names: how it was constructed, and where the time of sampled iterations went.

In an iteration that is sampled, the reducer writes times into a dict; in others it has none and measures nothing.
`RuntimeStatistics` receives the dict at the end of the iteration and averages the durations. `construction_data` and
`runtime_data` describe a DDP for `_get_ddp_logging_data`. Times are in nanoseconds of `time.time_ns`. Do not add
measurements of single calls here: a group's recorder has them.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from torchdist_ref import groups

if TYPE_CHECKING:
    from torchdist_ref.parallel.reducer import Reducer

logger = logging.getLogger("torchdist_ref.parallel")

# The first iteration includes what happens once, so it is not sampled. The next ten all are, later ones at the rate.
FIRST_ITERATIONS = 10
DEFAULT_SAMPLE_RATE = 100

_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}

# torch's names of dtypes in C++, where they differ from those in Python.
_DTYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_VARIABLES = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}
_OF_BACKENDS = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}


class RuntimeStatistics:
    """Times of the last sampled iteration, and averages over all sampled ones.

    Attributes:
        sample_rate: Every iteration whose number divides by it is sampled, and the first ones.
        iteration: Number of iterations that have begun, less one.
        values: Times and counts of the last sampled iteration, under torch's names.
        logs: Whether the values are also logged. Default False.
    """

    def __init__(self) -> None:
        self.sample_rate = DEFAULT_SAMPLE_RATE
        self.iteration = -1
        self.values: dict[str, Any] = {}
        self.logs = False
        self._sampled = 0
        self._sums = dict.fromkeys(_DURATIONS, 0)

    def end_iteration(self, times: dict[str, Any]) -> None:
        """Compute the durations of a sampled iteration, and add them to the averages."""
        times.setdefault("backward_comm_time_start", times["backward_compute_time_end"])
        self._sampled += 1
        for name, (begin, end) in _DURATIONS.items():
            times[name] = max(0, times[end] - times[begin])
            self._sums[name] += times[name]
            times[f"avg_{name}"] = self._sums[name] // self._sampled
        self.values = times
        if self.logs:
            logger.info("DistributedDataParallel: runtime: %s", as_text(times))


def construction_data(ddp: Any) -> dict[str, Any]:
    """Return how a DDP was constructed."""
    parameters = [entry.parameter for entry in ddp._entries]  # noqa: SLF001 (DDP asks for it)
    backend = groups.get_backend(ddp.process_group)
    variables = {**_VARIABLES, **_OF_BACKENDS.get(backend, {})}
    return {
        "backend_name": backend,
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "dtypes": ", ".join(sorted({_dtype_name(parameter.dtype) for parameter in parameters})),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "has_sync_bn": int(any(isinstance(each, torch.nn.SyncBatchNorm) for each in ddp.module.modules())),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "module_name": type(ddp.module).__name__,
        "num_parameter_tensors": len(parameters),
        "output_device": -1 if ddp.output_device is None else torch.device(ddp.output_device).index,
        "rank": groups.get_rank(ddp.process_group),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "world_size": groups.get_world_size(ddp.process_group),
        **({"gloo_num_threads": 2} if backend == "gloo" else {}),
        **{name: os.environ.get(variable, "N/A") for name, variable in variables.items()},
    }


def runtime_data(reducer: Reducer) -> dict[str, Any]:
    """Return the buckets of a DDP now, and the times of its last sampled iteration."""
    sizes = _joined(sum(reducer.parameters[member].nbytes for member in bucket) for bucket in reducer.assignment)
    found: dict[str, Any] = {"has_rebuilt_buckets": int(reducer.rebuilt)}
    if reducer.rebuilt:
        found["rebuilt_bucket_sizes"] = sizes
        found["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, bucket)) for bucket in reducer.assignment)
    return {**found, "bucket_sizes": sizes, "iteration": 0, **reducer.statistics.values}


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def as_text(data: dict[str, Any]) -> str:
    """Return logging data on one line, for the log."""
    return ", ".join(f"{name}: {value}" for name, value in sorted(data.items()))
