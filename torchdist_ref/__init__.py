"""torch.distributed you can read: the same API, in Python from the call down to the bytes.

Names are resolved on first use (PEP 562), so that the launcher and the stores work without importing torch.
Add a public name in the module that defines it, and a line to the table here; nothing is computed in this file. Type
checkers read `__init__.pyi` instead, which `python -m tests.typed` writes from this table and the names' signatures.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torchdist_ref.processes.standard_streams import open_closed_streams as _open_closed_streams

__version__ = "0.1.0"

_HOMES = {
    "torchdist_ref.errors": (
        "ArgumentError ArgumentTypeError AuthenticationError BackendArgumentError DestroyedGroupError "
        "DistBackendError DistError DistNetworkError DistStoreError EntryError GroupAbortedError MismatchError "
        "NotInitializedError PicklingError QueueEmptyError RankDiedError RankStalledError RendezvousError "
        "StoreTimeoutError UnsupportedError UsageError"
    ),
    "torchdist_ref.algorithms.ddp_comm_hooks.default_hooks": "BuiltinCommHookType",
    "torchdist_ref.groups": (
        "Backend DebugLevel DeviceMesh GroupMember P2POp ProcessGroup ReduceOp Work all_gather "
        "all_gather_coalesced all_gather_into_tensor all_gather_multigpu all_gather_object all_gather_single "
        "all_reduce all_reduce_coalesced all_reduce_multigpu all_to_all all_to_all_single barrier "
        "batch_isend_irecv broadcast broadcast_multigpu broadcast_object_list default_pg_timeout "
        "destroy_process_group empty_registered gather gather_into_tensor gather_object gather_single get_backend "
        "get_backend_config get_backend_impl get_debug_level "
        "get_default_backend_for_device get_global_rank get_group_rank get_node_local_rank get_pg_count "
        "get_process_group_ranks get_rank get_world_size init_device_mesh init_process_group irecv is_available "
        "is_backend_available is_gloo_available is_initialized is_mpi_available is_nccl_available "
        "is_torchelastic_launched is_ucc_available is_xccl_available isend monitored_barrier new_group new_subgroups "
        "new_subgroups_by_enumeration recv recv_object_list reduce reduce_multigpu reduce_op reduce_scatter "
        "reduce_scatter_multigpu reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send "
        "send_object_list set_debug_level set_debug_level_from_env set_timeout shrink_group split_group "
        "supports_complex"
    ),
    "torchdist_ref.groups.world": "group",
    "torchdist_ref.parallel": "DistributedDataParallel GradBucket",
    "torchdist_ref.rendezvous": "register_rendezvous_handler rendezvous",
    "torchdist_ref.stores": "FileStore HashStore PrefixStore Store TCPStore",
}
# Names that are torch's own; torch's functions work on our default group. The page "Compatibility" lists their users.
_TORCHS_OWN = {
    "torch.distributed": (
        "BackendConfig Logger ProcessGroupGloo ProcessGroupNCCL ProcessGroupNCCL2 ProcessGroupNCCLLazy RankType "
        "Reducer breakpoint _Backend _CoalescingManager "
        "_ControlCollectives _DEFAULT_FIRST_BUCKET_BYTES _StoreCollectives _Work _all_gather_base "
        "_broadcast_coalesced _coalescing_manager _compute_bucket_assignment_by_size _create_process_group_wrapper "
        "_create_store_from_options _get_process_group_name _get_reconfigure_handle _make_distributed_pdb "
        "_make_nccl_premul_sum _new_window _rank_not_in_group _reconfigure _reduce_scatter_base "
        "_register_builtin_comm_hook _register_comm_hook _remote_device _supports_reconfigure _supports_window "
        "_test_python_store _time_estimator _verify_params_across_processes"
    ),
    "torch.distributed.distributed_c10d": (
        "AllToAllOptions AllgatherOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions BroadcastOptions "
        "GatherOptions GroupName ReduceOptions ReduceScatterOptions ScatterOptions "
        "record_comm _get_default_group"
    ),
}
_TORCHS_HOME = {name: module for module, names in _TORCHS_OWN.items() for name in names.split()}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or _TORCHS_HOME.get(name)
    if name == "EngineArgumentError":
        return getattr(importlib.import_module("torchdist_ref.errors"), name)
    # Modules below are attributes too, as those of torch's package are: torch imports them all at once.
    value = getattr(importlib.import_module(home), name) if home else _module_below(name)
    globals()[name] = value
    _register_with_torch()
    return value


def _module_below(name: str) -> Any:
    """Return the module of this name below the package, imported.

    Raises:
        AttributeError: There is no such module.
    """
    path = f"torchdist_ref.{name}"
    try:
        # Not `__main__`, which importing would run.
        if not name.startswith("__"):
            return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
    raise AttributeError(f"module 'torchdist_ref' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _register_with_torch() -> None:
    """Register `ref` with torch if torch is imported. It runs while torch starts, so it never raises."""
    if "torch" in sys.modules:
        _run("backends", "register_with_torch", "backend 'ref' cannot be registered with torch")


def _run(module: str, function: str, failure: str) -> None:
    """Call a function of a module of ours, and log what it raises."""
    try:
        getattr(importlib.import_module(f"torchdist_ref.{module}"), function)()
    except Exception as error:
        import logging

        logging.getLogger("torchdist_ref").warning("%s: %r", failure, error)


# The entry point of editable installations made before the function was renamed.
_tell_torch = _register_with_torch

if sys.platform != "linux":
    import warnings

    warnings.warn(
        f"torchdist_ref is tested on Linux only, and this is {sys.platform}: ranks that are threads work here, "
        "backend 'ref' between processes and the server of TCPStore do not.",
        stacklevel=2,
    )
_open_closed_streams()
_run("torch_paths", "install", "modules at torch's paths cannot be imported")
_register_with_torch()
