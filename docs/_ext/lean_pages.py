"""Pages without parts that have no effect, so that a browser shows them sooner.

Spans: Sphinx wraps each word of inline code, and Pygments each name, so that styles can tell them apart. The styles of
this site give names, punctuation and blanks the color of the code around them. A word that a browser may break stays
wrapped, since the wrapper forbids it.

Style sheets: those of Sphinx, the theme and the extensions become one, without the rules of classes that no page has.

Scripts: they run after the page is parsed.

Do not change text here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders.html._assets import _JavaScript

# A word without a character after which a line may break: hyphen, slash, bar, question mark, or a letter beyond ASCII.
WORD = re.compile(r'<span class="pre">([^<>/|?!\-\x80-\U0010ffff]*)</span>')
# Names, punctuation, blanks, and spans without a class; not the empty one that Pygments begins a block with.
PLAIN = re.compile(r'<span(?: class="[npw]")?>([^<>]+)</span>')
# Runs last, when the other extensions have added their parts to the page.
PRIORITY = 900

# In the order in which pages would load them.
SHEETS = (
    "basic.css",
    "styles/pydata-sphinx-theme.css",
    "pygments.css",
    "copybutton.css",
    "sphinx-design.min.css",
    "nbsphinx-code-cells.css",
    "site.css",
    "player.css",
)
ONE_SHEET = "all.css"
LINK = re.compile(rf'(<link rel="stylesheet" href="[^"?]*{re.escape(ONE_SHEET)})(?:\?v=\w+)?(")')
SYNTAX = re.compile(r"""(?P<comment>/\*.*?\*/)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[{};]""", re.DOTALL)
NESTED = ("@media", "@supports", "@layer", "@container")
# Arguments of functions such as `:not(.x)`, and attributes: they name classes that an element need not have.
ARGUMENTS = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\]")
NAME = re.compile(r"[.#]((?:\\.|[\w-])+)")
NAMES_ON_PAGE = re.compile(r"""(?:class|id)=["']?([^"'>]*)""")
# The theme's script of icons has all their names, and no page loads it.
UNUSED_SCRIPTS = ("fontawesome.js",)


def lean(html: str) -> str:
    """Return a page without the spans that have no effect.

    >>> lean('<code><span class="pre">a.b</span> <span class="pre">--c</span></code>')
    '<code>a.b <span class="pre">--c</span></code>'
    >>> lean('<pre><span></span><span class="n">x</span><span class="o">=</span></pre>')
    '<pre><span></span>x<span class="o">=</span></pre>'
    """
    return PLAIN.sub(r"\1", WORD.sub(r"\1", html))


def rules(css: str) -> Iterator[tuple[str, str | None]]:
    """Yield the text before each block of a style sheet, and the block; None for statements without one.

    >>> list(rules('@import "a;b"; p { color: red } /* } */ @media print { p { color: black } }'))
    [('@import "a;b"', None), ('p', ' color: red '), ('@media print', ' p { color: black } ')]
    """
    css = SYNTAX.sub(lambda found: "" if found["comment"] else found[0], css)
    depth, start, opened = 0, 0, 0
    for found in SYNTAX.finditer(css):
        if found[0] == "{":
            depth += 1
            opened = found.end() if depth == 1 else opened
        elif found[0] == "}":
            depth -= 1
            if depth == 0:
                yield css[start : opened - 1].strip(), css[opened : found.start()]
                start = found.end()
        elif found[0] == ";" and depth == 0:
            yield css[start : found.start()].strip(), None
            start = found.end()


def prune(css: str, used: set[str]) -> str:
    """Return a style sheet without the rules of classes and ids that are not used.

    >>> prune(".a, .b:not(.c) { x: y } .b { x: z } @media print { .b { x: z } } @charset 'utf-8';", {"a"})
    '.a{ x: y }'
    >>> prune("@font-face { src: url(f) } p > .a\\\\:b { x: y }", {"a:b"})
    '@font-face{ src: url(f) }p > .a\\\\:b{ x: y }'
    """
    kept = []
    for before, block in rules(css):
        if block is None:
            kept += [] if before.startswith("@charset") else [f"{before};"]
        elif before.startswith(NESTED):
            inner = prune(block, used)
            kept += [f"{before}{{{inner}}}"] if inner else []
        elif before.startswith("@"):
            kept.append(f"{before}{{{block}}}")
        else:
            selectors = ",".join(one for one in selectors_of(before) if applies(one, used))
            kept += [f"{selectors}{{{block}}}"] if selectors else []
    return "".join(kept)


def selectors_of(before: str) -> list[str]:
    """Return the selectors of a rule, which commas separate; not those inside parentheses.

    >>> selectors_of("a:is(b, c), d")
    ['a:is(b, c)', 'd']
    """
    found = re.findall(r"(?:[^,(\[]|\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\])+", before)
    return [one.strip() for one in found]


def applies(selector: str, used: set[str]) -> bool:
    """Return whether all classes and ids of a selector are used."""
    return all(re.sub(r"\\(.)", r"\1", name) in used for name in NAME.findall(ARGUMENTS.sub("", selector)))


def names_in(site: Path) -> set[str]:
    """Return the classes and ids of all pages, and all words of the scripts, which add some."""
    used = {
        name
        for page in site.rglob("*.html")
        for found in set(NAMES_ON_PAGE.findall(page.read_text("utf-8")))
        for name in found.split()
    }
    for script in site.joinpath("_static").glob("**/*.js"):
        if "pyodide" not in script.parts and script.name not in UNUSED_SCRIPTS:
            used.update(re.findall(r"[\w-]+", script.read_text("utf-8")))
    return used


def write_sheet(app: Sphinx, error: Exception | None) -> None:
    """Write the one style sheet of the site, and its digest into the addresses of it, as other files have one."""
    static = Path(app.outdir, "_static")
    if error or app.builder.format != "html":
        return
    sheets = [static / name for name in SHEETS if (static / name).exists()]
    # Addresses in the theme's sheet start from its folder.
    css = "\n".join(sheet.read_text("utf-8").replace("url(../", "url(") for sheet in sheets)
    pruned = prune(css, names_in(Path(app.outdir)))
    (static / ONE_SHEET).write_text(pruned, encoding="utf-8")
    digest = hashlib.sha256(pruned.encode()).hexdigest()[:8]
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text("utf-8")
        linked = LINK.sub(rf"\g<1>?v={digest}\g<2>", text, count=1)
        if linked != text:
            page.write_text(linked, encoding="utf-8")


def on_page(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Make the body of a page lean, leave out the sheets that the one sheet has, and defer scripts."""
    for part in ("body", "toc"):
        if part in context:
            context[part] = lean(context[part])
    context["one_sheet"] = f"_static/{ONE_SHEET}"
    context["css_files"] = [file for file in context["css_files"] if not str(file.filename).endswith(SHEETS)]
    # The search page has further scripts, in its template, that need these at once.
    if name != "search":
        context["script_files"] = [deferred(file) for file in context["script_files"]]


def deferred(file: Any) -> Any:
    """Return a script that runs when the page is parsed, after those before it; one without a file as a module."""
    later = {"defer": "defer"} if file.filename else {"type": "module"}
    return _JavaScript(file.filename, priority=file.priority, **{**file.attributes, **later})


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("html-page-context", on_page, priority=PRIORITY)
    app.connect("build-finished", write_sheet, priority=PRIORITY)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
