"""Private names of torch on which the library depends: one accessor each, with its purpose and the versions seen.

torch may rename or remove a private name in any release. A name that is missing raises `UnsupportedError` where it is
needed, and nowhere else. A torch newer than all that were tested causes one warning. The page "Stability" shows the
table `NAMES`.

A test holds that no other module of the library uses a private name of torch. Do not add names that torch documents.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, cast

import torch

from torchdist_ref.errors import UnsupportedError

# Releases of torch in which `tests/torch_internals/test_torch_private.py` found every name.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")


@dataclass(frozen=True)
class PrivateName:
    """Private name of torch.

    Attributes:
        module: Module to import.
        path: Attributes from there, joined by dots.
        purpose: Use that the library makes of it.
        without: Consequence if torch lacks it.
        versions: Releases of torch in which it was seen.
    """

    module: str
    path: str
    purpose: str
    without: str
    versions: tuple[str, ...] = TESTED

    def __str__(self) -> str:
        """Return the full name."""
        return f"{self.module}.{self.path}"

    def get(self) -> Any:
        """Return the object that has the name now.

        Raises:
            UnsupportedError: The installed torch lacks it.
        """
        found = self._find()
        return self.refuse() if found is _ABSENT else found

    def exists(self) -> bool:
        """Return whether the installed torch has the name."""
        return self._find() is not _ABSENT

    def bind(self) -> Any:
        """Return the object, or one whose first use raises: for modules that bind the name when they are loaded."""
        found = self._find()
        return Missing(self) if found is _ABSENT else found

    def reader(self) -> Callable[[], Any]:
        """Return a function that returns the object that has the name at that time, without a call of Python."""
        if not self.exists():
            return cast("Callable[[], Any]", Missing(self))
        return partial(attrgetter(self.path), importlib.import_module(self.module))

    def _find(self) -> Any:
        """Return the object, or `_ABSENT`: to make an error compiles the patterns of the error index, 0.1 s."""
        _warn_of_untested_torch()
        try:
            found: Any = importlib.import_module(self.module)
            for attribute in self.path.split("."):
                found = getattr(found, attribute)
        except (ImportError, AttributeError):
            return _ABSENT
        return found

    def of(self, owner: Any) -> Any:
        """Return the attribute of this name, the last part of the path, of an object.

        Raises:
            UnsupportedError: The object lacks it.
        """
        _warn_of_untested_torch()
        try:
            return getattr(owner, self.path.rpartition(".")[2])
        except AttributeError:
            self.refuse()

    def set(self, value: Any) -> None:
        """Give the name another object.

        Raises:
            UnsupportedError: The installed torch lacks the name, so nothing would read it.
        """
        self.get()
        owner: Any = importlib.import_module(self.module)
        *parents, last = self.path.split(".")
        for attribute in parents:
            owner = getattr(owner, attribute)
        setattr(owner, last, value)

    def refuse(self) -> NoReturn:
        """Raise the error for a name that torch lacks."""
        raise UnsupportedError(
            f"torch {torch.__version__} has no {self}, a private name that this library needs: {self.purpose}. Without "
            f"it: {self.without}. It was seen in torch {', '.join(self.versions)}; install one of these, or a newer "
            f"torchdist_ref."
        )


_ABSENT = object()


class Missing:
    """Object in place of a private name that torch lacks: every use raises."""

    def __init__(self, name: PrivateName) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise."""
        self._name.refuse()

    def __getattr__(self, attribute: str) -> NoReturn:
        self._name.refuse()


warned = False


