"""Every python example that a reader sees on the site runs, and prints what the page says."""

import doctest
import importlib
import re
from pathlib import Path

import layers
import pytest

from tests import on_sim
from tests.docs import pages
from tests.torch_versions import torch_has

MODULES = [
    layers.module_name(path)
    for path in layers.files()
    if path.name != "__main__.py" and ">>> " in path.read_text(encoding="utf-8")
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def skip_newer(page: Path) -> None:
    """Skip a page with an example of a feature that an older torch lacks."""
    if "ReduceOp.PREMUL_SUM(" in page.read_text(encoding="utf-8") and not torch_has("2.13"):
        pytest.skip("needs torch 2.13 to compare with: ReduceOp.PREMUL_SUM(factor)")


def run_examples(page: Path) -> None:
    assert pages.run_page(page) > 0


@pytest.mark.parametrize("page", list(pages.markdown_pages()), ids=lambda path: str(path.relative_to(pages.DOCS)))
@on_sim.NEEDS_PARENT
# Pages whose ranks are processes fork them after torch's modules are loaded; a rank takes seconds to load them.
@pytest.mark.usefixtures("torchs_modules")
def test_markdown_examples_run(page: Path) -> None:
    skip_newer(page)
    if "simulated_device.install(" not in page.read_text(encoding="utf-8"):
        run_examples(page)
    elif why := on_sim.missing():
        pytest.skip(why)
    else:
        # The process that runs the page has the device until it ends.
        on_sim.parent().call(__name__, "run_examples", (page,), {})


@pytest.mark.parametrize(
    "page", sorted(pages.DOCS.glob("reference/**/*.rst")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_rst_examples_run(page: Path) -> None:
    skip_newer(page)
    failed = doctest.testfile(str(page), module_relative=False, optionflags=OPTIONS, globs={}).failed
    assert failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    import torch

    import torchdist_ref as dist

    names = {**vars(module), "dist": dist, "torch": torch}
    failed = doctest.testmod(module, optionflags=OPTIONS, globs=names).failed
    assert failed == 0


def test_a_wrong_output_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    with pytest.raises(AssertionError, match="it prints\n2"):
        pages.run_page(page)


def test_no_page_has_python_that_nobody_runs() -> None:
    unread = [
        str(path)
        for path in pages.DOCS.rglob("*.rst")
        if re.search(r"^\.\. code(-block)?:: python", path.read_text(), re.M)
    ]
    assert not unread, "in RST, examples are >>> sessions, so that they run"


# Lines before the first sentence: directives with their options, and anchors.
OPENING = re.compile(r"\s+:[\w-]+:|\.\. |:::|\(.*\)=$|$")


def first_paragraph(page: Path) -> str:
    """Return the words between the title of a page and its first list, table, code or heading."""
    lines = page.read_text(encoding="utf-8").splitlines()
    underlined = next((n for n, line in enumerate(lines) if re.fullmatch("=+", line)), None)
    start = (
        underlined + 1 if underlined is not None else next(n for n, line in enumerate(lines) if line[:2] == "# ") + 1
    )
    while not lines[start] or OPENING.match(lines[start]):
        start += 1
    return " ".join("\n".join(lines[start:]).partition("\n\n")[0].split())


@pytest.mark.parametrize(
    "page",
    [
        path
        for kind in ("md", "rst")
        for path in sorted(pages.DOCS.rglob(f"*.{kind}"))
        if path.name not in ("404.md", "changelog.md")
        and not {"_build", "_generated", "changes"} & set(path.relative_to(pages.DOCS).parts)
    ],
    ids=lambda path: str(path.relative_to(pages.DOCS)),
)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    if page.read_text(encoding="utf-8").startswith("---\n"):
        return  # Data of a generated page, which begins with the meaning of the call.
    text = first_paragraph(page)
    assert len(text.split()) >= 12 and not re.match(r"[|`>*]{2}|```|>>>|[-*] |\w+\n[-^]+", text), text
