"""The built site is whole: no warning, no dead link, nothing fetched from elsewhere, a text beside every drawing.

Reads the site of `nox -s docs`, and is skipped where there is none of these sources. `.ci/run` builds it first.
"""

import ast
import builtins
import hashlib
import html
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import foreign_names
import pytest
import torch_names
from sphinx.util.inventory import InventoryFile

from tests.docs import pages
from torchdist_ref import error_index, errors

FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
ELSEWHERE = re.compile(r"^(https?:)?//")


class Page(HTMLParser):
    """What a page links to, fetches and calls itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.headings: list[str] = []
        self.nodes = 0
        self.contents = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.nodes += 1
        self.contents += tag == "a" and "nav-link" in given.get("class", "") and given.get("href", "").startswith("#")
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in FETCHED and given.get(FETCHED[tag]) and given.get("rel") not in ("canonical", "search"):
            self.fetched.append(given[FETCHED[tag]])
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(tag)


FOLDERS, FILES = ("docs", "torchdist_ref", "tutorials"), ("README.md", "CHANGELOG.md", "SECURITY.md")
LEFT_OUT = ("_build", "_generated", "__pycache__")


def built_from_these_sources(root: Path) -> bool:
    """Return whether `nox -s docs` has built the site, and nothing that it is made of is newer."""
    made = root / "docs" / "_build" / "doctrees" / "environment.pickle"
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    sources = [path for path in found if not {*LEFT_OUT} & {*path.parts}] + [root / file for file in FILES]
    return made.exists() and max(path.stat().st_mtime for path in sources) < made.stat().st_mtime


@pytest.fixture(scope="module")
def site() -> Path:
    """Return the site of `nox -s docs`. To build one takes minutes, which is another session's work."""
    if not built_from_these_sources(pages.ROOT):
        pytest.skip("there is no site of these sources: run `nox -s docs` first")
    return pages.DOCS / "_build" / "html"


def test_a_site_of_older_sources_is_not_read(tmp_path: Path) -> None:
    for path in (*FILES, "docs/page.md", "torchdist_ref/work.py", "tutorials/first.ipynb"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert not built_from_these_sources(tmp_path)
    made = tmp_path / "docs" / "_build" / "doctrees" / "environment.pickle"
    made.parent.mkdir(parents=True)
    made.touch()
    os.utime(made, (time.time() + 10, time.time() + 10))
    assert built_from_these_sources(tmp_path)
    os.utime(tmp_path / "torchdist_ref" / "work.py", (time.time() + 20, time.time() + 20))
    assert not built_from_these_sources(tmp_path)


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Page]:
    """Read all pages that were written for readers."""
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_there_is_a_page_for_each_source(site: Path) -> None:
    sources = [path.relative_to(pages.DOCS) for end in ("md", "rst") for path in pages.DOCS.rglob(f"*.{end}")]
    # `changes` has fragments of the page of the next release, and `paper` an article for a journal.
    own = [path for path in sources if path.parts[0][0] != "_" and path.parts[0] not in ("changes", "paper")]
    missing = [str(path) for path in own if not (site / path.with_suffix(".html")).exists()]
    assert len(own) > 20 and not missing


def test_each_page_of_source_is_linked_from_a_name(site: Path) -> None:
    shown = [path for path in (site / "_modules").rglob("*.html") if path.name != "index.html"]
    assert len(shown) > 40
    assert not [path for path in shown if 'class="viewcode-back"' not in path.read_text(encoding="utf-8")]


def test_nothing_is_fetched_from_elsewhere(site: Path, parsed: dict[Path, Page]) -> None:
    fetched = {(path.name, address) for path, page in parsed.items() for address in page.fetched}
    imported = {
        (style.name, address)
        for style in site.rglob("*.css")
        for address in re.findall(r"(?:@import|url\()\s*[\"']?([^\"')]+)", style.read_text(encoding="utf-8"))
    }
    assert fetched
    assert not [item for item in fetched | imported if ELSEWHERE.match(item[1])]


def test_every_link_inside_leads_to_a_page_and_a_place_on_it(site: Path, parsed: dict[Path, Page]) -> None:
    dead = [
        f"{path.relative_to(site)}: {link}"
        for path, page in parsed.items()
        for link in page.links
        if not leads_somewhere(path, link, parsed)
    ]
    assert not dead


