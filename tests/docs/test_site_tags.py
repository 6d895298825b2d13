"""Addresses in the heads of pages: canonical address, site map, edit links. One small build."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from sphinx.application import Sphinx

from tests.docs import pages

URL = "https://example.org/docs/"
EDIT = "https://example.org/edit/{{ path }}{{ file_name }}"


@pytest.fixture(scope="module")
def small_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build two pages with the site's own configuration, as if it were published."""
    folder = tmp_path_factory.mktemp("small")
    source, html = folder / "source", folder / "html"
    source.mkdir()
    (source / "index.md").write_text(
        "# Start\n\nA first paragraph that is long enough to describe.\n\n```{toctree}\nb\n```\n"
    )
    (source / "b.md").write_text("# Second\n\nAnother paragraph that describes the second page.\n")
    (source / "404.md").write_text(
        "---\norphan: true\n---\n\n# Page not found\n\nNo page of this site has that address.\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDIST_REF_SITE_URL", URL)
        patch.setenv("TORCHDIST_REF_EDIT_URL", EDIT)
        # The other extensions import the library, run ranks and draw: nine tenths of the time.
        needed = ["myst_parser", "offline_math", "head_tags", "lean_pages"]
        overrides = {"html_static_path": [], "templates_path": [str(pages.DOCS / "_templates")], "extensions": needed}
        app = Sphinx(
            source, pages.DOCS, html, folder / "trees", "html", overrides, status=io.StringIO(), warning=io.StringIO()
        )
        app.build()
    return html


def test_pages_have_their_canonical_address_and_an_edit_link(small_site: Path) -> None:
    for name in ("index", "b"):
        text = (small_site / f"{name}.html").read_text(encoding="utf-8")
        assert f'<link rel="canonical" href="{URL}{name}.html"' in text
        assert f'href="https://example.org/edit/{name}.md"' in text


def test_the_site_map_has_every_page_but_the_one_for_unknown_addresses(small_site: Path) -> None:
    text = (small_site / "sitemap.xml").read_text(encoding="utf-8")
    assert re.findall(r"<loc>([^<]+)</loc>", text) == [f"{URL}b.html", f"{URL}index.html"]


def test_the_page_for_unknown_addresses_links_from_the_site_and_is_not_indexed(small_site: Path) -> None:
    text = (small_site / "404.html").read_text(encoding="utf-8")
    assert '<base href="/docs/"/>' in text and 'content="noindex"' in text
