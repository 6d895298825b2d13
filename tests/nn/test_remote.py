"""Remote modules are torch's own, under the names of this library too, and loaded only when used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from torch.distributed import rpc

import torchdist_ref as dist
from torchdist_ref.nn import theirs

NAMES = {
    "api.remote_module": ["RemoteModule"],
    "jit.instantiator": [
        "get_arg_return_types_from_interface",
        "instantiate_non_scriptable_remote_module_template",
        "instantiate_scriptable_remote_module_template",
    ],
    "jit.templates.remote_module_template": ["get_remote_module_template"],
}


@pytest.mark.skipif(not rpc.is_available(), reason="this torch has no remote calls")
@pytest.mark.parametrize("module", NAMES)
def test_names_are_torchs(module: str) -> None:
    ours = importlib.import_module(f"torchdist_ref.nn.{module}")
    assert ours.__all__ == NAMES[module]
    found = [getattr(ours, name) for name in NAMES[module]]
    torchs = importlib.import_module(f"torch.distributed.nn.{module}")
    assert all(value is getattr(torchs, name) for value, name in zip(found, NAMES[module], strict=True))


@pytest.mark.skipif(not rpc.is_available(), reason="this torch has no remote calls")
def test_the_package_shows_the_module_too() -> None:
    from torchdist_ref.nn import RemoteModule
    from torchdist_ref.nn.api.remote_module import RemoteModule as same

    assert RemoteModule is same


@pytest.mark.parametrize("module", ["torchdist_ref.nn", *(f"torchdist_ref.nn.{module}" for module in NAMES)])
def test_other_names_are_not_there(module: str) -> None:
    with pytest.raises(AttributeError, match=f"{module}' has no attribute 'Remote'"):
        importlib.import_module(module).Remote  # noqa: B018


def test_a_torch_without_remote_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(dist.UnsupportedError, match="RemoteModule: it is torch's own and needs RPC"):
        theirs.torchs("api.remote_module", "RemoteModule", ["RemoteModule"])


def test_nothing_of_it_is_loaded_before() -> None:
    # Another Python loads torch: 2 s.
    program = "import sys, torchdist_ref.nn; print([m for m in sys.modules if 'distributed.nn' in m])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "[]\n"
