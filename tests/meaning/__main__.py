"""Run cases by hand: ``python -m tests.meaning WORLD "Case('all_reduce', dtype='bool')" ...``."""

from __future__ import annotations

import sys

from tests.meaning.cases import Case
from tests.meaning.ranks import Pool


def main(world: str, *cases: str) -> None:
    """Check each case."""
    with Pool(int(world)) as pool:
        for text in cases:
            case = eval(text, {"Case": Case})
            pool.check(case)
            print(f"{case} holds with {world} ranks")


if __name__ == "__main__":
    main(*sys.argv[1:])
