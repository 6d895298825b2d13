"""Tasks of new readers: from the landing page, three clicks on links that they can read lead to the answer."""

from __future__ import annotations

import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.conftest import SITE

pytestmark = pytest.mark.browser

TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
MOST_CLICKS = 3


class Words(HTMLParser):
    """Text of a page, and its links by label."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self.text: list[str] = []
        self.unread = 0
        self.link: tuple[str, int] | None = None
        self.feed(path.read_text(encoding="utf-8"))
        self.words = " ".join("".join(self.text).replace("’", "'").split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.unread += tag in ("script", "style")
        if tag == "a":
            self.link = dict(attrs).get("href") or "", len(self.text)

    def handle_endtag(self, tag: str) -> None:
        self.unread -= tag in ("script", "style")
        if tag == "a" and self.link:
            address, start = self.link
            self.links.setdefault(" ".join("".join(self.text[start:]).replace("’", "'").split()), address)
            self.link = None

    def handle_data(self, data: str) -> None:
        if not self.unread:
            self.text.append(data)


@cache
def read(path: Path) -> Words:
    """Return the text and the links of a page."""
    return Words(path)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_answered_after_three_clicks(task: str) -> None:
    path = SITE / "index.html"
    clicks = TASKS[task]["click"]
    assert len(clicks) <= MOST_CLICKS
    for label in clicks:
        links = read(path).links
        assert label in links, f"{path.name} has no link with this label: {label}"
        path = (path.parent / unquote(links[label].partition("#")[0])).resolve()
    assert TASKS[task]["answer"] in read(path).words, path


def test_there_are_as_many_tasks_as_were_tried() -> None:
    assert len(TASKS) >= 30
