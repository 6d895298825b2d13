"""Types of the package's names, written by `python -m tests.typed` from the signatures in the source."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal, overload

import torch
import torch.distributed
from torch import Tensor
from torch.futures import Future

from torchdist_ref import acid as acid
from torchdist_ref import algorithms as algorithms
from torchdist_ref import benchmark as benchmark
from torchdist_ref import debug as debug
from torchdist_ref import elastic as elastic
from torchdist_ref import errors as errors
from torchdist_ref import groups as groups
from torchdist_ref import launcher as launcher
from torchdist_ref import nn as nn
from torchdist_ref import optim as optim
from torchdist_ref import parallel as parallel
from torchdist_ref import pipeline as pipeline
from torchdist_ref import reproducible as reproducible
from torchdist_ref import simulation as simulation
from torchdist_ref import stores as stores
from torchdist_ref import testing as testing
from torchdist_ref import utilities as utilities
from torchdist_ref import work as work
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import BuiltinCommHookType as BuiltinCommHookType
from torchdist_ref.errors import ArgumentError as ArgumentError
from torchdist_ref.errors import ArgumentTypeError as ArgumentTypeError
from torchdist_ref.errors import AuthenticationError as AuthenticationError
from torchdist_ref.errors import BackendArgumentError as BackendArgumentError
from torchdist_ref.errors import DestroyedGroupError as DestroyedGroupError
from torchdist_ref.errors import DistBackendError as DistBackendError
from torchdist_ref.errors import DistError as DistError
from torchdist_ref.errors import DistNetworkError as DistNetworkError
from torchdist_ref.errors import DistStoreError as DistStoreError
from torchdist_ref.errors import EntryError as EntryError
from torchdist_ref.errors import GroupAbortedError as GroupAbortedError
from torchdist_ref.errors import MismatchError as MismatchError
from torchdist_ref.errors import NotInitializedError as NotInitializedError
from torchdist_ref.errors import PicklingError as PicklingError
from torchdist_ref.errors import QueueEmptyError as QueueEmptyError
from torchdist_ref.errors import RankDiedError as RankDiedError
from torchdist_ref.errors import RankStalledError as RankStalledError
from torchdist_ref.errors import RendezvousError as RendezvousError
from torchdist_ref.errors import StoreTimeoutError as StoreTimeoutError
from torchdist_ref.errors import UnsupportedError as UnsupportedError
from torchdist_ref.errors import UsageError as UsageError
from torchdist_ref.groups import Backend as Backend
from torchdist_ref.groups import DebugLevel as DebugLevel
from torchdist_ref.groups import DeviceMesh as DeviceMesh
from torchdist_ref.groups import GroupMember as GroupMember
from torchdist_ref.groups import P2POp as P2POp
from torchdist_ref.groups import ProcessGroup as ProcessGroup
from torchdist_ref.groups import ReduceOp as ReduceOp
from torchdist_ref.groups import Work as Work
from torchdist_ref.groups import batch_isend_irecv as batch_isend_irecv
from torchdist_ref.groups import default_pg_timeout as default_pg_timeout
from torchdist_ref.groups import empty_registered as empty_registered
from torchdist_ref.groups import get_backend_impl as get_backend_impl
from torchdist_ref.groups import get_debug_level as get_debug_level
from torchdist_ref.groups import get_default_backend_for_device as get_default_backend_for_device
from torchdist_ref.groups import get_global_rank as get_global_rank
from torchdist_ref.groups import get_group_rank as get_group_rank
from torchdist_ref.groups import get_node_local_rank as get_node_local_rank
from torchdist_ref.groups import get_pg_count as get_pg_count
from torchdist_ref.groups import init_device_mesh as init_device_mesh
from torchdist_ref.groups import init_process_group as init_process_group
from torchdist_ref.groups import is_available as is_available
from torchdist_ref.groups import is_backend_available as is_backend_available
from torchdist_ref.groups import is_gloo_available as is_gloo_available
from torchdist_ref.groups import is_initialized as is_initialized
from torchdist_ref.groups import is_mpi_available as is_mpi_available
from torchdist_ref.groups import is_nccl_available as is_nccl_available
from torchdist_ref.groups import is_torchelastic_launched as is_torchelastic_launched
from torchdist_ref.groups import is_ucc_available as is_ucc_available
from torchdist_ref.groups import is_xccl_available as is_xccl_available
from torchdist_ref.groups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
from torchdist_ref.groups import reduce_op as reduce_op
from torchdist_ref.groups import set_debug_level as set_debug_level
from torchdist_ref.groups import set_debug_level_from_env as set_debug_level_from_env
from torchdist_ref.groups import supports_complex as supports_complex
from torchdist_ref.groups.arguments import Reduction
from torchdist_ref.groups.subgroups import Subgroups
from torchdist_ref.groups.world import group as group
from torchdist_ref.parallel import DistributedDataParallel as DistributedDataParallel
from torchdist_ref.parallel import GradBucket as GradBucket
from torchdist_ref.rendezvous import register_rendezvous_handler as register_rendezvous_handler
from torchdist_ref.rendezvous import rendezvous as rendezvous
from torchdist_ref.stores import FileStore as FileStore
from torchdist_ref.stores import HashStore as HashStore
from torchdist_ref.stores import PrefixStore as PrefixStore
from torchdist_ref.stores import Store as Store
from torchdist_ref.stores import TCPStore as TCPStore

AnyGroup = torch.distributed.ProcessGroup | int | None

__all__: list[str]
__version__: str

# Import paths that torch has: modules without a file.
_checkpointable: ModuleType
_composable: ModuleType
_functional_collectives: ModuleType
_mesh_layout: ModuleType
_meta_registrations: ModuleType
_pycute: ModuleType
_shard: ModuleType
_symmetric_memory: ModuleType
_tensor: ModuleType
autograd: ModuleType
c10d_logger: ModuleType
checkpoint: ModuleType
collective_utils: ModuleType
config: ModuleType
constants: ModuleType
device_mesh: ModuleType
distributed_c10d: ModuleType
flight_recorder: ModuleType
fsdp: ModuleType
logging_handlers: ModuleType
multiprocessing: ModuleType
pipelining: ModuleType
remote_device: ModuleType
rpc: ModuleType
run: ModuleType
tensor: ModuleType
utils: ModuleType

# Torch's own: its functions work on the groups made here.
AllToAllOptions: Any
AllgatherOptions: Any
AllreduceCoalescedOptions: Any
AllreduceOptions: Any
BackendConfig: Any
BarrierOptions: Any
BroadcastOptions: Any
GatherOptions: Any
GroupName: Any
Logger: Any
ProcessGroupGloo: Any
ProcessGroupNCCL: Any
ProcessGroupNCCL2: Any
ProcessGroupNCCLLazy: Any
RankType: Any
ReduceOptions: Any
ReduceScatterOptions: Any
Reducer: Any
ScatterOptions: Any
_Backend: Any
_CoalescingManager: Any
_ControlCollectives: Any
_DEFAULT_FIRST_BUCKET_BYTES: Any
_StoreCollectives: Any
_Work: Any
_all_gather_base: Any
_broadcast_coalesced: Any
_coalescing_manager: Any
_compute_bucket_assignment_by_size: Any
_create_process_group_wrapper: Any
_create_store_from_options: Any
_get_default_group: Any
_get_process_group_name: Any
_get_reconfigure_handle: Any
_make_distributed_pdb: Any
_make_nccl_premul_sum: Any
_new_window: Any
_rank_not_in_group: Any
_reconfigure: Any
_reduce_scatter_base: Any
_register_builtin_comm_hook: Any
_register_comm_hook: Any
_remote_device: Any
_supports_reconfigure: Any
_supports_window: Any
_test_python_store: Any
_time_estimator: Any
_verify_params_across_processes: Any
breakpoint: Any
record_comm: Any

@overload
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Gather the tensors of all ranks in a list on every rank."""

