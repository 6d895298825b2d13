"""torch's private names: one file has them all, the installed torch has each, and a missing one fails where needed."""

from __future__ import annotations

import ast
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from torchdist_ref import error_index
from torchdist_ref.errors import UnsupportedError
from torchdist_ref.testing import fill, run
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.torch_internals.torch_private import NAMES, TESTED, Missing, PrivateName

SOURCE = Path(torch_private.__file__).parent
ABSENT = PrivateName("torch", "_name_that_is_not_there", "shows a missing name", "nothing happens", ("2.11",))


def private_names(text: str) -> list[str]:
    """Return the names of torch in a module's source that have a part with one leading underscore."""
    found, aliases = [], {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    aliases[each.asname or "torch"] = each.name if each.asname else "torch"
                    found.append(each.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
                found.append(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.expr | ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            found.append(".".join([aliases[inner.id], *parts]))
    return [name for name in found if any(part[0] == "_" and part[:2] != "__" for part in name.split("."))]


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    wrong = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_private.py" and (names := private_names(path.read_text(encoding="utf-8")))
    }
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._guards import CompileContext",
        "import torch\ndef f(): return torch._C.Future",
        "import torch.distributed as c10d\nc10d.distributed_c10d._world = None",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
    ],
)
def test_the_search_finds_private_names(text: str) -> None:
    assert private_names(text)


@pytest.mark.parametrize("accessor", NAMES)
def test_the_installed_torch_has_the_name(accessor: str) -> None:
    name = NAMES[accessor]
    assert name.purpose and name.without
    assert name.exists() == (".".join(torch.__version__.split(".")[:2]) in name.versions)


def test_a_name_that_is_missing_says_who_needs_it() -> None:
    with pytest.raises(UnsupportedError, match=r"has no torch\._name_that_is_not_there") as caught:
        ABSENT.get()
    assert all(part in str(caught.value) for part in (torch.__version__, "shows a missing name", "torch 2.11"))
    with pytest.raises(UnsupportedError, match="_name_that_is_not_there"):
        ABSENT.of(torch)
    with pytest.raises(UnsupportedError, match="_name_that_is_not_there"):
        ABSENT.set(3)
    assert not hasattr(torch, "_name_that_is_not_there") and not ABSENT.exists()


def test_asking_for_a_missing_name_makes_no_error() -> None:
    error_index.compiled_patterns.cache_clear()
    assert not ABSENT.exists() and isinstance(ABSENT.bind(), Missing)
    assert not error_index.compiled_patterns.cache_info().misses


def test_a_module_that_binds_a_missing_name_can_be_loaded() -> None:
    bound = ABSENT.bind()
    assert isinstance(bound, Missing)
    with pytest.raises(UnsupportedError, match="shows a missing name"):
        bound(1)
    with pytest.raises(UnsupportedError, match="shows a missing name"):
        bound.queue_callback(1)


def test_only_what_needs_the_name_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's name for a batch of copies DDP's backward raises, and collectives work."""
    from torchdist_ref.parallel import storage

    monkeypatch.setattr(storage, "copy_many", Missing(torch_private.COPY_MANY))
    errors = run(train_without_copies, 2)
    assert errors == ["backward of DDP raises"] * 2


def train_without_copies(rank: int) -> str:
    import torchdist_ref as dist

    tensor = fill(rank, (5,))
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, fill(0, (5,)) + fill(1, (5,)))
    ddp = dist.DistributedDataParallel(torch.nn.Linear(3, 2))
    with pytest.raises(UnsupportedError) as caught:
        ddp(fill(rank, (4, 3))).sum().backward()
    return "backward of DDP raises" if "backward of DDP raises" in str(caught.value) else str(caught.value)


@pytest.mark.parametrize("version", ["2.99.1", "3.0.0a0+git12ab"])
def test_a_newer_torch_is_warned_of_once(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch_private, "warned", False)
    with pytest.warns(RuntimeWarning, match=f"torch {TESTED[0]} to {TESTED[-1]}, and this is torch") as caught:
        torch_private.TABLES.get()
        torch_private.AUTOGRAD.get()
    assert len(caught) == 1 and version in str(caught[0].message)


@pytest.mark.parametrize("version", [f"{TESTED[-1]}.9", TESTED[0] + ".0+cpu"])
def test_a_tested_torch_is_not_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch_private, "warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.TABLES.get()


def test_a_newer_torch_is_named_when_a_program_begins(python_with_torch: str) -> None:
    """The import alone is silent, since torch imports the library by itself."""
    program = (
        "import warnings, torch; torch.__version__ = '9.1.0'\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always'); import torchdist_ref as dist; assert not seen, seen\n"
        "    dist.init_process_group('ref', store=dist.HashStore(), rank=0, world_size=1); dist.barrier()\n"
        "    dist.destroy_process_group()\n"
        "print([str(each.message) for each in seen if 'private names' in str(each.message)])"
    )
    found = subprocess.run([python_with_torch, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.count("this is torch 9.1.0") == 1
