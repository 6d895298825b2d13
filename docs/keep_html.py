"""Remove the built pages if anything that they are generated from has changed, except pages and docstrings.

Sphinx builds a page again when its text has changed, or a module whose docstrings it shows. It does not know that pages
are also made by the extensions, the templates, the recorded figures and runs of the library. Run by `nox -s docs`.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from run_tutorials import fingerprint_of_library

DOCS = Path(__file__).resolve().parent
BUILT = DOCS / "_build"
STAMP = BUILT / "made_of"
PAGES = (".md", ".rst", ".ipynb", ".zip", ".pyc")


def made_of(docs: Path, library: str) -> str:
    """Return a text that changes with the library's code, the list of pages, and all files that are no pages."""
    digest = hashlib.sha256(library.encode())
    for path in sorted(docs.rglob("*")):
        name = path.relative_to(docs)
        if path.is_file() and name.parts[0] not in ("_build", "_generated"):
            digest.update(f"{name}\n".encode())
            digest.update(b"" if path.suffix in PAGES else path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Compare with the last build."""
    now = made_of(DOCS, fingerprint_of_library())
    if not STAMP.exists() or STAMP.read_text(encoding="utf-8") != now:
        for folder in ("html", "doctrees"):
            shutil.rmtree(BUILT / folder, ignore_errors=True)
    BUILT.mkdir(exist_ok=True)
    STAMP.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    main()