@overload
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: AnyGroup = ..., *, async_op: Literal[True]) -> Work:
    """Gather the tensors of all ranks in a list on every rank."""

@overload
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: AnyGroup = ..., async_op: bool = ...) -> Work | None:
    """Gather the tensors of all ranks in a list on every rank."""

@overload
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> None:
    """Gather the tensor lists of all ranks on every rank."""

@overload
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
) -> Future[Any]:
    """Gather the tensor lists of all ranks on every rank."""

@overload
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    async_op: bool = ...,
) -> Future[Any] | None:
    """Gather the tensor lists of all ranks on every rank."""

@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Gather the tensors of all ranks in one tensor on every rank."""

@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Gather the tensors of all ranks in one tensor on every rank."""

@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Gather the tensors of all ranks in one tensor on every rank."""

@overload
def all_gather_multigpu(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> None:
    """Gather the tensors of all ranks in each of this rank's lists."""

@overload
def all_gather_multigpu(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
) -> Work:
    """Gather the tensors of all ranks in each of this rank's lists."""

@overload
def all_gather_multigpu(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    async_op: bool = ...,
) -> Work | None:
    """Gather the tensors of all ranks in each of this rank's lists."""

def all_gather_object(object_list: list[Any], obj: Any, group: AnyGroup = ..., weights_only: bool = ...) -> None:
    """Gather the objects of all ranks in a list on every rank."""

