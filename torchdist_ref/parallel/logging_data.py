"""Logging data of DDP, under torch's names: how it was constructed, and where the time of sampled iterations went.

`reducer.RuntimeStatistics` has one dict of times for an iteration that is sampled, and the reducer writes into it; else
there is none, and nothing is measured. `construction_data` and `runtime_data` describe a DDP for
`_get_ddp_logging_data`. Times are in nanoseconds of `time.time_ns`. Do not add measurements of single calls here: a
group's recorder has them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.parallel.reducer import Reducer, RuntimeStatistics

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


def runtime_data(reducer: Reducer, statistics: RuntimeStatistics) -> dict[str, Any]:
    """Return the buckets of a DDP now, and the times of its last sampled iteration."""
    sizes = _joined(sum(reducer.parameters[member].nbytes for member in bucket) for bucket in reducer.assignment)
    found: dict[str, Any] = {"has_rebuilt_buckets": int(reducer.rebuilt)}
    if reducer.rebuilt:
        found["rebuilt_bucket_sizes"] = sizes
        found["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, bucket)) for bucket in reducer.assignment)
    return {**found, "bucket_sizes": sizes, "iteration": 0, **statistics.values}


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def as_text(data: dict[str, Any]) -> str:
    """Return logging data on one line, for the log."""
    return ", ".join(f"{name}: {value}" for name, value in sorted(data.items()))
