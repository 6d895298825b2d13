"""tests/README.md explains every folder of tests, and no folder that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_folder_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    folders = {path.parent.name for path in HERE.glob("*/*.py")}
    assert {name for name, _ in rows} == folders
    assert [name for name, _ in rows] == sorted(folders)
