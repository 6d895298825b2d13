"""Write the stub by which type checkers see the package: python -m tests.typed."""

from __future__ import annotations

import subprocess
import sys

from tests.typed.stub import STUB, text

if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
    for step in (["format", "-q"], ["check", "-q", "--fix"], ["format", "-q"]):
        subprocess.run([sys.executable, "-m", "ruff", *step, STUB], check=True)
    print(f"wrote {STUB.name}")
