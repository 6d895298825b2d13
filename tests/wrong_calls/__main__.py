"""Record what the first call of each kind raises, for the error index of the site: python -m tests.wrong_calls.

With a path, the record is written there instead of the site's.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from tests.wrong_calls.record import RECORD, as_text

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    path.write_text(as_text(), encoding="utf-8")
    print(f"wrote {path}")
