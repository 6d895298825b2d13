"""Import paths that exist only because torch has them: one table, and one finder that serves its rows as modules.

``torchdist_ref.device_mesh`` has no file: the names that torch has there live in `torchdist_ref.groups`. Importing such
a path makes a module whose names are looked up in their homes when they are used. Until then nothing else is imported,
nor is torch. The `__module__` of a class is its home; a pickle that names the path finds the class through the table.

To serve another path, or a former one that pickles may name, add a row to `ROWS`. Do not add code for one path here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["PATHS", "ROWS", "install", "stubs"]

PACKAGE = "torchdist_ref"
TORCH = "torch.distributed"
EVERYTHING = "*"

# A row: the path below this package; the module of ours that has the names, or `torch` for torch's module at the same
# path; the names, or `*` for all that the module has. A path may have several rows; a name precedes `*`. Modules below
# a path whose names are all torch's are torch's too: they work on our groups, since torch's default group is ours.
ROWS = """
device_mesh                                groups    DeviceMesh init_device_mesh

multiprocessing                            launcher.spawning   ProcessContext ProcessException ProcessExitedException
multiprocessing                            launcher.spawning   ProcessRaisedException SpawnContext spawn
multiprocessing                            launcher.spawning   start_processes

elastic.utils                              elastic.bootstrap    get_env_variable_or_raise
elastic.utils                              elastic.bootstrap    get_socket_with_port macros
elastic.utils.api                          elastic.bootstrap    get_env_variable_or_raise
elastic.utils.api                          elastic.bootstrap    get_socket_with_port macros
elastic.utils.data                         elastic.data         CyclingIterator ElasticDistributedSampler
elastic.utils.data.cycling_iterator        elastic.data         CyclingIterator
elastic.utils.data.elastic_distributed_sampler elastic.data     ElasticDistributedSampler
elastic.utils.distributed                  elastic.bootstrap    create_c10d_store get_free_port get_socket_with_port
elastic.utils.log_level                    elastic.bootstrap    get_log_level
elastic.utils.logging                      elastic.bootstrap    get_logger
elastic.utils.store                        elastic.bootstrap    barrier get_all store_timeout synchronize

groups.backend_names                       groups.queries         Backend
groups.batches                             groups.point_to_point  P2POp batch_isend_irecv
groups.exchanges                           groups.alltoall        all_to_all_single
groups.gathering                           groups.alltoall        all_to_all
groups.gathering                           groups.gather_scatter  all_gather all_gather_into_tensor gather scatter
groups.group                               groups.world           GroupMember ProcessGroup
groups.reduce_scattering                   groups.gather_scatter  reduce_scatter reduce_scatter_tensor
utilities.gathering                        utilities.distributed  AllGatherGrad gather_all_tensors

pipeline.sync                              pipeline.pipe        Pipe WithDevice
pipeline.sync                              pipeline.execution   NoChunk
pipeline.sync                              pipeline.checkpoint  is_checkpointing is_recomputing
pipeline.sync.batchnorm                    pipeline.batchnorm   DeferredBatchNorm
pipeline.sync.checkpoint                   pipeline.checkpoint  checkpoint is_checkpointing is_recomputing
pipeline.sync.dependency                   pipeline.execution   depend
pipeline.sync.microbatch                   pipeline.execution   Batch NoChunk gather scatter
pipeline.sync.partitions                   pipeline.pipe        Partition split
pipeline.sync.pipe                         pipeline.pipe        BalanceError LocalResult Pipe PipeSequential WithDevice
pipeline.sync.pipeline                     pipeline.execution   Pipeline
pipeline.sync.schedule                     pipeline.execution   clock_cycles draw
pipeline.sync.skip                         pipeline.skip        Namespace pop skippable stash verify_skippables
pipeline.sync.skip.namespace               pipeline.skip        Namespace
pipeline.sync.skip.skippable               pipeline.skip        Skippable pop skippable stash verify_skippables
pipeline.sync.utils                        pipeline.pipe        partition_model

parallel.bucket                           algorithms.bucket    GradBucket
nn.rooted                                  nn.functional        broadcast gather reduce scatter
nn.symmetric                               nn.functional        all_gather all_reduce all_to_all
nn.symmetric                               nn.functional        all_to_all_single reduce_scatter
benchmark.hooks_timeline                   benchmark.hooks_watch    picture
benchmark.hooks_pictures                   benchmark.hooks_watch    picture