@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Gather the tensors of all ranks in one tensor: torch 2.13's name for `all_gather_into_tensor`."""

@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Gather the tensors of all ranks in one tensor: torch 2.13's name for `all_gather_into_tensor`."""

@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Gather the tensors of all ranks in one tensor: torch 2.13's name for `all_gather_into_tensor`."""

@overload
def all_reduce(tensor: Tensor, op: Reduction = ..., group: AnyGroup = ..., async_op: Literal[False] = ...) -> None:
    """Reduce a tensor over all ranks, in place; every rank gets the same result, bit for bit."""

@overload
def all_reduce(tensor: Tensor, op: Reduction = ..., group: AnyGroup = ..., *, async_op: Literal[True]) -> Work:
    """Reduce a tensor over all ranks, in place; every rank gets the same result, bit for bit."""

@overload
def all_reduce(tensor: Tensor, op: Reduction = ..., group: AnyGroup = ..., async_op: bool = ...) -> Work | None:
    """Reduce a tensor over all ranks, in place; every rank gets the same result, bit for bit."""

@overload
def all_reduce_coalesced(
    tensors: Tensor | list[Tensor], op: Reduction = ..., group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Reduce each tensor of a list over all ranks, in place."""

@overload
def all_reduce_coalesced(
    tensors: Tensor | list[Tensor], op: Reduction = ..., group: AnyGroup = ..., *, async_op: Literal[True]
) -> Future[Any]:
    """Reduce each tensor of a list over all ranks, in place."""

@overload
def all_reduce_coalesced(
    tensors: Tensor | list[Tensor], op: Reduction = ..., group: AnyGroup = ..., async_op: bool = ...
) -> Future[Any] | None:
    """Reduce each tensor of a list over all ranks, in place."""

@overload
def all_reduce_multigpu(
    tensor_list: list[Tensor], op: Reduction = ..., group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Reduce all tensors of all ranks to one value, which each of them receives."""

@overload
def all_reduce_multigpu(
    tensor_list: list[Tensor], op: Reduction = ..., group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Reduce all tensors of all ranks to one value, which each of them receives."""

@overload
def all_reduce_multigpu(
    tensor_list: list[Tensor], op: Reduction = ..., group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Reduce all tensors of all ranks to one value, which each of them receives."""

@overload
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> None:
    """Send one tensor of a list to each rank, and receive one from each rank."""

@overload
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Send one tensor of a list to each rank, and receive one from each rank."""

@overload
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Send one tensor of a list to each rank, and receive one from each rank."""

@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = ...,
    input_split_sizes: list[int] | None = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> None:
    """Send one block of a tensor to each rank, and receive one from each rank."""

@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = ...,
    input_split_sizes: list[int] | None = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
) -> Work:
    """Send one block of a tensor to each rank, and receive one from each rank."""

@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = ...,
    input_split_sizes: list[int] | None = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
) -> Work | None:
    """Send one block of a tensor to each rank, and receive one from each rank."""

