"""References to other people's names, resolved without a network.

Python's names link to its documentation through the inventory in docs/_inventories. For torch there is no inventory
to keep here, so a reference to torch is checked instead of linked: a name that torch really has is shown as code, and
one that it does not have stays a broken reference, which fails the build.
"""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

FOREIGN = ("torch", "numpy")
# Where annotations show the private home of a name, and the name that people know.
KNOWN_AS = {
    "torch._C._distributed_c10d": "torch.distributed",
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.jit.Future": "torch.futures.Future",
    "torch.types.Number": "float",
}


def public(name: str) -> str:
    """Return the name that people know for one that annotations show."""
    for private, known in KNOWN_AS.items():
        if name == private or name.startswith(f"{private}."):
            return known + name.removeprefix(private)
    return name


def exists(name: str) -> bool:
    """Whether a dotted name can be imported or reached by attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        return all((value := getattr(value, part, None)) is not None for part in parts[cut:])
    return False


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Answer a reference that Sphinx could not resolve: as plain code if the foreign name exists."""
    target = node.get("reftarget", "")
    if target.split(".")[0] not in FOREIGN or not (exists(target) or exists(public(target))):
        return None
    text = contnode.astext()
    return nodes.literal(text, public(text), classes=["xref", "py"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Ask us before others, since intersphinx would only look torch up in vain."""
    app.connect("missing-reference", resolve, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
