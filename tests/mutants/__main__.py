"""Plant each fault in a copy of the package and run the tests that must notice; a fault that survives is an error.

Prints a line for each fault while it goes, and a closing line. ``python -m tests.mutants WORDS`` takes only the
faults whose name has the words. Two run at once. The copy is made in a temporary folder, and the tests import it
from there, so that the working tree is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.planting import Fault, plant, planted

ROOT = Path(__file__).resolve().parents[2]
# A fault may make the tests hang; then they have noticed it too.
LIMIT = 120.0


def copy_with(fault: Fault, folder: Path) -> None:
    """Copy what the tests need into a folder, with the fault in it."""
    for part in ("torchdist_ref", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    plant(fault, folder / "torchdist_ref")


def notice(fault: Fault) -> str:
    """Run the tests on the faulty copy, and say how they noticed; empty if they did not.

    Some faults are races, which a lucky run does not show: those that were not noticed get a second run, and
    the line says so, since a fault that needs it asks for a better test.
    """
    return attempt(fault) or (attempt(fault) and "noticed at the second try")


def attempt(fault: Fault) -> str:
    """One run of `notice`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_with(fault, folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *split(fault.tests)]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return run(command, folder, environment)


def split(tests: str) -> list[str]:
    """Arguments for pytest; what follows -k is one of them."""
    paths, _, words = tests.partition(" -k ")
    return [*paths.split(), *(["-k", words] if words else [])]


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"hung for {LIMIT:g} s"
    # 2 to 5 mean that pytest could not do its work; a crash of the tested process is a notice too.
    if process.returncode in (2, 3, 4, 5):
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")
    return f"ended with {process.returncode}" if process.returncode else ""


def main(words: str = "") -> int:
    chosen = [fault for fault in planted() if words in fault.name]
    survivors = []
    with ThreadPoolExecutor(2) as pool:
        for number, (fault, (how, seconds)) in enumerate(zip(chosen, pool.map(timed, chosen), strict=True), 1):
            verdict = how if how.endswith("second try") else "killed" if how else "SURVIVED"
            print(f"[{number}/{len(chosen)}] {verdict} in {seconds:.0f} s: {fault.name}", flush=True)
            survivors += [] if how else [fault.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted faults were noticed by the tests")
    for name in survivors:
        print(f"not noticed: {name}")
    return bool(survivors)


def timed(fault: Fault) -> tuple[str, float]:
    start = time.monotonic()
    return notice(fault), time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