def leads_somewhere(path: Path, link: str, parsed: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.exists():
        return False
    return not parts.fragment or target not in parsed or unquote(parts.fragment) in parsed[target].anchors


def test_every_page_has_one_title(parsed: dict[Path, Page]) -> None:
    wrong = [path.name for path, page in parsed.items() if page.headings.count("h1") != 1]
    assert sorted(set(wrong) - {"genindex.html", "py-modindex.html", "search.html"}) == []


def test_every_drawing_says_in_words_what_it_shows(site: Path) -> None:
    for name in ("collectives/all_reduce", "design", "explanation/schedules"):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        drawings = re.findall(r'<div class="drawing".*?</svg>', text, re.DOTALL)
        assert drawings
        assert all("<title" in drawing or "aria-label" in drawing for drawing in drawings)


def test_formulas_are_rendered(site: Path) -> None:
    text = (site / "explanation" / "schedules.html").read_text(encoding="utf-8")
    assert text.count("<math") >= 6
    assert "\\alpha" not in text


ANCHORS = [
    tuple(line.split())
    for line in (pages.ROOT / "tests" / "docs" / "official_anchors.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_every_section_anchor_of_the_official_pages_exists(site: Path, parsed: dict[Path, Page]) -> None:
    missing = [
        (page, anchor) for page, anchor in ANCHORS if anchor not in parsed[site / f"reference/{page}.html"].anchors
    ]
    assert len(ANCHORS) == 45
    assert not missing


def test_the_id_at_the_end_of_each_error_is_a_place_in_the_error_index(site: Path, parsed: dict[Path, Page]) -> None:
    index = site / "reference" / "errors_index"
    places = set().union(*(page.anchors for path, page in parsed.items() if path.is_relative_to(index)))
    places |= parsed[index.with_suffix(".html")].anchors
    general = {error_index.general_entry(name) for name in vars(errors) if re.match(r"[A-Z]\w*Error$", name)}
    assert len(general) > 15
    assert general | {entry for entry, _ in error_index.ENTRIES} <= places


def test_the_address_of_the_style_sheet_changes_with_it(site: Path, parsed: dict[Path, Page]) -> None:
    digest = hashlib.sha256((site / "_static" / "all.css").read_bytes()).hexdigest()[:8]
    for path, page in parsed.items():
        sheets = [each for each in page.fetched if "all.css" in each]
        assert len(sheets) == 1 and sheets[0].endswith(f"_static/all.css?v={digest}"), path


def test_a_deep_link_to_a_name_on_the_official_pages_leads_to_its_counterpart(
    site: Path, parsed: dict[Path, Page]
) -> None:
    names = torch_names.documented_names()
    hooks = [name for name in names if ".ddp_comm_hooks." in name or name.startswith("torch.distributed.GradBucket")]
    top = [name for name in names if re.fullmatch(r"torch\.distributed\.(\w+|(Store|Backend|Work)\.\w+)", name)]
    top = [name for name in top if name not in hooks]
    found = {page: parsed[site / f"reference/{page}.html"].anchors for page in ("distributed", "ddp_comm_hooks")}
    assert len(hooks) == 33 and len(top) == 71
    assert [name for name in top if name not in found["distributed"]] == []
    assert [name for name in hooks if name not in found["ddp_comm_hooks"]] == []


def test_each_documented_name_is_in_the_inventory_under_both_names(site: Path) -> None:
    content = (site / "objects.inv").read_bytes()
    inventory = InventoryFile.loads(content, uri="").data
    ours = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    names = torch_names.documented_names()
    assert len(names) == 251
    assert [name for name in names if torch_names.counterpart(name) not in ours] == []
    theirs = set(inventory["torch:object"])
    assert [name for name in names if name.startswith("torch.") and name not in theirs] == []


def test_each_documented_object_has_an_anchor_under_torchs_name_beside_ours(parsed: dict[Path, Page]) -> None:
    lone = [
        (path.name, ours)
        for path, page in parsed.items()
        for ours in page.anchors
        if re.fullmatch(r"torchdist_ref\.\w+", ours) and f"torch.distributed.{ours.split('.')[1]}" not in page.anchors
    ]
    assert [item for item in lone if not item[1].endswith(".DistributedDataParallel")] == []


def test_reference_pages_are_small(site: Path, parsed: dict[Path, Page]) -> None:
    large = {
        str(path.relative_to(site)): (path.stat().st_size, page.nodes, page.contents)
        for path, page in parsed.items()
        if path.is_relative_to(site / "reference")
        if path.stat().st_size > 150_000 or page.nodes >= 3_000 or page.contents > 35
    }
    assert not large


def text_of(site: Path, page: str, name: str) -> str:
    """Return the beginning of a name's documentation as a reader sees it."""
    source = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
    start = source.index(f'id="torchdist_ref.{name}"')
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", source[start : start + 20_000])).split())


def test_signatures_show_public_names_and_types(site: Path) -> None:
    assert "op: ReduceOp = ReduceOp.SUM, group:" in text_of(site, "distributed/collectives", "all_reduce")
    assert "op ( ReduceOp, default: ReduceOp.SUM)" in re.sub(
        r"op \(\s*", "op ( ", text_of(site, "distributed/collectives", "all_reduce")
    )
    shown = [page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html")]
    assert not [page for page in shown if re.search(r">_ranks<", page)]


def test_an_argument_in_a_docstring_is_no_link_to_another_class(site: Path) -> None:
    page = (site / "reference" / "distributed" / "initialization.html").read_text(encoding="utf-8")
    assert "init_process_group" in page and "ClusterEnvironment.world_size" not in page


def test_names_of_torch_are_links(site: Path, parsed: dict[Path, Page]) -> None:
    links = [link for page in parsed.values() for link in page.links if link.startswith(foreign_names.TORCH)]
    counted = {name: links.count(foreign_names.TORCH + at) for name, (_, at) in foreign_names.linked_names().items()}
    assert counted["torch.Tensor"] > 100 and counted["torch.futures.Future"] > 10
    assert counted["torch.nn.Module"] and counted["torch.distributed.all_reduce"]
    assert (foreign_names.INVENTORIES / "torch.inv").read_bytes() == foreign_names.inventory()


class Prose(HTMLParser):
    """The text of a page outside code, blocks of code, and scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.within: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("code", "pre", "script", "style", "kbd", "math"):
            self.within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.within and self.within[-1] == tag:
            self.within.pop()

    def handle_data(self, data: str) -> None:
        if not self.within:
            self.text += data


UNREADABLE = {
    "an address of an object": r"object at 0x[0-9a-f]+",
    "a bare backtick": r"`",
    "a role that was not resolved": r":(?:func|class|meth|mod|doc|ref|exc|data):",
    "a folder of the machine that built the site": re.escape(str(pages.ROOT)) + r"(?!\w)",
}


def test_no_text_shows_what_only_a_program_can_read(site: Path) -> None:
    read = [path for path in site.rglob("*.html") if not {"_modules", "_static", "source"} & set(path.parts)]
    assert len(read) > 120
    found = [
        (path.name, kind, prose[max(0, match.start() - 40) : match.end() + 40])
        for path in read
        for prose in [Prose(path).text]
        for kind, pattern in UNREADABLE.items()
        for match in re.finditer(pattern, prose)
    ]
    assert not found


def test_no_entry_says_nothing_but_that_it_has_members(site: Path) -> None:
    says = re.compile(r"<dt id=\"([^\"]+)\">.*?</dt><dd>(?:<p>)?(Members|Package of torch's\.)?(?:</p>)?</dd>")
    rows = [found for path in (site / "reference").rglob("*.html") for found in says.findall(path.read_text("utf-8"))]
    assert not rows


class Examples(HTMLParser):
    """The examples with prompts inside the entries of a page, each with the name of its entry."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.lists: list[bool] = []
        self.entry = ""
        self.text: list[str] | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "dl":
            self.lists.append("py" in given.get("class", "").split())
        if tag == "dt" and "sig-object" in given.get("class", ""):
            self.entry = given.get("id", self.entry)
        if tag == "pre":
            self.text = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "dl":
            self.lists.pop()
        if tag == "pre" and self.text is not None:
            text = "".join(self.text)
            if ">>> " in text and any(self.lists):
                self.found.append((self.entry, text))
            self.text = None

    def handle_data(self, data: str) -> None:
        if self.text is not None:
            self.text.append(data)


def names_without_a_source(example: str) -> list[str]:
    """Names that an example uses, and neither defines nor imports."""
    code = [line[4:] for line in example.splitlines() if line.startswith((">>> ", "... "))]
    known, used = {*dir(builtins)}, set()
    for node in ast.walk(ast.parse("\n".join(code))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
        elif isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
    return sorted(used - known)


def test_names_without_a_source() -> None:
    assert names_without_a_source(">>> import torch\n>>> def f(x):\n...     return torch.abs(x) + y\n>>> f(1)") == ["y"]


def test_the_example_of_each_entry_runs_alone(site: Path) -> None:
    """A reader copies it from there; the examples of a page's text may go on from the one before."""
    found = [(path.name, *each) for path in (site / "reference").rglob("*.html") for each in Examples(path).found]
    assert len(found) > 200
    missing = [(page, entry, names) for page, entry, text in found if (names := names_without_a_source(text))]
    assert not missing


def test_lines_of_examples_fit_their_column(site: Path) -> None:
    wide = [
        (page.name, line)
        for page in (site / "reference").rglob("*.html")
        for box, block in re.findall(
            r'<div class="([^"]*)"><div class="highlight"><pre>(.*?)</pre>', page.read_text(encoding="utf-8"), re.DOTALL
        )
        if "error-text" not in box
        for line in html.unescape(re.sub(r"<[^>]+>", "", block)).split("\n")
        if len(line) > 104 and not line.startswith("torchdist_ref.errors.")
    ]
    assert not wide