@overload
def barrier(
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    device_ids: list[int] | None = ...,
    timeout: timedelta | None = ...,
) -> None:
    """Wait until every rank of the group has called this."""

@overload
def barrier(
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    device_ids: list[int] | None = ...,
    timeout: timedelta | None = ...,
) -> Work:
    """Wait until every rank of the group has called this."""

@overload
def barrier(
    group: AnyGroup = ..., async_op: bool = ..., device_ids: list[int] | None = ..., timeout: timedelta | None = ...
) -> Work | None:
    """Wait until every rank of the group has called this."""

@overload
def broadcast(
    tensor: Tensor,
    src: int | None = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
) -> None:
    """Copy one rank's tensor to all ranks of the group."""

@overload
def broadcast(
    tensor: Tensor,
    src: int | None = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    group_src: int | None = ...,
) -> Work:
    """Copy one rank's tensor to all ranks of the group."""

@overload
def broadcast(
    tensor: Tensor, src: int | None = ..., group: AnyGroup = ..., async_op: bool = ..., group_src: int | None = ...
) -> Work | None:
    """Copy one rank's tensor to all ranks of the group."""

@overload
def broadcast_multigpu(
    tensor_list: list[Tensor], src: int, group: AnyGroup = ..., async_op: Literal[False] = ..., src_tensor: int = ...
) -> None:
    """Copy one tensor of one rank to all tensors of all ranks."""

@overload
def broadcast_multigpu(
    tensor_list: list[Tensor], src: int, group: AnyGroup = ..., *, async_op: Literal[True], src_tensor: int = ...
) -> Work:
    """Copy one tensor of one rank to all tensors of all ranks."""

@overload
def broadcast_multigpu(
    tensor_list: list[Tensor], src: int, group: AnyGroup = ..., async_op: bool = ..., src_tensor: int = ...
) -> Work | None:
    """Copy one tensor of one rank to all tensors of all ranks."""

def broadcast_object_list(
    object_list: list[Any],
    src: int | None = ...,
    group: AnyGroup = ...,
    device: torch.device | None = ...,
    group_src: int | None = ...,
    weights_only: bool = ...,
) -> None:
    """Copy one rank's list of objects to all ranks of the group."""

def destroy_process_group(group: AnyGroup = ...) -> None:
    """Destroy a group, or all groups, on this rank: release their memory, threads and file descriptors."""

@overload
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None:
    """Gather the tensors of all ranks in a list on one rank, the destination."""

@overload
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    group_dst: int | None = ...,
) -> Work:
    """Gather the tensors of all ranks in a list on one rank, the destination."""

@overload
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None:
    """Gather the tensors of all ranks in a list on one rank, the destination."""

@overload
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None:
    """Gather the tensors of all ranks in one tensor on one rank: another name for `gather_single`. Since torch 2.14."""

@overload
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    group_dst: int | None = ...,
) -> Work:
    """Gather the tensors of all ranks in one tensor on one rank: another name for `gather_single`. Since torch 2.14."""

@overload
def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None:
    """Gather the tensors of all ranks in one tensor on one rank: another name for `gather_single`. Since torch 2.14."""

def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    group_dst: int | None = ...,
    weights_only: bool = ...,
) -> None:
    """Gather the objects of all ranks in a list on one rank, the destination."""

@overload
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None:
    """Gather the tensors of all ranks in one tensor on one rank, the destination. Since torch 2.14."""

@overload
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    group_dst: int | None = ...,
) -> Work:
    """Gather the tensors of all ranks in one tensor on one rank, the destination. Since torch 2.14."""

@overload
def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = ...,
    dst: int | None = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None:
    """Gather the tensors of all ranks in one tensor on one rank, the destination. Since torch 2.14."""

