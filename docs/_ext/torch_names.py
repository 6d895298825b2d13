"""Anchors, rows and inventory entries under the names that torch's documentation uses.

Deep links to the official pages keep working: `distributed.html#torch.distributed.all_reduce` leads to a row with the
summary of our counterpart, and the row links to its full documentation.

`.. torch-names::`
    One row for each name in its body, relative to the package of its argument: name, first sentence, link.
`.. on-torch::`
    A box with what differs on torch.

The names are those of docs/_inventories/documented_names.txt. Names that are a second path to a documented object get
an entry in objects.inv too. Do not add what the rows show: it is the first sentence of each docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import foreign_names
from docutils import nodes
from docutils.parsers.rst.directives.admonitions import BaseAdmonition
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains import Domain, ObjType
from sphinx.domains.python import ModuleEntry, ObjectEntry
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

NAMES = Path(__file__).parents[1] / "_inventories" / "documented_names.txt"
OPERATORS = Path(__file__).parents[1] / "reference" / "distributed" / "collectives.rst"
OURS = (
    ("pytorch_lightning.utilities.distributed", "torchdist_ref.utilities.distributed"),
    ("torch.nn.parallel.DistributedDataParallel", "torchdist_ref.DistributedDataParallel"),
    ("classification.ddp_hooks", "torchdist_ref.algorithms.ddp_comm_hooks.default_hooks"),
    ("torch.distributed", "torchdist_ref"),
)


def documented_names() -> list[str]:
    """Return the names that the official pages document, as they write them."""
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def counterpart(name: str) -> str:
    """Return our name for one of torch's, Lightning's or InternVL's."""
    for theirs, ours in OURS:
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    raise ValueError(f"no counterpart of {name} is known")


def torch_name(name: str) -> str | None:
    """Return torch's name for one of ours, or None for a name outside the package."""
    for theirs, ours in OURS:
        if theirs.startswith("torch.") and (name == ours or name.startswith(f"{ours}.")):
            return theirs + name.removeprefix(ours)
    return None


@cache
def written_entries() -> dict[str, str]:
    """Return the first paragraphs of the classes and attributes that a page documents by hand, by name.

    The operators are objects of torch without a docstring of their own.
    """
    found, owner = {}, ""
    lines = OPERATORS.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        entry = re.match(r"( *)\.\. py:(class|attribute):: (\w+)", line)
        if entry:
            owner = entry[3] if entry[2] == "class" else owner
            name = owner if entry[2] == "class" else f"{owner}.{entry[3]}"
            below = "\n".join(lines[number + 1 :]).lstrip("\n")
            found[f"torchdist_ref.{name}"] = below.partition("\n\n")[0]
    return found


def summary(name: str) -> str:
    """Return the first sentence of what documents an object, as plain text."""
    if name in written_entries():
        return first_sentence(written_entries()[name])
    try:
        value = foreign_names.load(name)
    except AttributeError:
        return ""
    if not (callable(value) or inspect.ismodule(value) or isinstance(value, property)):
        return f"Constant: {value!r}."
    text = first_sentence((inspect.getdoc(value) or "").split("\n\n")[0])
    return text or "torch's own, with the same arguments as there; torch does not document it."


def first_sentence(paragraph: str) -> str:
    """Return the first sentence of a paragraph of a docstring, as plain text."""
    text = " ".join(paragraph.split())
    text = re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].rstrip(":")
    return re.sub(r":\w+:`~?(?:\w+\.)*([\w ]+)`", r"\1", text).replace("``", "").replace("`", "")


def is_torchs_own(name: str) -> bool:
    """Return whether one of our names leads to an object that torch defines, in a module of its own."""
    value = foreign_names.load(name)
    return not isinstance(value, int) and str(getattr(value, "__module__", "")).startswith("torch.distributed.nn")


