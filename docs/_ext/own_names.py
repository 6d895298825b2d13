"""References to our own names, as people write them in docstrings.

A docstring says `Work` or ``Raises: ArgumentError``, not where the class lives. Two things make that enough: a name
in single backquotes is looked up and becomes a link if a page documents it, else code; and a reference by a name's
last part, or by the module it is defined in, leads to the place that documents it, if there is just one.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import sphinx_autodoc_typehints
from docutils import nodes
from docutils.parsers.rst.states import Inliner
from foreign_names import exists
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PACKAGE = "torchdist_ref"


def quoted(
    name: str, rawtext: str, text: str, lineno: int, inliner: Inliner, options: Any = None, content: Any = ()
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Read a name in single backquotes."""
    env = inliner.document.settings.env
    literal = nodes.literal(text, text)
    reference = pending_xref("", literal, refdomain="py", reftype="obj", reftarget=text.removesuffix("()"), quoted=True)
    reference["refdoc"] = env.docname
    reference["py:module"] = env.ref_context.get("py:module")
    reference["py:class"] = env.ref_context.get("py:class")
    return [reference], []


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Answer a reference to a name of ours that Sphinx did not find where it looked."""
    if node.get("refdomain") != "py":
        return None
    found = candidates(env, node["reftarget"])
    if node.get("quoted") and "." not in node["reftarget"]:
        found = [] if is_argument(node["reftarget"]) else [name for name in found if not is_member(env, name)]
    if len(found) == 1:
        node["reftarget"] = found[0]
        node["py:module"] = node["py:class"] = None
        return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, contnode)
    # A name that the source has and no page documents, such as the type of an attribute, is code; what nobody has
    # is an error.
    internal = node["reftarget"].startswith(PACKAGE) and exists(node["reftarget"])
    return contnode if node.get("quoted") or internal else None


def is_argument(name: str) -> bool:
    """Whether a quoted name is more likely an argument than one of our functions: one lower-case word."""
    return name.islower() and "." not in name and "_" not in name


def is_member(env: BuildEnvironment, name: str) -> bool:
    """Return whether a documented name belongs to a class; without the class, it is more likely an argument."""
    return env.domains["py"].objects[name].objtype in ("method", "property", "attribute")  # type: ignore[attr-defined]


def candidates(env: BuildEnvironment, target: str) -> list[str]:
    """Return the documented names of ours that end like the target."""
    if "." in target and not target.startswith(PACKAGE):
        return []
    last = target.rsplit(".", 1)[-1]
    objects = env.domains["py"].objects  # type: ignore[attr-defined]
    if f"{PACKAGE}.{last}" in objects:
        return [f"{PACKAGE}.{last}"]
    return [name for name in objects if name.endswith(f".{last}")]


def source_of(app: Sphinx, module: str, attribute: str) -> str | None:
    """Return our module for an alias of a built-in type, and for what torch wrote in C++: there is no other source."""
    first, _, rest = attribute.partition(".")
    value = getattr(importlib.import_module(module), first, None)
    homes = {str(getattr(found, "__module__", "")) for found in (value, getattr(value, rest, None))}
    return module if "builtins" in homes or any(home.startswith("torch._C") for home in homes) else None


def drop_unused_sources(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Make no page of a module to which no name links: two readers leave such entries, one reader drops them."""
    sources: dict[str, Any] = getattr(env, "_viewcode_modules", {})
    for module in [module for module, entry in sources.items() if entry and not entry[2]]:
        del sources[module]
    return []


BACKLINK = re.compile(r'id="(?P<name>[^"]+)">\n<a class="viewcode-back" href="(?P<page>[^"#]*)#(?P<anchor>[^"]+)"')


def repair_backlinks(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Link each name on a page of source to its documentation.

    Sphinx keeps one prefix for each source file. A name documented at another path than its neighbors, such as one
    of torch's paths that has no file of its own, would otherwise get a dead link.
    """
    objects = app.env.domains["py"].objects  # type: ignore[attr-defined]

    def repair(found: re.Match[str]) -> str:
        documented = [found["anchor"]] if found["anchor"] in objects else []
        documented += [
            name
            for name, entry in objects.items()
            if name.endswith(f".{found['name']}")
            and found["page"].endswith(f"{entry.docname}.html")
            and not is_class(name.removesuffix(f".{found['name']}"))
        ]
        return found[0].replace(f"#{found['anchor']}", f"#{objects[documented[0]].node_id}") if documented else found[0]

    def is_class(name: str) -> bool:
        return name in objects and objects[name].objtype in ("class", "exception")

    if page.startswith("_modules/"):
        context["body"] = BACKLINK.sub(repair, context["body"])


# Arguments that torch keeps private; the type of an operator, whose members have a class that readers never meet; the
# same of arguments whose annotation stays open in the code.
HIDDEN = re.compile(r", _ranks: [^,)]*(?=[,)])")
MEMBER = re.compile(r"~?[\w.]*RedOpType \| ~?[\w.]*ReduceOp\b")
OPERATOR = re.compile(r"\b(op|reduce_op): (?:(?:~typing\.)?Any|ReduceOp) = (?:ReduceOp\.)?SUM")


def public_signature(
    app: Sphinx, kind: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Show an operator as ReduceOp, and leave out private arguments."""
    # Sphinx takes the first answer, so this one contains that of sphinx_autodoc_typehints.
    made = sphinx_autodoc_typehints.process_signature(app, kind, name, obj, options, signature, returns)  # type: ignore[arg-type]
    if made is None:
        return None
    shown = OPERATOR.sub(r"\1: ReduceOp = ReduceOp.SUM", MEMBER.sub("ReduceOp", made[0]))
    return HIDDEN.sub("", shown), made[1]


def public_types(app: Sphinx, kind: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Show the same in the list of parameters."""
    for at, line in enumerate(lines):
        if re.match(r":type (op|reduce_op|reduceOp): .*(typing\.Any\\?`.*SUM``|RedOpType)", line):
            default = ", default: ``ReduceOp.SUM``" if "SUM" in line else ""
            lines[at] = f"{line.split(': ')[0]}: :py:class:`~torchdist_ref.ReduceOp`{default}"
    lines[:] = [line for line in lines if not re.match(r":(type|param) _ranks:", line)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role for single backquotes, and ask us first for what is missing."""
    app.connect("autodoc-process-signature", public_signature, priority=400)
    app.connect("autodoc-process-docstring", public_types, priority=900)
    app.add_role("quoted", quoted)
    app.connect("missing-reference", resolve, priority=300)
    app.connect("viewcode-follow-imported", source_of)
    app.connect("env-updated", drop_unused_sources)
    app.connect("html-page-context", repair_backlinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