distributed_c10d                           groups    Backend DebugLevel GroupMember P2POp ProcessGroup ReduceOp Work
distributed_c10d                           groups    all_gather all_gather_coalesced all_gather_into_tensor
distributed_c10d                           groups    all_gather_object all_gather_single all_reduce
distributed_c10d                           groups    all_reduce_coalesced all_to_all all_to_all_single barrier
distributed_c10d                           groups    batch_isend_irecv broadcast broadcast_object_list
distributed_c10d                           groups    default_pg_timeout destroy_process_group gather gather_into_tensor
distributed_c10d                           groups    gather_object gather_single get_backend get_backend_config
distributed_c10d                           groups    get_backend_impl get_debug_level set_timeout
distributed_c10d                           groups    get_default_backend_for_device
distributed_c10d                           groups    get_global_rank get_group_rank get_node_local_rank get_pg_count
distributed_c10d                           groups    get_process_group_ranks get_rank get_world_size init_process_group
distributed_c10d                           groups    irecv is_backend_available is_gloo_available is_initialized
distributed_c10d                           groups    is_mpi_available is_nccl_available is_torchelastic_launched
distributed_c10d                           groups    is_ucc_available is_xccl_available isend monitored_barrier
distributed_c10d                           groups    new_group new_subgroups new_subgroups_by_enumeration recv
distributed_c10d                           groups    recv_object_list reduce reduce_op reduce_scatter
distributed_c10d                           groups    reduce_scatter_single reduce_scatter_tensor scatter
distributed_c10d                           groups    scatter_object_list send send_object_list shrink_group split_group
distributed_c10d                           groups    supports_complex
distributed_c10d                           stores.prefix    PrefixStore
distributed_c10d                           stores.base    Store
distributed_c10d                           groups.world    group
distributed_c10d                           torch     *

tensor                                     torch     *
fsdp                                       torch     *
checkpoint                                 torch     *
pipelining                                 torch     *
rpc                                        torch     *
autograd                                   torch     *
utils                                      torch     *
constants                                  torch     *
collective_utils                           torch     *
remote_device                              torch     *
flight_recorder                            torch     *
run                                        launch    *
c10d_logger                                torch     *
config                                     torch     *
logging_handlers                           torch     *
_tensor                                    torch     *
_shard                                     torch     *
_composable                                torch     *
_functional_collectives                    torch     *
_symmetric_memory                          torch     *
_checkpointable                            torch     *
_mesh_layout                               torch     *
_pycute                                    torch     *
_meta_registrations                        torch     *
algorithms._checkpoint                     torch     *
algorithms._comm_hooks                     torch     *
algorithms._optimizer_overlap              torch     *
algorithms._quantization                   torch     *
optim.apply_optimizer_in_backward          torch     *
optim.named_optimizer                      torch     *
optim.optimizer                            torch     *
optim.utils                                torch     *
elastic.agent                              torch     *
elastic.control_plane                      torch     *
elastic.events                             torch     *
elastic.metrics                            torch     *
elastic.multiprocessing                    launcher.contexts   MultiprocessContext PContext RunProcsResult
elastic.multiprocessing                    launcher.contexts   SubprocessContext start_processes
elastic.multiprocessing                    launcher.child_failures ProcessFailure SignalException
elastic.multiprocessing                    launcher.logs       DefaultLogsSpecs LogsDest LogsSpecs Std to_map
elastic.multiprocessing                    torch     *
elastic.multiprocessing.api                launcher.contexts   MultiprocessContext PContext RunProcsResult
elastic.multiprocessing.api                launcher.contexts   SubprocessContext
elastic.multiprocessing.api                launcher.child_failures SignalException
elastic.multiprocessing.api                launcher.logs       DefaultLogsSpecs LogsDest LogsSpecs Std to_map
elastic.multiprocessing.api                torch     *
elastic.multiprocessing.errors             launcher.child_failures ChildFailedError ProcessFailure
elastic.multiprocessing.errors             launcher.error_handler ErrorHandler get_error_handler
elastic.multiprocessing.errors             launcher.record     record
elastic.multiprocessing.errors             torch     *
elastic.rendezvous                         torch     *
elastic.timer                              torch     *

nn.api.remote_module                       torch     RemoteModule
nn.jit.instantiator                        torch     get_arg_return_types_from_interface
nn.jit.instantiator                        torch     instantiate_non_scriptable_remote_module_template
nn.jit.instantiator                        torch     instantiate_scriptable_remote_module_template
nn.jit.templates.remote_module_template    torch     get_remote_module_template

