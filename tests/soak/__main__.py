"""`python -m tests.soak NAME [--count N] [--seed S] [--seconds T]`: run a proof and write its row into the record."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import NamedTuple

from tests.soak.proofs import Limits, write_row


class Proof(NamedTuple):
    """Module of `tests.soak`, and the number of runs at full length."""

    module: str
    count: int


PROOFS = {
    "parser": Proof("parser", 10_000_000),
    "sessions": Proof("sessions", 1_000_000),
    "histories": Proof("histories", 1_000),
    "collectives": Proof("collectives", 1_000_000),
    "random_deaths": Proof("random_deaths", 1_000),
    "networks": Proof("networks", 280),
    "hosts": Proof("hosts", 700),
    "restarts": Proof("restarts", 1_000),
}


def main() -> int:
    """Run the proofs that the arguments name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"proofs: {', '.join(PROOFS)}; all by default")
    parser.add_argument("--count", type=int, help="number of runs; the full length by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which no further run begins")
    parser.add_argument("--no-record", action="store_true", help="leave docs/soak.json as it is")
    options = parser.parse_args()
    if unknown := set(options.names) - PROOFS.keys():
        parser.error(f"unknown proofs {sorted(unknown)}; there are {', '.join(PROOFS)}")
    failed = 0
    for name in options.names or PROOFS:
        proof = PROOFS[name]
        limits = Limits(options.count or proof.count, options.seed, options.seconds)
        outcome = importlib.import_module(f"tests.soak.{proof.module}").prove(limits)
        if options.no_record:
            print(
                f"{name}: {outcome.done:,} of {limits.count:,} done, {outcome.failed} failures {dict(outcome.counts)}"
            )
        else:
            print(json.dumps(write_row(name, limits, outcome)), flush=True)
        failed += outcome.failed
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
