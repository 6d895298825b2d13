"""Searches that readers type into the site's own search: an answer is among the first three results."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytestmark = pytest.mark.browser

SEARCHES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("searches.toml").read_text("utf-8"))["answers"]
RANKED_DOWN = ("changelog", "source/", "reference/surface_")


def first_three(page: Any, address: str, query: str) -> list[str]:
    """Return the pages of the first three results, each with its section."""
    page.goto(f"{address}search.html?q={quote(query)}")
    page.wait_for_function("document.querySelector('.search-summary')?.textContent.startsWith('Search finished')")
    links = page.locator("#search-results li > a").all()[:3]
    return [str(link.get_attribute("href")).replace(".html", "") for link in links]


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_an_answer_in_the_first_three(page: Any, address: str, query: str) -> None:
    found = first_three(page, address, query)
    assert any(link.partition("#")[0] == answer for link in found for answer in SEARCHES[query]), found


def test_there_are_enough_searches() -> None:
    assert len(SEARCHES) >= 90


@pytest.mark.parametrize("query", ["hang", "deadlock", "profile", "recorder", "timeout", "all_gather"])
def test_lists_of_names_and_changes_do_not_drown_answers(page: Any, address: str, query: str) -> None:
    assert not [link for link in first_three(page, address, query) if link.startswith(RANKED_DOWN)]


def test_a_search_without_answer_says_so(page: Any, address: str) -> None:
    page.goto(f"{address}search.html?q=xyzzyx")
    page.wait_for_function("document.querySelector('.search-summary')?.textContent.includes('did not match')")
    assert page.locator("#search-results li").count() == 0


def test_a_name_finds_its_documentation(page: Any, address: str) -> None:
    for name in ("monitored_barrier", "init_process_group", "TCPStore", "new_group"):
        assert any(link.endswith(f"torchdist_ref.{name}") for link in first_three(page, address, name)), name