class TorchNamesDirective(SphinxDirective):
    """List names of torch with their counterparts, each with its own anchors."""

    has_content = True
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Make the rows."""
        # The package itself is written with its parent as argument: `.. torch-names:: torch`, then `distributed`.
        rows = [self.item(f"{self.arguments[0]}.{name}") for line in self.content for name in line.split()]
        return [nodes.definition_list("", *rows, classes=["torch-names"])]

    def item(self, theirs: str) -> nodes.definition_list_item:
        """Make one row: anchors of both names, link, summary."""
        ours = counterpart(theirs)
        shown = theirs.removeprefix(f"{self.arguments[0]}.")
        target = theirs if is_torchs_own(ours) else ours
        reference = addnodes.pending_xref(
            "", nodes.inline(shown, shown), refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
        )
        ids = [theirs, f"module-{theirs}"] if inspect.ismodule(foreign_names.load(ours)) else [theirs]
        term = nodes.term("", "", reference, ids=ids)
        term["torch_row"] = True
        return nodes.definition_list_item("", term, nodes.definition("", nodes.Text(summary(ours))))


class OnTorchDirective(BaseAdmonition, SphinxDirective):
    """Box with what is so on torch where that differs."""

    required_arguments = 0
    node_class = nodes.admonition

    def run(self) -> list[nodes.Node]:
        """Make the box."""
        self.arguments = ["On torch"]
        self.options["class"] = ["on-torch"]
        return super().run()


class TorchDomain(Domain):
    """Names of torch that have an anchor on this site, as entries of objects.inv."""

    name = "torch"
    label = "torch"
    object_types: ClassVar[dict[str, ObjType]] = {"object": ObjType("object")}
    initial_data: ClassVar[dict[str, Any]] = {"anchors": {}}

    def clear_doc(self, docname: str) -> None:
        """Forget the anchors of a page that is read again."""
        self.data["anchors"] = {name: at for name, at in self.data["anchors"].items() if at != docname}

    def merge_domaindata(self, docnames: set[str], otherdata: dict[str, Any]) -> None:
        """Take the anchors that another process read."""
        for name, docname in otherdata["anchors"].items():
            if docname in docnames:
                self.data["anchors"].setdefault(name, docname)

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        """Yield each name with its page; the search leaves them out."""
        for name, docname in self.data["anchors"].items():
            yield name, name, "object", docname, name, -1


def add_anchors(app: Sphinx, doctree: nodes.document) -> None:
    """Add torch's name as a second anchor to the documentation of each counterpart."""
    anchors = app.env.get_domain("torch").data["anchors"]
    known = set(documented_names())
    taken = set(doctree.ids)
    links = foreign_names.linked_names()
    for signature in doctree.findall(addnodes.desc_signature):
        for ours in list(signature["ids"]):
            theirs = torch_name(ours)
            if theirs in links and not signature.get("torch_link"):
                signature["torch_link"] = True
                link = nodes.inline("", "[torch]", classes=["torch-link"])
                address = foreign_names.TORCH + links[theirs][1]
                hint = "this name in torch's documentation"
                signature += nodes.reference("", "", link, internal=False, refuri=address, reftitle=hint)
            if theirs and theirs not in taken:
                taken.add(theirs)
                signature["ids"].append(theirs)
                anchors[theirs] = app.env.docname
    for term in doctree.findall(nodes.term):
        theirs = term["ids"][0] if term.get("torch_row") else None
        if theirs in known:
            anchors.setdefault(theirs, app.env.docname)


def register_aliases(app: Sphinx, env: BuildEnvironment) -> None:
    """Give each second path to a documented object an entry of its own in the inventory."""
    objects = env.domains["py"].objects  # type: ignore[attr-defined]
    missing = [name for name in map(counterpart, documented_names()) if name not in objects]
    if not missing:
        return
    places: dict[int, tuple[Any, ObjectEntry]] = {}
    for name, entry in list(objects.items()):
        if name.startswith("torchdist_ref.") and not entry.aliased:
            try:
                value = foreign_names.load(name)
            except AttributeError:
                continue
            places.setdefault(id(value), (value, entry))
    rows = {counterpart(theirs): (theirs, at) for theirs, at in env.get_domain("torch").data["anchors"].items()}
    for name in missing:
        found = places.get(id(foreign_names.load(name)))
        if found:
            entry = ObjectEntry(found[1].docname, found[1].node_id, found[1].objtype, True)
        elif name in rows:  # an object of torch's own, available here too: its row is all there is
            entry = ObjectEntry(rows[name][1], rows[name][0], kind(foreign_names.load(name)), True)
        else:
            continue
        objects[name] = entry
        if entry.objtype == "module":
            env.domains["py"].data["modules"][name] = ModuleEntry(entry.docname, entry.node_id, "", "", False)


def kind(value: Any) -> str:
    """Return the type of an object in Sphinx's Python domain."""
    return "module" if inspect.ismodule(value) else "class" if inspect.isclass(value) else "function"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives, the domain and the two passes."""
    app.add_directive("torch-names", TorchNamesDirective)
    app.add_directive("on-torch", OnTorchDirective)
    app.add_domain(TorchDomain)
    app.connect("doctree-read", add_anchors)
    app.connect("env-updated", register_aliases)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
