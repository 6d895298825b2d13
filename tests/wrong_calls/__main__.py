"""Record what the first call of each kind raises, for the error index of the site: python -m tests.wrong_calls."""

from __future__ import annotations

import os
import warnings

from tests.wrong_calls.record import RECORD, as_text

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    RECORD.write_text(as_text(), encoding="utf-8")
    print(f"wrote {RECORD}")
