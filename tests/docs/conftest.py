"""The built site in Chromium, for the tests that need a browser (`nox -s site`).

Needs Chromium or Chrome, and the site in `docs/_build/html` or in the folder that `TORCHDIST_REF_SITE` names.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs import pages

SITE = Path(os.environ.get("TORCHDIST_REF_SITE", pages.DOCS / "_build" / "html"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Server of the site as a host would serve it: unknown addresses get the page 404.html."""

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the site's own page for an unknown address."""
        body = (SITE / "404.html").read_bytes() if code == 404 else b""
        self.send_response(code, message)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(http.server.ThreadingHTTPServer):
    """Server that does not wait for connections that the browser keeps open."""

    block_on_close = False


@contextlib.contextmanager
def served(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve with a handler in this block; yields the address."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Serve the site."""
    assert (SITE / "index.html").exists(), f"build the site first: there is none in {SITE}"
    with served(functools.partial(Quiet, directory=str(SITE))) as site:
        yield site


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start the browser of this machine."""
    from playwright.sync_api import sync_playwright

    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert found, f"install one of {', '.join(BROWSERS)}"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open an empty page."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    # Half of what a test may take: a busy machine loads Perfetto or a large page for longer than the default of 30 s.
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()
