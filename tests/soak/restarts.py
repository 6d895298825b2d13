"""Restart a job many times under each launcher, and count what reads an earlier attempt or names the wrong rank.

`python -m tests.soak restarts` runs jobs in turn and records them; `python -m tests.soak.restarts --restarts 30` runs
one job for each launcher and backend. In each attempt one rank raises, exits or is killed, before it joins, between two
calls or in a call; the last attempt ends well. A repeated attempt is one that failed though no rank was to fail in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from tests.ports import reserve_port
from tests.soak import restarted
from tests.soak.proofs import Limits, Outcome

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"torchdist_ref\.launch: rank (\d+) \(process")
OF_AGENTS = re.compile(r"torchdist_ref\.launch: rank (\d+) on \S+ \((process \d+)\).*restarting")
LAUNCHERS = ("ours", "ours, two agents", "standalone", "static", "two agents")
TWO_AGENTS = ("ours, two agents", "two agents")
BACKENDS = ("ref", "gloo", "torch:ref")
JOB = len(restarted.PLANS)
"""Restarts of one job of a proof: each end at each place once."""


def commands(launcher: str, world: int, limit: int, script: list[str]) -> list[list[str]]:
    """Return the commands that start one job; an agent of two starts one rank."""
    python, port = [sys.executable, "-m"], reserve_port()
    torchrun = [*python, "torch.distributed.run", f"--max-restarts={limit}", "--monitor-interval=0.1"]
    each, launch = f"--nproc-per-node={world}", [*python, "torchdist_ref.launch", f"--max-restarts={limit}"]
    if launcher == "ours":
        return [[*launch, each, *script]]
    if launcher == "ours, two agents":
        hosts = [*launch, "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1"]
        return [[*hosts, f"--node-rank={rank}", *script] for rank in range(2)]
    if launcher == "standalone":
        return [[*torchrun, "--standalone", each, *script]]
    if launcher == "static":
        return [[*torchrun, "--master-addr=127.0.0.1", f"--master-port={port}", each, *script]]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=soak"]
    return [[*torchrun, "--nnodes=2", "--nproc-per-node=1", *meeting, *script]] * 2


def run(launcher: str, backend: str, world: int, restarts: int, seconds: float) -> dict[str, Any]:
    """Run one job and count."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="restarts-") as name:
        folder = Path(name)
        script = [str(ROOT / "tests" / "soak" / "restarted.py"), name, backend, str(restarts)]
        # Each agent of two may count one failure of its own for each planned one.
        limit = restarts if launcher not in TWO_AGENTS else 3 * restarts
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (folder / "errors").open("wb") as errors:
            jobs = [
                subprocess.Popen(each, env=environment, stdout=errors, stderr=errors, cwd=folder)
                for each in commands(launcher, world, limit, script)
            ]
            try:
                codes = [job.wait(max(seconds - (time.monotonic() - began), 0.1)) for job in jobs]
            except subprocess.TimeoutExpired:
                codes = [-1]
            finally:
                for job in jobs:
                    if job.poll() is None:
                        job.terminate()
                        job.wait(60)
        found = count(folder, world, restarts)
    return {
        "launcher": launcher,
        "backend": backend,
        "codes": codes,
        **found,
        "seconds": round(time.monotonic() - began),
    }


def count(folder: Path, world: int, restarts: int) -> dict[str, Any]:
    """Read the notes of the ranks and what the launcher printed."""
    failures = [line.split() for line in restarted.notes(folder, "failures")]
    starts = Counter(tuple(line.split()[1:3]) for line in restarted.notes(folder, "starts"))
    survivors = [line.split(maxsplit=5) for line in restarted.notes(folder, "survivors")]
    final = [[str(restarts), str(rank)] for rank in range(world)]
    died = {attempt: float(when) for when, attempt, *_ in failures}
    late = sorted(float(when) - died[attempt] for when, attempt, *_ in survivors)
    printed = (folder / "errors").read_text(encoding="utf-8", errors="replace")
    # Each of several agents prints the failure for which all restart, beside those of its own ranks.
    together = dict.fromkeys(OF_AGENTS.findall(printed))
    named = [int(rank) for rank, _ in together] or [int(rank) for rank in OURS.findall(printed)]
    return {
        "restarts": len(failures),
        "wanted": restarts,
        "done": sorted(line.split()[1:] for line in restarted.notes(folder, "done")) == final,
        "repeated": sum(number - 1 for number in starts.values()),
        "stale": len(restarted.notes(folder, "stale")),
        "early done": [line for line in restarted.notes(folder, "done") if line.split()[1] != str(restarts)],
        "lost": restarted.notes(folder, "lost")[:5],
        "survivors": len(survivors),
        "survivors that name the culprit": sum(line[3] == "named" for line in survivors),
        "median seconds from failure to survivor's error": round(late[len(late) // 2], 3) if late else None,
        "launcher named": sum(a == int(b[2]) for a, b in zip(named, failures, strict=False)) if named else None,
        "not naming": [" ".join(line[1:])[:300] for line in survivors if line[3] != "named"][:3],
    }


def add(outcome: Outcome, found: dict[str, Any]) -> None:
    """Count the result of a job among those of all; a restart that is missing, stale or repeated is a failure."""
    cell = f"{found['launcher']}, {found['backend']}"
    lost = found["wanted"] - found["restarts"] + (not found["done"]) + found["stale"] + found["repeated"]
    outcome.done += found["restarts"]
    for _ in range(lost):
        outcome.fail(json.dumps(found))
    named = "survivors that name the culprit"
    outcome.counts.update({cell: found["restarts"], "survivors": found["survivors"], named: found[named]})
    if (by_launcher := found["launcher named"]) is not None:
        outcome.counts["restarts under our launcher whose first failure it names"] += by_launcher


def prove(limits: Limits) -> Outcome:
    """Run jobs of `JOB` restarts, each under the next launcher or backend."""
    outcome, cells = Outcome(), list(product(LAUNCHERS, BACKENDS))
    for seed, restarts in limits.seeds(JOB):
        launcher, backend = cells[seed % len(cells)]
        add(outcome, run(launcher, backend, 2, restarts, 60.0 * restarts + 60.0))
    return outcome


def main() -> None:
    """Run the jobs asked for, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.restarts")
    parser.add_argument("--restarts", type=int, default=30)
    parser.add_argument("--world", type=int, default=3, help="ranks; two agents start one each")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append")
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of one job")
    options = parser.parse_args()
    outcome = Outcome()
    for launcher in options.launcher or LAUNCHERS:
        for backend in options.backend or BACKENDS:
            world = options.world if launcher not in TWO_AGENTS else 2
            found = run(launcher, backend, world, options.restarts, options.seconds)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
            add(outcome, found)
    sys.exit(outcome.failed > 0)


if __name__ == "__main__":
    main()
