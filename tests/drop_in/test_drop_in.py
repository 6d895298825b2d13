"""Programs written for torch, with only the two import lines changed: the numbers of the unchanged program."""

from __future__ import annotations

import ast
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import torchdist_ref.backends.ref
import torchdist_ref.parallel.distributed_data_parallel  # noqa: F401
from tests.covering import covering
from tests.drop_in import packages
from tests.ports import reserve_port
from torchdist_ref.testing import run

# Forked ranks have these modules and those above loaded: each would import them for seconds.
LOADED = {
    "accelerated": ["accelerate"],
    "language_model": ["torch.distributed.optim"],
    "lightning_task": ["lightning", "lightning.pytorch.plugins.environments"],
}
HERE = Path(__file__).parent
PROGRAMS = sorted(
    path.stem for path in HERE.glob("*.py") if not path.stem.startswith(("test_", "__", "packages", "only_proofs"))
)
IMPORTS = {
    "import torch.distributed as dist\n": "import torchdist_ref as dist\n",
    "from torch.nn.parallel import DistributedDataParallel as DDP\n": (
        "from torchdist_ref import DistributedDataParallel as DDP\n"
    ),
}


def text_of(name: str, ours: bool) -> str:
    """Return a program, with its import lines changed for our library."""
    text = (HERE / f"{name}.py").read_text(encoding="utf-8")
    if ours:
        changed = [line for line in IMPORTS if line in text]
        assert changed
        for line in changed:
            text = text.replace(line, IMPORTS[line])
    return text


def parts_of(name: str) -> set[str]:
    """Return the parts of torch, and the libraries, that a program imports when its lines are changed."""
    modules = set()
    for node in ast.walk(ast.parse(text_of(name, ours=True))):
        modules |= {node.module} if isinstance(node, ast.ImportFrom) and node.module else set()
        modules |= {each.name for each in node.names} if isinstance(node, ast.Import) else set()
    parts = {module.removeprefix("torch.distributed.").partition(".")[0] for module in modules}
    parts |= {"utils.data"} if "torch.utils.data.distributed" in modules else set()
    return parts & (packages.ROWS.keys() | packages.OTHERS.keys())


def execute(rank: int, world: int, name: str, port: int, environment: dict[str, str], ours: bool) -> list[Any]:
    """Run a program as one rank under a launcher, and return its results."""
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    text = text_of(name, ours)
    names: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, name, "exec"), names)
    assert not torch.distributed.is_initialized()
    return [torch.as_tensor(value) for value in names["RESULT"]]


def launched(name: str, world: int, backend: str, folder: Path, ours: bool) -> list[list[Any]]:
    folder.mkdir()
    port = reserve_port()
    environment = {"BACKEND": backend, "FOLDER": str(folder)}
    return run(execute, world, world, name, port, environment, ours, ranks="processes", init=False, timeout=90)


@pytest.mark.parametrize(("name", "world"), covering(PROGRAMS, [3, 2, 4]))
def test_a_program_of_torchs_finds_the_same_with_two_imports_changed(
    name: str, world: int, tmp_path: Path, proof: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in LOADED.get(name, ()):
            import_module(module)
    wanted = launched(name, world, "gloo", tmp_path / "torch", ours=False)
    for backend in ("ref", "gloo"):
        found = launched(name, world, backend, tmp_path / backend, ours=True)
        for mine, right in zip(found, wanted, strict=True):
            assert len(right) >= 2
            for one, other in zip(mine, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    proof(parts_of(name), ["ref", "gloo"], world, "the unchanged program on torch's Gloo")