def get_backend(group: AnyGroup = ...) -> str:
    """Return the name of a group's backend."""

def get_backend_config(group: AnyGroup = ...) -> str:
    """Return the name of a group's backend for each device type, in torch's notation."""

def get_process_group_ranks(group: AnyGroup) -> list[int]:
    """Return the global ranks of a group's members, in group order."""

def get_rank(group: AnyGroup = ...) -> int:
    """Return this rank's rank in a group, from 0, or -1 if it is not in the group."""

def get_world_size(group: AnyGroup = ...) -> int:
    """Return the number of ranks in a group, or -1 if this rank is not in the group."""

def irecv(
    tensor: Tensor, src: int | None = ..., group: AnyGroup = ..., tag: int = ..., group_src: int | None = ...
) -> Work | None:
    """Start to receive a tensor. Its values are unspecified until the Work is done."""

def isend(
    tensor: Tensor, dst: int | None = ..., group: AnyGroup = ..., tag: int = ..., group_dst: int | None = ...
) -> Work | None:
    """Start to send a tensor to one rank, which may be this one. Do not modify the tensor before the Work is done."""

def monitored_barrier(
    group: AnyGroup = ..., timeout: timedelta | float | None = ..., wait_all_ranks: bool = ...
) -> None:
    """Wait until every rank of the group has called this, and name the ranks that did not."""

def new_group(
    ranks: Iterable[int] | None = ...,
    timeout: timedelta | None = ...,
    backend: str | None = ...,
    pg_options: Any = ...,
    use_local_synchronization: bool = ...,
    group_desc: str | None = ...,
    device_id: Any = ...,
    sort_ranks: bool = ...,
) -> ProcessGroup:
    """Create a group of some ranks. Every rank of the default group calls this, members or not, in the same order."""

def new_subgroups(
    group_size: int | None = ...,
    group: AnyGroup = ...,
    timeout: timedelta | None = ...,
    backend: str | None = ...,
    pg_options: Any = ...,
    group_desc: str | None = ...,
) -> Subgroups:
    """Divide a group into groups of equal size: the first `group_size` ranks, the next, and so on."""

def recv(
    tensor: Tensor, src: int | None = ..., group: AnyGroup = ..., tag: int = ..., group_src: int | None = ...
) -> int:
    """Receive a tensor from one rank, or from the first rank that sends."""

def recv_object_list(
    object_list: list[Any],
    src: int | None = ...,
    group: AnyGroup = ...,
    device: torch.device | None = ...,
    group_src: int | None = ...,
    use_batch: bool = ...,
    weights_only: bool = ...,
) -> int:
    """Receive a list of objects from one rank, or from the first rank that sends."""

@overload
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Reduction = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
) -> None:
    """Reduce a tensor over all ranks; one rank gets the result."""

@overload
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Reduction = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    group_dst: int | None = ...,
) -> Work:
    """Reduce a tensor over all ranks; one rank gets the result."""

@overload
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Reduction = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
) -> Work | None:
    """Reduce a tensor over all ranks; one rank gets the result."""

@overload
def reduce_multigpu(
    tensor_list: list[Tensor],
    dst: int,
    op: Reduction = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    dst_tensor: int = ...,
) -> None:
    """Reduce all tensors of all ranks; one tensor of one rank receives the result."""

@overload
def reduce_multigpu(
    tensor_list: list[Tensor],
    dst: int,
    op: Reduction = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    dst_tensor: int = ...,
) -> Work:
    """Reduce all tensors of all ranks; one tensor of one rank receives the result."""

@overload
def reduce_multigpu(
    tensor_list: list[Tensor],
    dst: int,
    op: Reduction = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
    dst_tensor: int = ...,
) -> Work | None:
    """Reduce all tensors of all ranks; one tensor of one rank receives the result."""

@overload
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Reduction = ..., group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Reduce each tensor of a list over all ranks; rank `r` gets the result of entry `r`."""

@overload
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Reduction = ..., group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Reduce each tensor of a list over all ranks; rank `r` gets the result of entry `r`."""

