"""Import paths that exist only because torch has them: every use of a module works through the finder."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import pydoc
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import layers
import pytest
import torch
from torch.distributed import rpc

import torchdist_ref as dist
from tests.drop_in.packages import ROWS
from torchdist_ref import groups, torch_paths
from torchdist_ref.pipeline.pipe import Pipe, partition_model
from torchdist_ref.testing import fill

PACKAGE = Path(dist.__file__).parent
RPC_NAMES = {
    "api.remote_module": ["RemoteModule"],
    "jit.instantiator": [
        "get_arg_return_types_from_interface",
        "instantiate_non_scriptable_remote_module_template",
        "instantiate_scriptable_remote_module_template",
    ],
    "jit.templates.remote_module_template": ["get_remote_module_template"],
}
needs_rpc = pytest.mark.skipif(not rpc.is_available(), reason="this torch has no remote calls")
OURS = [
    (path, name, home)
    for path, names in torch_paths.PATHS.items()
    for name, home in names.items()
    if "torch." not in home and name != torch_paths.EVERYTHING
]


def output(program: str, python: str = sys.executable) -> str:
    """Run a program in an interpreter, a fresh one by default, and return what it printed."""
    command = [python, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(("path", "name", "home"), OURS)
def test_a_name_at_a_path_is_that_of_its_home(path: str, name: str, home: str) -> None:
    module = importlib.import_module(f"torchdist_ref.{path}")
    assert getattr(module, name) is getattr(importlib.import_module(home), name)
    assert name in module.__all__ and name in dir(module)


def test_a_path_in_the_table_has_no_file() -> None:
    modules = {layers.module_name(path).removeprefix("torchdist_ref.") for path in layers.files()}
    assert not modules & torch_paths.PATHS.keys()


def test_importing_a_path_imports_no_torch() -> None:
    program = """
        import sys
        import torchdist_ref.device_mesh, torchdist_ref.nn.api
        print("torch" in sys.modules, "torchdist_ref.groups" in sys.modules)
    """
    assert output(program.replace(", torchdist_ref.nn.api", "")) == "False False\n"


def test_statements_that_import() -> None:
    import torchdist_ref.device_mesh as module
    from torchdist_ref.device_mesh import DeviceMesh
    from torchdist_ref.nn.jit import instantiator

    from torchdist_ref import device_mesh

    assert module is device_mesh is sys.modules["torchdist_ref.device_mesh"]
    assert DeviceMesh is groups.DeviceMesh
    assert instantiator is dist.nn.jit.instantiator  # type: ignore[attr-defined]
    names: dict[str, object] = {}
    exec("from torchdist_ref.device_mesh import *", names)
    assert names["init_device_mesh"] is groups.init_device_mesh


def test_a_function_has_precedence_over_a_module_of_its_name() -> None:
    from torchdist_ref.pipeline import skip

    importlib.import_module("torchdist_ref.pipeline.sync.skip.skippable")
    assert importlib.import_module("torchdist_ref.pipeline.sync.skip").skippable is skip.skippable


def test_a_name_that_is_not_there_says_what_is() -> None:
    module = importlib.import_module("torchdist_ref.device_mesh")
    with pytest.raises(
        AttributeError, match=r"device_mesh' has no attribute 'Mesh'; it has DeviceMesh, init_device_mesh"
    ):
        module.Mesh  # noqa: B018
    with pytest.raises(ImportError, match="Mesh"):
        from torchdist_ref.device_mesh import Mesh  # noqa: F401


def test_a_module_that_only_torch_has_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'torchdist_ref._tools'.*import torch\.distributed\._tools"):
        importlib.import_module("torchdist_ref._tools")
    with pytest.raises(ModuleNotFoundError, match=r"'torchdist_ref\.nonsense'$"):
        importlib.import_module("torchdist_ref.nonsense")


def test_inspect_finds_source_and_module() -> None:
    module = importlib.import_module("torchdist_ref.device_mesh")
    assert inspect.getsource(module.init_device_mesh) == inspect.getsource(groups.init_device_mesh)
    assert inspect.getsourcefile(module) == groups.__file__
    assert inspect.getmodule(module.DeviceMesh) is inspect.getmodule(groups.DeviceMesh)
    assert ("DeviceMesh", groups.DeviceMesh) in inspect.getmembers(module, inspect.isclass)
    spec = importlib.util.find_spec("torchdist_ref.device_mesh")
    assert spec is not None and spec.origin == groups.__file__


def test_a_pickle_that_names_a_path_loads() -> None:
    # What protocol 0 writes for a class, or a function, is its module and its name.
    assert pickle.loads(b"ctorchdist_ref.device_mesh\nDeviceMesh\n.") is groups.DeviceMesh
    assert pickle.loads(pickle.dumps(groups.init_device_mesh)) is groups.init_device_mesh


def test_a_model_pickled_by_a_former_path_loads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    pipe = Pipe(partition_model(model, [2, 1], ["cpu", "cpu"]), chunks=2, deferred_batch_norm=True)
    # Protocol 0 is text with the path of each class on a line.
    former = pickle.dumps(pipe, protocol=0)
    for new, old in (
        ("pipe\nPipe", "sync.pipe\nPipe"),
        ("pipe\nPartition", "sync.partitions\nPartition"),
        ("execution\nPipeline", "sync.pipeline\nPipeline"),
        ("batchnorm\nDeferredBatchNorm", "sync.batchnorm\nDeferredBatchNorm"),
    ):
        assert f"torchdist_ref.pipeline.{new}".encode() in former
        former = former.replace(f"torchdist_ref.pipeline.{new}".encode(), f"torchdist_ref.pipeline.{old}".encode())
    loaded, batch = pickle.loads(former), fill(0, (6, 3))
    assert type(loaded) is Pipe
    assert torch.equal(loaded(batch).local_value(), pipe(batch).local_value())


def test_help_shows_the_names() -> None:
    text = pydoc.plain(pydoc.render_doc("torchdist_ref.device_mesh"))
    assert "Import path of torch's; its names live in `torchdist_ref.groups`." in text
    assert "class DeviceMesh" in text and "init_device_mesh(" in text
    assert pydoc.locate("torchdist_ref.device_mesh.DeviceMesh") is groups.DeviceMesh


def test_stubs_name_what_is_there() -> None:
    for file, text in torch_paths.stubs():
        path = file.removesuffix(".pyi").removesuffix("/__init__").replace("/", ".")
        shown = {line.split()[-1] for line in text.splitlines()}
        assert shown == set(torch_paths.PATHS[path])


def test_a_type_checker_finds_the_names(tmp_path: Path) -> None:
    """The checker sees what a wheel has: the package with the stubs beside its files."""
    mypy = pytest.importorskip("mypy.api", reason="the type checker is installed with the extra `lint` only")
    shutil.copytree(PACKAGE, tmp_path / "torchdist_ref")
    for file, text in torch_paths.stubs():
        (tmp_path / "torchdist_ref" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torchdist_ref" / file).write_text(text)
    program = tmp_path / "program.py"
    program.write_text(
        "from torchdist_ref.device_mesh import init_device_mesh\n"
        "from torchdist_ref.nn.api.remote_module import RemoteModule\n"
        "from torchdist_ref.device_mesh import nonsense\n"
    )
    # Modules behind the stubs are not followed: that takes a minute.
    flags = ["--follow-imports=skip", "--config-file=", f"--cache-dir={tmp_path / 'cache'}", "--no-color-output"]
    report, _, _ = mypy.run([*flags, str(program)])
    errors = [line for line in report.splitlines() if "error" in line]
    assert "program.py:3" in errors[0] and '"nonsense"' in errors[0] and len(errors) == 2


# Seconds: Sphinx loads, and loads the library.
@pytest.mark.long
def test_sphinx_documents_a_name_by_a_path(python_with_torch: str, tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="Sphinx is installed with the extra `docs` only")
    (tmp_path / "conf.py").write_text("extensions = ['sphinx.ext.autodoc']\n")
    (tmp_path / "index.rst").write_text(
        "Page\n====\n\n.. autofunction:: torchdist_ref.device_mesh.init_device_mesh\n\n"
        ".. automodule:: torchdist_ref.device_mesh\n   :members: DeviceMesh\n   :no-index:\n"
    )
    command = [python_with_torch, "-m", "sphinx", "-q", "-b", "text", str(tmp_path), str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    text = (tmp_path / "out" / "index.txt").read_text()
    assert (
        "torchdist_ref.device_mesh.init_device_mesh(" in text and "class torchdist_ref.device_mesh.DeviceMesh(" in text
    )


@needs_rpc
@pytest.mark.parametrize("module", RPC_NAMES)
def test_names_of_remote_modules_are_torchs(module: str) -> None:
    ours = importlib.import_module(f"torchdist_ref.nn.{module}")
    assert ours.__all__ == RPC_NAMES[module]
    found = [getattr(ours, name) for name in RPC_NAMES[module]]
    torchs = importlib.import_module(f"torch.distributed.nn.{module}")
    assert all(value is getattr(torchs, name) for value, name in zip(found, RPC_NAMES[module], strict=True))


@needs_rpc
def test_nn_shows_remote_module_too() -> None:
    from torchdist_ref.nn.api.remote_module import RemoteModule as same

    from torchdist_ref.nn import RemoteModule

    assert RemoteModule is same


@pytest.mark.parametrize("module", ["torchdist_ref.nn", *(f"torchdist_ref.nn.{module}" for module in RPC_NAMES)])
def test_other_names_are_not_there(module: str) -> None:
    with pytest.raises(AttributeError, match=f"{module}' has no attribute 'Remote'"):
        importlib.import_module(module).Remote  # noqa: B018


def test_a_torch_without_remote_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(dist.UnsupportedError, match="RemoteModule: it is torch's own and needs RPC"):
        importlib.import_module("torchdist_ref.nn.api.remote_module").RemoteModule  # noqa: B018


def test_remote_modules_are_loaded_when_used(python_with_torch: str) -> None:
    program = """
        import sys
        assert "torchdist_ref" not in sys.modules
        for name in [name for name in sys.modules if "torch.distributed.nn" in name]:
            del sys.modules[name]
        import torchdist_ref.nn, torchdist_ref.nn.api.remote_module
        print([name for name in sys.modules if "torch.distributed.nn" in name])
    """
    assert output(program, python_with_torch) == "[]\n"


def test_a_row_for_all_names_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_paths.PATHS, "everything", {torch_paths.EVERYTHING: "torch.futures"})
    module = importlib.import_module("torchdist_ref.everything")
    # Not by `monkeypatch`, which would put the module back.
    del sys.modules["torchdist_ref.everything"]
    delattr(dist, "everything")
    assert module.Future is torch.futures.Future and "collect_all" in dir(module)
    assert module.__all__ == torch.futures.__all__
    with pytest.raises(AttributeError, match=r"nor has 'torch\.futures'"):
        module.nonsense  # noqa: B018


# Names that torch's package shows at its top level without meaning them.
NOT_MEANT = {"contextlib", "log", "logging", "sys", "timedelta", "torch", "traceback", "typing", "_breakpoint_cache"}
BELOW = """
    import functools, os, sys, warnings
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    warnings.simplefilter("ignore")
    paths = {""}
    for name in [name for name in sys.modules if name.startswith("torch.distributed.")]:
        path = name.removeprefix("torch.distributed.").split(".")
        try:
            functools.reduce(getattr, path, torch.distributed)
            paths.add(".".join(path))
        except AttributeError:
            pass
    paths.update(vars(torch.distributed))
    assert "torchdist_ref" not in sys.modules
    import torchdist_ref as dist

    def has(path):
        try:
            functools.reduce(getattr, filter(None, path.split(".")), dist)
            return True
        except AttributeError:
            return False

    # Modules first: later names import them.
    modules = sorted(path for path in paths if f"torch.distributed.{path}" in sys.modules)
    print(*[path for path in [*modules, *sorted(paths)] if not path.startswith("__") and not has(path)])
    print(len(modules))