def _warn_of_untested_torch() -> None:
    """Warn once per process if torch is newer than all tested releases."""
    global warned
    if warned:
        return
    warned = True
    if _release(torch.__version__) > _release(TESTED[-1]):
        warnings.warn(
            f"torchdist_ref was tested with torch {TESTED[0]} to {TESTED[-1]}, and this is torch {torch.__version__}. "
            f"It depends on private names of torch. A name that is missing raises UnsupportedError where it is needed; "
            f"one whose meaning has changed goes unnoticed. See the page 'Stability' of the documentation.",
            RuntimeWarning,
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


_C10D = "torch.distributed.distributed_c10d"
_NATIVE = "torch._C._distributed_c10d"
_NO_INIT = "`init_process_group` raises"
_NO_DDP = "`DistributedDataParallel` raises"
_NO_THREADS = "ranks that are threads cannot initialize"

# One default group with torch.
TABLES = PrivateName(_C10D, "_world", "torch's tables of process groups, where ours are registered", _NO_INIT)
TABLES_CLASS = PrivateName(_C10D, "_World", "base class of the tables of a rank that is a thread", _NO_INIT)
SET_DEFAULT_GROUP = PrivateName(_C10D, "_update_default_pg", "makes our default group torch's", _NO_INIT)
REGISTER_NAME = PrivateName(
    _NATIVE, "_register_process_group", "adds a group to the names that functional collectives use", _NO_INIT
)
UNREGISTER_NAME = PrivateName(
    _NATIVE, "_unregister_process_group", "removes a group from these names", "`destroy_process_group` raises"
)
OBJECT_TO_TENSOR = PrivateName(
    _C10D,
    "_object_to_tensor",
    "pickles for torch's object collectives; ours sends plain data where ranks are not authenticated",
    _NO_INIT,
)
TENSOR_TO_OBJECT = PrivateName(
    _C10D, "_tensor_to_object", "unpickles for them; ours runs no code of ranks that are not authenticated", _NO_INIT
)
CREATE_STORE = PrivateName(
    "torch.distributed.rendezvous",
    "_create_c10d_store",
    "starts the server of torch's RPC; beside our default group it uses ours, at the same address",
    _NO_INIT,
)
RESOLVE_NAME = PrivateName(_NATIVE, "_resolve_process_group", "finds a group by such a name", _NO_INIT)
NAMES_PER_THREAD = PrivateName(_NATIVE, "_set_thread_isolation_mode", "keeps these names per thread", _NO_THREADS)
COMPILE_CONTEXT = PrivateName(
    "torch._guards", "CompileContext", "tells whether torch.compile is reading a function", _NO_INIT
)
ACTIVE_DDP = PrivateName(
    "torch.nn.parallel",
    "DistributedDataParallel._active_ddp_module",
    "is cleared after ranks that were threads, so that a later compilation does not use their module",
    "the last rank that is a thread cannot destroy its groups",
)
RPC_RUNS = PrivateName(
    "torch.distributed.rpc", "_is_current_rpc_agent_set", "decides whether `Pipe` returns an RRef", "`Pipe` raises"
)

# Backends, and `ref` inside torch.
PLUGINS = PrivateName(
    "torch.distributed", "Backend._plugins", "backends that others registered with torch", "these backends are unknown"
)
PLUGIN_OPTIONS = PrivateName(
    _NATIVE, "_DistributedBackendOptions", "argument of such a backend's constructor", "these backends cannot start"
)
BACKEND_OPTIONS = PrivateName(
    _NATIVE,
    "Backend.Options",
    "class of a backend's options, which `init_process_group` and `new_group` accept on any backend",
    "`pg_options` raises on backends without options",
)
BACKEND_OF_GROUP = PrivateName(
    "torch.distributed",
    "ProcessGroup._get_backend",
    "connection of a group that torch made",
    "our functions refuse groups that torch made",
)
SOURCE_RANK = PrivateName(
    "torch.distributed",
    "Work._source_rank",
    "sender of a message received from any rank",
    "the sender is reported as -1",
)
START_COALESCING = PrivateName(
    _NATIVE, "Backend._start_coalescing", "begins a batch of sends and receives on nccl", "these batches raise"
)
END_COALESCING = PrivateName(_NATIVE, "Backend._end_coalescing", "ends such a batch", "these batches raise")
EXEC_STRATEGY = PrivateName(
    "torch._C._dynamo.eval_frame",
    "_FrameExecStrategy",
    "excludes the methods that C++ calls from torch.compile",
    "torch raises when it compiles a program that uses `ref`",
)
EXEC_ACTION = PrivateName(
    "torch._C._dynamo.eval_frame", "_FrameAction", "the same", "torch raises when it compiles a program that uses `ref`"
)
SET_EXEC_STRATEGY = PrivateName(
    "torch._C._dynamo.eval_frame",
    "set_code_exec_strategy",
    "the same",
    "torch raises when it compiles a program that uses `ref`",
)
SELF_RECORDING = PrivateName(
    _C10D,
    "_FR_SELF_RECORDING_BACKENDS",
    "tells torch 2.15 that `ref` records its own calls",
    "torch's flight recorder attaches to groups on `ref`, where older releases have none",
    ("2.15",),
)
TREE_LEAVES = PrivateName(
    "torch.utils._pytree", "tree_leaves", "finds a failed result among operands", "`ref` inside torch raises"
)
MAKE_WRAPPER = PrivateName(
    "torch", "Tensor._make_wrapper_subclass", "makes the value of a failed future", "a failed call raises this error"
)
DISPATCH_MODES = PrivateName(
    "torch._C",
    "_len_torch_dispatch_stack",
    "tells at each call whether a mode of torch's dispatcher runs",
    "calls raise",
)
TRACED = PrivateName("torch._C", "_is_tracing", "tells at each call whether `torch.jit.trace` runs", "calls raise")
BOX_GROUP = PrivateName(
    _NATIVE, "ProcessGroup.boxed", "passes a group to the dispatcher in a call", "calls in such modes raise"
)
UNBOX_GROUP = PrivateName(
    _NATIVE, "ProcessGroup.unbox", "finds the group of a call that passes the dispatcher", "calls in such modes raise"
)
PROXY_MODE = PrivateName(
    "torch.fx.experimental.proxy_tensor",
    "get_proxy_mode",
    "finds out whether make_fx records a call in such a mode",
    "calls in such modes raise",
)
BOX_WORK = PrivateName(_NATIVE, "Work.boxed", "returns a Work to the dispatcher", "calls in such modes raise")
WORK_OF_FUTURE = PrivateName(
    _NATIVE, "_create_work_from_future", "makes the Work that the dispatcher returns", "calls in such modes raise"
)
REGISTER_WORK = PrivateName(
    _NATIVE,
    "_register_work",
    "lets `wait_tensor` wait for a functional collective",
    "`all_gather_into_tensor_out` raises",
)
PROFILER_ENABLED = PrivateName(
    "torch.autograd", "_profiler_enabled", "tells at each call whether a profiler runs", "calls raise"
)
PROFILER_RUNS = PrivateName(
    "torch.autograd.profiler", "_is_profiler_enabled", "the same, when a call ends", "profiled calls fail"
)
END_RANGE_LATER = PrivateName(
    "torch.autograd.profiler",
    "record_function._call_end_callbacks_on_future",
    "ends the profiler's range of an asynchronous call",
    "profiled asynchronous calls raise",
)

# Training.
AUTOGRAD = PrivateName(
    "torch.autograd", "Variable._execution_engine", "queues the end of backward", "backward of DDP raises"
)
WILL_EXECUTE = PrivateName(
    "torch._C",
    "_will_engine_execute_node",
    "tells a backward pass that accumulates gradients from `torch.autograd.grad`",
    "DDP with unused parameters or a static graph raises",
)
COPY_MANY = PrivateName("torch", "_foreach_copy_", "copies gradients to buckets", "backward of DDP raises")
SCALE_MANY = PrivateName("torch", "_foreach_mul_", "divides gradients", "backward of DDP raises")
FUNCTIONAL = PrivateName(
    "torch",
    "ops._c10d_functional",
    "operators of functional collectives; two call what a group in Python cannot have",
    _NO_INIT,
)
ASYNC_TENSOR = PrivateName(
    "torch.distributed._functional_collectives",
    "AsyncCollectiveTensor",
    "recognizes results of functional collectives that nobody has waited for",
    "collectives refuse them",
)
IS_TRANSFORMED = PrivateName(
    "torch._C._functorch",
    "is_gradtrackingtensor",
    "recognizes tensors in `torch.func.grad` and `jvp`",
    "collectives on tensors that are not in memory raise this error",
)
IS_FUNCTIONAL = PrivateName(
    "torch._C._functorch", "is_functionaltensor", "recognizes tensors in `torch.func.functionalize`", "the same"
)
SYNC_VIEWS = PrivateName("torch", "_sync", "applies changes of views of these tensors", "calls on these tensors raise")
UNWRAPPED = PrivateName(
    "torch._C._functorch", "get_unwrapped", "finds the tensor in memory inside these tensors", "calls on them raise"
)
FORCE_DISPATCH = PrivateName(
    "torch._C", "_ForceDispatchKeyGuard", "keeps the modes of the caller off the memory of a backend", "calls raise"
)
DISPATCH_KEYS = PrivateName("torch._C", "DispatchKeySet", "modes that this leaves", "the same")
DISPATCH_KEY = PrivateName("torch._C", "DispatchKey", "the same", "the same")
KEY_OF_DEVICE = PrivateName(
    "torch._C", "_dispatch_key_for_device", "kernels for the type of an accelerator", "modes do not see calls there"
)
FUNCTION_MODE_ENABLED = PrivateName(
    "torch._C", "_is_torch_function_mode_enabled", "tells whether a mode intercepts functions in Python", "the same"
)
TRANSFORMS = PrivateName(
    "torch._C", "_are_functorch_transforms_active", "tells whether a transform of `torch.func` runs", "the same"
)
WITHOUT_FUNCTION_MODES = PrivateName("torch._C", "DisableTorchFunction", "leaves these modes", "the same")
FUTURE = PrivateName("torch._C", "Future", "base class of the futures that hooks may return", _NO_DDP)
DISPATCH_MODE = PrivateName(
    "torch.utils._python_dispatch", "TorchDispatchMode", "gives dropout in `Pipe` its generator", "`Pipe` raises"
)
BATCH_NORM = PrivateName(
    "torch.nn.modules.batchnorm", "_BatchNorm", "base class of deferred batch norm in `Pipe`", "`Pipe` raises"
)
COMPILER = PrivateName("torch._dynamo", "disable", "has the benchmark load the compiler first", "the benchmark raises")
PREMUL_SUM = PrivateName(
    "torch.distributed", "_make_nccl_premul_sum", "reduction that `check_backend` tries", "`check_backend` raises"
)

# Each name by its accessor, in the order above.
NAMES = {accessor: name for accessor, name in globals().items() if isinstance(name, PrivateName)}