algorithms.ddp_comm_hooks.debugging_hooks       algorithms.ddp_comm_hooks.default_hooks           noop_hook
algorithms.ddp_comm_hooks.mixed_precision_hooks algorithms.ddp_comm_hooks.optimizer_overlap_hooks *
algorithms.ddp_comm_hooks.post_localSGD_hook    algorithms.ddp_comm_hooks.default_hooks           PostLocalSGDState
algorithms.ddp_comm_hooks.post_localSGD_hook    algorithms.ddp_comm_hooks.default_hooks           post_localSGD_hook
algorithms.model_averaging.hierarchical_model_averager algorithms.model_averaging.averagers HierarchicalModelAverager
algorithms.model_averaging.utils                algorithms.model_averaging.averagers              average_parameters
algorithms.model_averaging.utils                algorithms.model_averaging.averagers              get_params_to_average
algorithms.model_averaging.utils    algorithms.model_averaging.averagers    average_parameters_or_parameter_groups

algorithms.ddp_comm_hooks.builtin               algorithms.ddp_comm_hooks.default_hooks           BuiltinCommHookType
algorithms.ddp_comm_hooks.powerSGD_state        algorithms.ddp_comm_hooks.powerSGD_hook           Layout
algorithms.ddp_comm_hooks.powerSGD_state        algorithms.ddp_comm_hooks.powerSGD_hook           PowerSGDState
algorithms.ddp_comm_hooks.powerSGD_state        algorithms.ddp_comm_hooks.powerSGD_hook           SeedStream
parallel.options                                parallel.bucketing                                Entry
parallel.options                                parallel.bucketing                                Options
parallel.precision                              parallel.modes                                    MixedPrecision
"""

# torch's modules below these need its RPC, which a torch may be built without.
NEED_RPC = ("torch.distributed.nn.", "torch.distributed.rpc")


def _paths() -> dict[str, dict[str, str]]:
    """Return the homes of the names of each path, packages that have no names of their own included."""
    found: dict[str, dict[str, str]] = {}
    for path, module, *names in map(str.split, filter(None, ROWS.splitlines())):
        home = f"{TORCH}.{path}" if module == "torch" else f"{PACKAGE}.{module}"
        parents = path.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            found.setdefault(".".join(parents[:depth]), {})
        found.setdefault(path, {}).update(dict.fromkeys(names, home))
    return {path: names for path, names in found.items() if names or not _file(f"{PACKAGE}.{path}")}


def _file(module: str) -> str | None:
    """Return the file of a module of ours; None if it has none."""
    base = Path(__file__).parent.joinpath(*module.split(".")[1:])
    if module.partition(".")[0] != PACKAGE:
        return None
    return next((str(file) for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


PATHS = _paths()


def names_at(path: str) -> dict[str, str]:
    """Return the homes of the names of a path; of a module below one that is torch's, torch's module for all."""
    names = PATHS.get(path)
    if names is None:
        parents = path.split(".")[:-1]
        above = [PATHS.get(".".join(parents[:depth]), {}) for depth in range(1, len(parents) + 1)]
        is_torchs = any(names.get(EVERYTHING, "").startswith(TORCH) for names in above)
        names = {EVERYTHING: f"{TORCH}.{path}"} if is_torchs and _torch_has(path) else {}
    return names


def _children(path: str) -> list[str]:
    """Return the last parts of the paths directly below one."""
    return sorted(tail for other in PATHS if (tail := other.removeprefix(f"{path}.")) != other and "." not in tail)


class _PathModule(ModuleType):
    """Module of a path: its names are looked up in their homes."""

    def __init__(self, name: str) -> None:
        path = name.removeprefix(f"{PACKAGE}.")
        super().__init__(name, _description(path))
        if EVERYTHING not in names_at(path):
            self.__all__ = sorted(names_at(path))

    def __getattr__(self, name: str) -> Any:
        return _value(self.__name__.removeprefix(f"{PACKAGE}."), name)

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets each imported submodule on its parent; a name of the table, such as a function, has precedence.
        if not isinstance(value, _PathModule) or name not in names_at(self.__name__.removeprefix(f"{PACKAGE}.")):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        path = self.__name__.removeprefix(f"{PACKAGE}.")
        names = set(names_at(path))
        if EVERYTHING in names:
            names = (names - {EVERYTHING}) | set(dir(_load(names_at(path)[EVERYTHING], EVERYTHING)))
        return sorted({*vars(self), *names, *_children(path)})


class _PathLoader:
    """Loader of the paths in the table. No `importlib.abc.Loader`: that module imports much that a launcher lacks."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of a path."""
        return _PathModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the names are looked up when they are used."""

    def get_code(self, fullname: str) -> CodeType:
        """Return a program that runs torch's module of this path, for ``python -m``."""
        home = names_at(fullname.removeprefix(f"{PACKAGE}.")).get(EVERYTHING, "")
        program = f"import runpy, sys\nsys.argv[0] = {fullname!r}\nrunpy.run_module({home!r}, run_name='__main__')"
        return compile(program, fullname, "exec")


