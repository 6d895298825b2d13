"""Plant each fault in a copy of the package and run the tests that must notice; a fault that survives is an error.

Prints a line for each fault while it goes, and a closing line. ``python -m tests.mutants WORDS`` takes only the
faults whose name has the words, ``--changed`` those that a change concerns and a share of the others (`choice`). The
copy is made in a temporary folder, and the tests import it from there, so that the working tree is never touched.

Each run is a fork of this process, which has loaded torch and pytest but nothing of the project.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import os
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from typing import NoReturn

from tests import huge_pages
from tests.mutants.choice import concerned, named
from tests.mutants.planting import Fault, plant, planted

ROOT = Path(__file__).resolve().parents[2]
# A fault may make the tests hang; then they have noticed it too.
LIMIT = 120.0
# Some faults make ranks wait for a time-out; four runs more than the cores of CI fill that time.
RUNS_AT_ONCE = 6
# Some builds of Python have none in `os`. Loaded by its path: the project must not be loaded here.
PIDFD_OPEN = runpy.run_path(str(ROOT / "torchdist_ref" / "processes" / "linux_calls.py"))["pidfd_open"]
# Tests that run without a fault at first.
CONTROL = "tests/stores/test_prefix.py tests/parallel/test_bucketing.py"
# The tests that CI runs.
MARKS = "not long and not benchmark and not browser and not deaths"
# Loaded once, before the forks. Pytest's plugins are not: pytest must load them itself.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "hypothesis.strategies", "pytest")
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")


@dataclass
class Run:
    """Tests running on a copy of the package, in a process group of their own.

    Attributes:
        fault: Fault in the copy; None plants nothing.
        attempt: 1, or 2 if the tests did not notice the fault at first.
        folder: Temporary folder of the copy.
        pid: Process id, which is the id of its group too.
        handle: File descriptor that is readable when the process has ended.
        started: Time of the start.
    """

    fault: Fault | None
    attempt: int
    folder: str
    pid: int
    handle: int
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.started + LIMIT - time.monotonic()

    def end(self) -> tuple[str, float]:
        """Kill what is left of the group; return how the tests noticed, empty if they did not, and the CPU seconds.

        Raises:
            RuntimeError: Pytest could not do its work.
        """
        hung = not select.select([self.handle], [], [], 0)[0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        os.close(self.handle)
        output = Path(self.folder, "output").read_text(encoding="utf-8", errors="replace")
        # Processes of other groups may write there until they have ended, too.
        shutil.rmtree(self.folder, ignore_errors=True)
        # 2 to 5 mean that pytest could not do its work; a crash of the tested process is a notice too, and so is a
        # Ctrl-C that came when the test did not expect it any more.
        if code in (2, 3, 4, 5) and not hung and not (code == 2 and "KeyboardInterrupt" in output):
            name = self.fault.name if self.fault else "no fault"
            raise RuntimeError(f"{name}: pytest ended with {code}:\n{output[-2000:]}")
        how = f"hung for {LIMIT:g} s" if hung else f"ended with {code}" if code else ""
        return how, usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def original() -> Iterator[Path]:
    """Copy what the tests need into a folder, compiled, so that no run compiles more than the fault.

    Raises:
        RuntimeError: A run has changed a file of it, and so the files of the runs after it.
    """
    with tempfile.TemporaryDirectory() as name:
        for part in ("torchdist_ref", "tests"):
            shutil.copytree(ROOT / part, Path(name, part), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", name)
        compileall.compile_dir(Path(name, "torchdist_ref"), quiet=1)
        before = states(Path(name))
        yield Path(name)
        changed = sorted({path for path, _ in before ^ states(Path(name))})
        if changed:
            raise RuntimeError(f"files that all runs share were changed: {', '.join(changed)}")


def states(folder: Path) -> set[tuple[str, tuple[int, int]]]:
    """Return what tells whether a file of a folder was written: size and time of each."""
    found = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return {(str(path.relative_to(folder)), (stat.st_size, stat.st_mtime_ns)) for path, stat in found}


def start(original: Path, fault: Fault | None, tests: str, attempt: int = 1) -> Run:
    """Link the files of the original, plant the fault in a copy, and start the tests in a forked process."""
    folder = tempfile.mkdtemp()
    # Links instead of copies: 900 files take 0.35 s of this process, as much as many a run.
    shutil.copytree(original, folder, dirs_exist_ok=True, copy_function=os.link)
    if fault:
        Path(cache_from_source(plant(fault, Path(folder, "torchdist_ref")))).unlink()
    pid = os.fork()
    if not pid:
        run_pytest(folder, tests)
    return Run(fault, attempt, folder, pid, PIDFD_OPEN(pid))


def run_pytest(folder: str, tests: str) -> NoReturn:
    """Do what ``python -m pytest`` does in the folder, with its copy of the project, and exit."""
    code: object = 70
    try:
        os.setsid()
        output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        forget_project(folder)
        sys.argv = ["pytest", "-x", "-q", "-m", MARKS, "-p", "no:cacheprovider", "--disable-plugin-autoload"]
        sys.argv += [word for name in PLUGINS for word in ("-p", name)] + split(tests)
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 70)


def forget_project(folder: str) -> None:
    """Have this process and its children import the project from the folder, and torch load its backend from there."""
    original = {str(ROOT), "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [folder, *(path for path in sys.path if path not in original)]
    os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "torchdist_ref")]:
        del sys.modules[name]
    sys.modules["torch"]._import_device_backends()


def split(tests: str) -> list[str]:
    """Arguments for pytest; what follows -k is one of them."""
    paths, _, words = tests.partition(" -k ")
    return [*paths.split(), *(["-k", words] if words else [])]


def ended(running: list[Run]) -> Run:
    """Wait until a run ends or has used up its time, and take it from the list."""
    by_handle = {run.handle: run for run in running}
    done, _, _ = select.select(list(by_handle), [], [], max(0.0, min(run.seconds_left for run in running)))
    run = by_handle[done[0]] if done else min(running, key=lambda run: run.seconds_left)
    running.remove(run)
    return run


def verdicts(chosen: list[Fault], original: Path) -> Iterator[tuple[Fault, str, str]]:
    """Run the tests of each fault, and yield it with how they noticed it and how long it took, as they end.

    Some faults are races, which a lucky run does not show: those that were not noticed get a second run, and
    the line says so, since a fault that needs it asks for a better test.
    """
    waiting = deque((fault, 1) for fault in chosen)
    running: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < RUNS_AT_ONCE:
                fault, attempt = waiting.popleft()
                running.append(start(original, fault, fault.tests, attempt))
            run = ended(running)
            assert run.fault
            how, busy = run.end()
            if how or run.attempt == 2:
                how = "noticed at the second try" if how and run.attempt == 2 else how
                yield run.fault, how, f"{time.monotonic() - run.started:.0f} s ({busy:.1f} s of CPU)"
            else:
                waiting.appendleft((run.fault, 2))
    finally:
        for run in running:
            with contextlib.suppress(RuntimeError):
                run.end()


def preload() -> None:
    """Import what the runs share. Torch must not load the project's backend yet: each run loads its own copy's."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in PRELOADED:
        importlib.import_module(name)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    assert "torchdist_ref" not in sys.modules
    # What is loaded stays: collections in the forks need not visit it, and forks share it.
    gc.freeze()
    huge_pages.collapse()


def main(words: str = "") -> int:
    preload()
    chosen = named(planted(), words)
    if words == "--changed":
        chosen, why = concerned(planted())
        print(f"{len(chosen)} of {len(planted())}: {why}", flush=True)
    survivors = []
    with original() as folder:
        # Without a fault the tests pass, so a failure below is due to the fault.
        if how := ended([start(folder, None, CONTROL)]).end()[0]:
            raise RuntimeError(f"{CONTROL} without a fault: {how}")
        for number, (fault, how, taken) in enumerate(verdicts(chosen, folder), 1):
            verdict = how if how.endswith("second try") else "killed" if how else "SURVIVED"
            print(f"[{number}/{len(chosen)}] {verdict} in {taken}: {fault.name}", flush=True)
            survivors += [] if how else [fault.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted faults were noticed by the tests")
    for name in survivors:
        print(f"not noticed: {name}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
