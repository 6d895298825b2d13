"""Rate four pages of the built site with Lighthouse, and record the medians of three runs in docs/measured.json.

Needs Chromium, Node.js and Lighthouse: `nox -s lighthouse` installs the last outside the repository's files and calls
this. The ratings of speed depend on the machine and on what else it runs; the others do not.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gzip
import http.server
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RECORD = DOCS / "measured.json"
PAGES = (
    "index.html",
    "collectives/all_reduce.html",
    "reference/distributed.html",
    "tutorials/03_train_digits.html",
)
# Rating, as Lighthouse names it, and the least that a page is to reach.
GOALS = {"performance": 0.90, "accessibility": 0.95, "best-practices": 0.95, "seo": 0.95}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TEXT = (".html", ".css", ".js", ".svg", ".json")
RUNS = 3


class Compressing(http.server.SimpleHTTPRequestHandler):
    """Server of the site that compresses text, as hosts of sites do."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Send a file."""
        path = Path(self.translate_path(self.path))
        found = path.is_file()
        body = path.read_bytes() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", self.guess_type(path))
        if path.suffix in TEXT and found:
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def rate(lighthouse: Path, url: str) -> dict[str, float]:
    """Return the ratings of one run on a page, between 0 and 1."""
    node, browser = shutil.which("node"), next(filter(None, map(shutil.which, BROWSERS)), None)
    if node is None or browser is None:
        sys.exit("Install Node.js and Chromium.")
    options = ["--quiet", "--output=json", "--chrome-flags=--headless=new --no-sandbox"]
    environment = {**os.environ, "CHROME_PATH": browser}
    answer = subprocess.run(
        [node, str(lighthouse / "cli" / "index.js"), url, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if answer.returncode:
        sys.exit(f"Lighthouse failed on {url}: {answer.stderr[-2000:]}")
    categories = json.loads(answer.stdout)["categories"]
    return {name: categories[name]["score"] for name in GOALS}


def main() -> None:
    """Rate the pages, print and record the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lighthouse", type=Path, help="folder of the package lighthouse")
    parser.add_argument("--site", type=Path, default=DOCS / "_build" / "html", help="folder of the built site")
    parser.add_argument("--record", metavar="MACHINE", help="record the medians; a machine of docs/measured.json")
    parser.add_argument("--how", default="nothing else ran", help="what else the machine did; default: %(default)s")
    chosen = parser.parse_args()
    handler = functools.partial(Compressing, directory=str(chosen.site.resolve()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = []
    for page in PAGES:
        runs = [rate(chosen.lighthouse, f"http://127.0.0.1:{server.server_port}/{page}") for _ in range(RUNS)]
        medians = {name: statistics.median(run[name] for run in runs) for name in GOALS}
        rows.append([page.removesuffix(".html"), *(f"{median:.2f}" for median in medians.values())])
        short = [f"{name} {medians[name]:.2f} < {goal}" for name, goal in GOALS.items() if medians[name] < goal]
        print(*rows[-1], *short, flush=True)
    server.shutdown()
    if chosen.record:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        version = json.loads((chosen.lighthouse / "package.json").read_text(encoding="utf-8"))["version"]
        record["entries"]["lighthouse"] = {
            "date": datetime.date.today().isoformat(),
            "machine": chosen.record,
            "how": f"by docs/lighthouse.py, medians of {RUNS} runs of Lighthouse {version}, phone, {chosen.how}",
            "header": ["page", *GOALS],
            "rows": rows,
            "values": {},
        }
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