@overload
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Reduction = ..., group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Reduce each tensor of a list over all ranks; rank `r` gets the result of entry `r`."""

@overload
def reduce_scatter_multigpu(
    output_tensor_list: list[Tensor],
    input_tensor_lists: list[list[Tensor]],
    op: Reduction = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> None:
    """Reduce lists over all lists of all ranks; each output receives one entry of the result."""

@overload
def reduce_scatter_multigpu(
    output_tensor_list: list[Tensor],
    input_tensor_lists: list[list[Tensor]],
    op: Reduction = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
) -> Work:
    """Reduce lists over all lists of all ranks; each output receives one entry of the result."""

@overload
def reduce_scatter_multigpu(
    output_tensor_list: list[Tensor],
    input_tensor_lists: list[list[Tensor]],
    op: Reduction = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
) -> Work | None:
    """Reduce lists over all lists of all ranks; each output receives one entry of the result."""

@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Reduction = ..., group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Reduce a tensor over all ranks, one block for each: torch 2.13's name for `reduce_scatter_tensor`."""

@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Reduction = ..., group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Reduce a tensor over all ranks, one block for each: torch 2.13's name for `reduce_scatter_tensor`."""

@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Reduction = ..., group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Reduce a tensor over all ranks, one block for each: torch 2.13's name for `reduce_scatter_tensor`."""

@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Reduction = ..., group: AnyGroup = ..., async_op: Literal[False] = ...
) -> None:
    """Reduce a tensor over all ranks; rank `r` gets block `r` of the result."""

@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Reduction = ..., group: AnyGroup = ..., *, async_op: Literal[True]
) -> Work:
    """Reduce a tensor over all ranks; rank `r` gets block `r` of the result."""

@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Reduction = ..., group: AnyGroup = ..., async_op: bool = ...
) -> Work | None:
    """Reduce a tensor over all ranks; rank `r` gets block `r` of the result."""

@overload
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = ...,
    src: int | None = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
) -> None:
    """Scatter a list of one rank, the source: every rank gets one of its tensors."""

@overload
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = ...,
    src: int | None = ...,
    group: AnyGroup = ...,
    *,
    async_op: Literal[True],
    group_src: int | None = ...,
) -> Work:
    """Scatter a list of one rank, the source: every rank gets one of its tensors."""

@overload
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = ...,
    src: int | None = ...,
    group: AnyGroup = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
) -> Work | None:
    """Scatter a list of one rank, the source: every rank gets one of its tensors."""

def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = ...,
    src: int | None = ...,
    group: AnyGroup = ...,
    group_src: int | None = ...,
    weights_only: bool = ...,
) -> None:
    """Scatter a list of objects of one rank, the source: every rank gets one of them."""

def send(
    tensor: Tensor, dst: int | None = ..., group: AnyGroup = ..., tag: int = ..., group_dst: int | None = ...
) -> None:
    """Send a tensor to one rank, and return when that rank has received it."""

def send_object_list(
    object_list: list[Any],
    dst: int | None = ...,
    group: AnyGroup = ...,
    device: torch.device | None = ...,
    group_dst: int | None = ...,
    use_batch: bool = ...,
    weights_only: bool = ...,
) -> None:
    """Send a list of objects to one rank, and return when that rank has received it."""

def set_timeout(timeout: timedelta, group: AnyGroup = ...) -> None:
    """Set the time-out of a group for all calls that begin from now on. Since torch 2.14."""

def shrink_group(
    ranks_to_exclude: list[int], group: AnyGroup = ..., shrink_flags: int = ..., pg_options: Any = ...
) -> ProcessGroup:
    """Replace a group by a new one without some of its ranks. Only the ranks that remain call this."""

def split_group(
    parent_pg: AnyGroup = ...,
    split_ranks: Sequence[Sequence[int]] | None = ...,
    timeout: timedelta | None = ...,
    pg_options: Any = ...,
    group_desc: str | None = ...,
    backend: str | None = ...,
) -> ProcessGroup | None:
    """Split a group into disjoint groups. All members of the group call this, and no other rank."""