"""


def test_after_a_bare_import_each_attribute_of_torchs_package_is_ours_too() -> None:
    # In a new interpreter, 2 s: what an import leaves is the subject.
    absent, modules = output(BELOW).splitlines()
    # torch 2.13 and later have some more, for a package that few have.
    assert not [name for name in absent.split() if name not in NOT_MEANT and "_spmd_" not in name]
    assert int(modules) > 20


MODULES = "device_mesh distributed_c10d rpc utils constants algorithms.join nn optim elastic checkpoint tensor fsdp run"


@pytest.mark.parametrize("path", MODULES.split())
def test_a_module_is_an_attribute_after_a_bare_import(python_with_torch: str, path: str) -> None:
    program = f"""
        import torchdist_ref as dist
        module = dist.{path}
        print(module.__name__)
    """
    assert output(program, python_with_torch) == f"torchdist_ref.{path}\n"


def test_an_attribute_that_no_module_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'torchdist_ref' has no attribute 'all_reduc'$"):
        dist.all_reduc  # noqa: B018
    assert not hasattr(dist, "_tools") and not hasattr(dist, "nonsense")
    # A test that has run the program as a module has given the package this attribute.
    vars(dist).pop("__main__", None)
    assert not hasattr(dist, "__main__")


def test_optimizers_of_torchs_are_found_beside_ours() -> None:
    from torchdist_ref import optim as ours

    names = ["_apply_optimizer_in_backward", "_get_in_backward_optimizers", "_NamedOptimizer", "as_functional_optim"]
    names += ["DistributedOptimizer"] * rpc.is_available()
    # First: torch's own import warns of deprecated parts.
    found = [getattr(ours, name) for name in names]
    theirs = importlib.import_module("torch.distributed.optim")
    assert found == [getattr(theirs, name) for name in names]
    assert not hasattr(ours, "nonsense")


def test_hook_modules_have_torchs_short_names() -> None:
    from torch.distributed.algorithms import ddp_comm_hooks as theirs

    from torchdist_ref.algorithms import ddp_comm_hooks as ours

    assert callable(ours.optimizer_overlap._hook_then_optimizer)
    assert callable(theirs.optimizer_overlap._hook_then_optimizer)
    for name in ("default", "debugging", "debugging_hooks", "powerSGD", "quantization"):
        functions = [each for each in vars(getattr(theirs, name)) if each.endswith("_hook") and each[0] != "_"]
        assert functions and all(hasattr(getattr(ours, name), each) for each in functions), name


COMPANIONS = [path for path, names in torch_paths.PATHS.items() if names == {"*": f"torch.distributed.{path}"}]


def test_companions_are_torchs_own_and_modules_below_them_too(proof: Any) -> None:
    assert {"tensor", "fsdp", "checkpoint", "pipelining", "rpc", "autograd", "utils"} <= set(COMPANIONS)
    for path in (*COMPANIONS, "tensor.parallel", "checkpoint.state_dict", "elastic.rendezvous.dynamic_rendezvous"):
        ours = importlib.import_module(f"torchdist_ref.{path}")
        theirs = importlib.import_module(f"torch.distributed.{path}")
        # Modules below are found by path: `sys.modules` may have one under both names.
        names = [name for name in dir(theirs) if not name.startswith("__") and hasattr(theirs, name)]
        names = [name for name in names if not inspect.ismodule(getattr(theirs, name))]
        assert all(getattr(ours, name) is getattr(theirs, name) for name in names), path
    from torchdist_ref.checkpoint import state_dict as below

    assert below.get_model_state_dict.__module__ == "torch.distributed.checkpoint.state_dict"
    proof([name for name in COMPANIONS if name in ROWS], [], 0, "torch's own objects")
    with pytest.raises(ModuleNotFoundError, match=r"torchdist_ref.tensor.nonsense"):
        importlib.import_module("torchdist_ref.tensor.nonsense")
    with pytest.raises(
        AttributeError, match=r"tensor' has no attribute 'nonsense', nor has 'torch.distributed.tensor'"
    ):
        importlib.import_module("torchdist_ref.tensor").nonsense  # noqa: B018


def test_companions_import_no_torch_until_they_are_used() -> None:
    program = """
        import sys
        import torchdist_ref.tensor.parallel, torchdist_ref.checkpoint, torchdist_ref.distributed_c10d
        print("torch" in sys.modules)
    """
    assert output(program) == "False\n"


def test_the_module_of_functions_has_ours_and_torchs_private_ones() -> None:
    module = importlib.import_module("torchdist_ref.distributed_c10d")
    assert module.all_reduce is dist.all_reduce and module.PrefixStore is dist.PrefixStore
    theirs = importlib.import_module("torch.distributed.distributed_c10d")
    assert module._get_default_group is theirs._get_default_group is dist._get_default_group  # type: ignore[attr-defined]
    public = set(theirs.__all__) & set(dist.__all__)
    assert {name for name in public if getattr(module, name) is not getattr(dist, name)} == set()


def test_the_launcher_runs_by_torchs_path() -> None:
    arguments = [sys.executable, "-m", "torchdist_ref.run", "--help"]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert "--nproc-per-node" in shown and "torchdist_ref.run" in shown
