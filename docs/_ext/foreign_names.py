"""References to other people's names, resolved without a network.

Names of Python and torch link to their documentation through the inventories in docs/_inventories. Annotations show the
modules in which torch defines its names; the link needs the public name. A name of torch without an entry is shown as
code if torch really has it. One that torch does not have stays a broken reference, which fails the build.

Run as a program, this file makes torch.inv of torch.txt.
"""

from __future__ import annotations

import importlib
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

FOREIGN = ("torch", "numpy")
INVENTORIES = Path(__file__).parents[1] / "_inventories"
TORCH = "https://pytorch.org/docs/stable/"
# Where annotations show the private home of a name, and the name that people know.
KNOWN_AS = {
    "pathlib._local": "pathlib",
    "torch._C._distributed_c10d": "torch.distributed",
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.jit.Future": "torch.futures.Future",
    "torch.types.Number": "float",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.modules.container.Sequential": "torch.nn.Sequential",
    "torch.nn.Parameter": "torch.nn.parameter.Parameter",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.utils.data.dataset.Dataset": "torch.utils.data.Dataset",
    "torch.distributed.nn.RemoteModule": "torch.distributed.nn.api.remote_module.RemoteModule",
}


def public(name: str) -> str:
    """Return the name that people know for one that annotations show."""
    for private, known in KNOWN_AS.items():
        if name == private or name.startswith(f"{private}."):
            return known + name.removeprefix(private)
    return name


def load(name: str) -> Any:
    """Return the object with a dotted name; raise AttributeError if there is none."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def exists(name: str) -> bool:
    """Whether a dotted name can be imported or reached by attributes."""
    try:
        return load(name) is not None
    except AttributeError:
        return False


@cache
def linked_names() -> dict[str, tuple[str, str]]:
    """Return role and address of each name of torch.txt."""
    lines = (INVENTORIES / "torch.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: (role, address) for name, role, address in rows}


def inventory() -> bytes:
    """Return torch.inv: the names of torch.txt in the format of Sphinx."""
    head = "# Sphinx inventory version 2\n# Project: torch\n# Version: stable\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    rows = "".join(f"{name} {role} 1 {address} -\n" for name, (role, address) in linked_names().items())
    return head.encode() + zlib.compress(rows.encode())


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Resolve a reference to a foreign name: leave it to intersphinx under its public name, or show code."""
    target = node.get("reftarget", "")
    if target.startswith("pathlib."):
        # Annotations of Python 3.13 show another home.
        node["reftarget"] = public(target)
        return None
    if target.split(".")[0] not in FOREIGN or not (exists(target) or exists(public(target))):
        return None
    text = contnode.astext()
    if public(target) in linked_names():
        node["reftarget"] = public(target)
        return None
    return nodes.literal(text, public(text), classes=["xref", "py"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Translate names before intersphinx looks them up."""
    app.connect("missing-reference", resolve, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    (INVENTORIES / "torch.inv").write_bytes(inventory())