class _PathFinder:
    """Finder of the paths in the table. It is the first finder: a leftover folder without files would hide a path."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a path in the table, with the file of its home."""
        head, _, tail = fullname.partition(".")
        if head != PACKAGE or not (tail in PATHS or names_at(tail)):
            return None
        names = names_at(tail)
        file = next(filter(None, map(_file, names.values())), None)
        is_package = bool(_children(tail)) or (EVERYTHING in names and _torch_has(tail, packages_only=True) != "")
        loader: Any = _PathLoader()
        spec = ModuleSpec(fullname, loader, origin=file, is_package=is_package)
        spec.has_location = file is not None
        return spec


class _AbsentFinder:
    """Last finder, for an error that names torch's module where this package has none of the name."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError if torch has a module at this path.

        Raises:
            ModuleNotFoundError: With the module to import instead.
        """
        head, _, tail = fullname.partition(".")
        if head == PACKAGE and (theirs := _torch_has(tail)):
            text = (
                f"No module named {fullname!r}: it is torch's own and works on this package's groups; import {theirs}."
            )
            raise ModuleNotFoundError(text, name=fullname)


def _torch_has(path: str, packages_only: bool = False) -> str:
    """Return the name of torch's module or package of this path, or nothing; torch is not imported for it."""
    torch = importlib.util.find_spec("torch")
    parts = [*TORCH.split(".")[1:], *path.split(".")]
    for folder in (torch.submodule_search_locations or ()) if torch else ():
        base = Path(folder).joinpath(*parts)
        if (base / "__init__.py").is_file() or (not packages_only and base.with_suffix(".py").is_file()):
            return f"{TORCH}.{path}"
    return ""


def install() -> None:
    """Let the import system find the paths of the table. Called once, when the package is imported."""
    if not any(isinstance(finder, _PathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PathFinder())
        sys.meta_path.append(_AbsentFinder())


def _description(path: str) -> str:
    """Return the docstring of a path."""
    names = names_at(path)
    homes = ", ".join(f"`{home}`" for home in dict.fromkeys(names.values()))
    listed = ", ".join(_children(path))
    if names:
        below = f" Modules below: {listed}." if listed else ""
        return f"Import path of torch's; its names live in {homes}.{below}"
    return f"Package of torch's, with the modules {listed}."


def _value(path: str, name: str) -> Any:
    """Return what a path has under a name.

    Raises:
        AttributeError: There is no such name.
        UnsupportedError: It is torch's own, and this torch was built without what it needs.
    """
    names, module = names_at(path), f"{PACKAGE}.{path}"
    if name in _children(path) and name not in names:
        return importlib.import_module(f"{module}.{name}")
    home = names.get(name) or (names.get(EVERYTHING) if name == "__all__" or not name.startswith("__") else None)
    if home is None:
        hint = f"; it has {', '.join(sorted(names))}" if names and EVERYTHING not in names else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
    found = _load(home, name)
    try:
        value = getattr(found, name)
        # An older torch lacks some names that are ours at this path.
        return value if name != "__all__" else sorted({*value, *names} - {EVERYTHING})
    except AttributeError:
        if home.startswith(TORCH) and _torch_has(f"{path}.{name}"):
            return importlib.import_module(f"{home}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}, nor has {home!r}") from None


def _load(home: str, name: str) -> ModuleType:
    """Return the module that has a name, imported."""
    if home.startswith(NEED_RPC):
        from torch.distributed import rpc

        from torchdist_ref.errors import UnsupportedError

        if not rpc.is_available():
            raise UnsupportedError(f"{name}: it is torch's own and needs RPC, which this torch was built without.")
    with warnings.catch_warnings():
        if not home.startswith(PACKAGE):
            # Importing some of torch's modules runs deprecated parts of torch, which the caller did not ask for.
            warnings.simplefilter("ignore")
        return importlib.import_module(home)


def stubs() -> Iterator[tuple[str, str]]:
    """Yield, for each path, a stub file for type checkers: its location below the package, and its text.

    Type checkers look for files, so the wheel has these beside the package's own; a checkout does not.

    >>> dict(stubs())["device_mesh.pyi"].splitlines()[1]
    'from torchdist_ref.groups import init_device_mesh as init_device_mesh'
    """
    for path, names in PATHS.items():
        lines = [
            f"from {home} import {name}" + ("" if name == EVERYTHING else f" as {name}")
            for name, home in sorted(names.items())
        ]
        file = path.replace(".", "/") + ("/__init__.pyi" if _children(path) else ".pyi")
        yield file, "".join(f"{line}\n" for line in lines)
