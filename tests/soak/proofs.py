"""Proofs at length: their results, how failures are counted, and the record that a page of the site shows.

A proof is a module with a function `prove(limits)`, which runs until its count or its time is over. `python -m
tests.soak NAME --count N --seconds S` runs one and writes its row into `docs/soak.json`. A failure is printed with the
seed that reproduces it.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).resolve().parents[2] / "docs" / "soak.json"
SHOWN = 5


@dataclass
class Limits:
    """Extent of one proof.

    Attributes:
        count: Number of runs asked for.
        seed: Seed of the first run.
        seconds: Time after which no further run begins.
    """

    count: int
    seed: int = 0
    seconds: float = 1e9
    began: float = field(default_factory=time.monotonic)

    def seeds(self, step: int = 1) -> Iterator[tuple[int, int]]:
        """Yield a seed and a number of runs for it until the count or the time is over."""
        for done in range(0, self.count, step):
            if time.monotonic() - self.began > self.seconds:
                return
            yield self.seed + done // step, min(step, self.count - done)


@dataclass
class Outcome:
    """Result of a proof.

    Attributes:
        done: Number of runs.
        failures: A line for each of the first failures, with its seed.
        failed: Number of failures.
        counts: What the runs were, for the record.
    """

    done: int = 0
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def fail(self, text: str) -> None:
        """Note a failure, and print the first ones."""
        self.failed += 1
        if len(self.failures) < SHOWN:
            self.failures.append(text)
            print(f"FAILED: {text}", flush=True)


Prove = Callable[[Limits], Outcome]


def machine() -> str:
    """Return the processor, the cores and the system."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    cores = sum(line.startswith("processor") for line in lines)
    return f"{model or platform.machine()}, {cores} cores, Linux {platform.release().split('-')[0]}"


def write_row(name: str, limits: Limits, outcome: Outcome, path: Path = RECORD) -> dict[str, Any]:
    """Write the row of a proof into the record in place of its last one, and return it."""
    row = {
        "proof": name,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": limits.seed,
        "asked": limits.count,
        "done": outcome.done,
        "failures": outcome.failed,
        "seconds": round(time.monotonic() - limits.began, 1),
        "counts": dict(sorted(outcome.counts.items())),
    }
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = sorted([*(each for each in rows if each["proof"] != name), row], key=lambda each: str(each["proof"]))
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return row


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one to three random changes: flips, cuts, insertions, repetitions, and numbers at limits."""
    out = bytearray(data)
    for _ in range(1 + int(rng.random() * 3)):
        at = int(rng.random() * (len(out) + 1))
        end = min(len(out), at + 1 + int(rng.random() * 12))
        kind = int(rng.random() * 7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << int(rng.random() * 8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at:end]
        elif kind == 3:
            out[at:at] = rng.randbytes(1 + int(rng.random() * 9))
        elif kind == 4:
            out[at:at] = out[at:end]
        elif kind == 5:
            out[at : at + 8] = rng.choice(BOUNDARIES)
        elif at < len(out):
            out[at] = int(rng.random() * 256)
    return bytes(out)


BOUNDARIES = [
    (number % 2**64).to_bytes(8, "little")
    for limit in (0, 8192, 131072, 8 * 2**20, 12 * 2**20, 2**40, 2**63, 2**64, 64, 256)
    for number in (limit - 1, limit, limit + 1)
]


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """Return bytes cut at random places, most often at one or two."""
    choice = rng.random()
    if choice < 0.25:
        return [data]
    count = 1 + int(rng.random() * 2) if choice < 0.97 else min(len(data), 40)
    cuts = sorted(int(rng.random() * (len(data) + 1)) for _ in range(count))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
