"""Let every scenario of `tests.elastic.scenarios` happen many times to one job on three hosts.

`python -m tests.soak.hosts --repeat 100` prints a line for each scenario: how often all workers were back at work in
time, with the right ranks, and the longest time. `nox -s soak_hosts` runs it. It needs network namespaces.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.elastic.scenarios import SCENARIOS, three_hosts
from torchdist_ref.testing import namespaces


def repeat(name: str, times: int) -> bool:
    """Run one scenario; return whether it went well every time."""
    good, seconds = 0, [0.0]
    with namespaces.hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:
        while good < times:
            folder_of_job = Path(folder, str(good))
            folder_of_job.mkdir()
            with three_hosts(folder_of_job, hosts) as job:
                try:
                    while good < times:
                        SCENARIOS[name](job)
                        good += 1
                except AssertionError as error:
                    print(f"{name}: {error or 'assertion'} after {good}; lines:", *job.agents.lines[-20:], sep="\n  ")
                    break
                finally:
                    seconds += job.seconds
    print(f"{name:30} {good:4} of {times}; all back at work within {max(seconds):.2f} s", flush=True)
    return good == times


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=100, help="how often each happens (default: 100)")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)} (default: all)")
    args = parser.parse_args()
    if reason := namespaces.missing():
        sys.exit(f"cannot run here: {reason}")
    failed = [name for name in args.scenarios or SCENARIOS if not repeat(name, args.repeat)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
