"""The downloadable script of the page on Lightning and accelerate prints what the page shows."""

import contextlib
import io
import os
import warnings
from typing import Any

from tests.docs import pages
from tests.ports import reserve_port
from torchdist_ref.testing import run

SCRIPT = pages.DOCS / "how-to" / "train_lightning.py"


def test_it_prints_what_the_page_shows() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    # Loaded once, before the ranks are forked.
    import lightning  # noqa: F401

    text = SCRIPT.read_text(encoding="utf-8")
    source = compile(text, str(SCRIPT), "exec")
    port = str(reserve_port())

    def launched(rank: int) -> str:
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(number, GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(source, names)
        return printed.getvalue()

    shown = [block.text for block in pages.blocks(SCRIPT.with_name("trainers.md")) if block.language == "text"]
    assert "".join(run(launched, 2, ranks="processes", init=False)) == shown[0]
