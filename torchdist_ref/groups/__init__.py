"""Public API: argument checks and rank translation, once per call; backends do the rest.

Calls translate global ranks with `world.ProcessGroup.group_rank`. `arguments` checks tensors and reductions; whether a
reduction suits a dtype is decided by `backends.reductions`.
"""

from __future__ import annotations

from torch.distributed import ReduceOp

from torchdist_ref.debug.levels import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from torchdist_ref.errors import adopt_torch
from torchdist_ref.groups.alltoall import all_to_all, all_to_all_single
from torchdist_ref.groups.coalesced import all_gather_coalesced, all_reduce_coalesced
from torchdist_ref.groups.collectives import all_reduce, barrier, broadcast, monitored_barrier, reduce
from torchdist_ref.groups.creation import destroy_process_group, init_process_group, is_initialized, new_group
from torchdist_ref.groups.gather_scatter import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    gather,
    gather_into_tensor,
    gather_single,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from torchdist_ref.groups.mesh import DeviceMesh, init_device_mesh
from torchdist_ref.groups.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from torchdist_ref.groups.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from torchdist_ref.groups.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from torchdist_ref.groups.queries import (
    Backend,
    get_backend,
    get_backend_config,
    get_backend_impl,
    get_default_backend_for_device,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
    reduce_op,
    set_timeout,
    supports_complex,
)
from torchdist_ref.groups.registered_memory import empty_registered
from torchdist_ref.groups.subgroups import new_subgroups, new_subgroups_by_enumeration, shrink_group, split_group
from torchdist_ref.groups.tracing import mark_for_compilers, mark_methods_for_compilers
from torchdist_ref.groups.world import GroupMember, ProcessGroup, default_pg_timeout
from torchdist_ref.work import Work

adopt_torch()

__all__ = [
    "Backend",
    "DebugLevel",
    "DeviceMesh",
    "GroupMember",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_multigpu",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_multigpu",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "empty_registered",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_backend_config",
    "get_backend_impl",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_multigpu",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "set_timeout",
    "shrink_group",
    "split_group",
    "supports_complex",
]

mark_for_compilers(globals()[name] for name in __all__)
mark_methods_for_compilers(Work)
