"""Runs of a check: ranks forked from a process that has imported everything, watched until each has ended.

A backend under test may hang, crash, or end the interpreter, so each check has processes of its own, and the command
itself never makes a group. A fork takes milliseconds where a new interpreter would import torch for a second and more.

A rank that is to end as programs do, with the interpreter's own clean-up, raises `ProgramEnds` through the frames of
the command that it has inherited; all others leave by `os._exit`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torchdist_ref.acid.checks import Check, RankLeaves, Ranks
from torchdist_ref.processes.control import fork_without_garbage
from torchdist_ref.stores import FileStore

PASSED, REFUSED, FAILED, CRASHED, HUNG, NOT_RUN = "pass", "refused", "fail", "crash", "hang", "not run"
KINDS = (PASSED, REFUSED, FAILED, CRASHED, HUNG, NOT_RUN)
"""Outcomes. *Refused* is an exception that says that the backend does not do this; *fail* is any other, or a value."""
_REFUSAL = re.compile(
    r"not (yet )?(support|implement|available)|unsupported|does not (support|provide|implement)|only supports?\b"
    r"|cannot use \w+|invalid (scalar type|tensor size|tensor type)|must be contiguous",
    re.IGNORECASE,
)
_GROUP_SECONDS = 60.0
_AFTER_A_FAILURE = 4.0
"""Seconds that the other ranks have once one has failed: they may wait for it."""
_LOOK_SECONDS = 0.01
_SHARED_MEMORY = Path("/dev/shm")
_LARGE_FACTOR = 10


class ProgramEnds(BaseException):
    """A rank ends as a program does: the command lets it through, and exits with its code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Setting:
    """Where checks run.

    Attributes:
        backend: Name of the backend.
        api: Name of the module whose functions are called.
        world: Number of ranks.
        device: Type of the tensors' device.
        seconds: Seconds after which a check hangs; ten times as many if its tensors are large.
        modules: Modules that register the backend.
        launcher: Command that starts Python as all ranks; ``{world}`` is their number. Default: ranks are forked.
    """

    backend: str
    api: str = "torch.distributed"
    world: int = 3
    device: str = "cpu"
    seconds: float = 30.0
    modules: Sequence[str] = ()
    launcher: str = ""

    def seconds_of(self, check: Check) -> float:
        """Return the seconds after which a check hangs."""
        return self.seconds * (_LARGE_FACTOR if check.large else 1)


@dataclass(frozen=True)
class CheckOutcome:
    """Result of a check.

    Attributes:
        kind: One of `KINDS`.
        detail: The rank that shows it, with its exception or its end; empty if the check has passed.
        seconds: Seconds that it took.
    """

    kind: str
    detail: str = ""
    seconds: float = 0.0


class RankProcesses(Protocol):
    """Processes of the ranks of a check."""

    def poll(self, rank: int) -> int | None:
        """Return the exit code of a rank, None while it runs; to be called until it has ended."""

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank, None if it has not begun."""

    def kill(self, rank: int) -> None:
        """Kill a rank that has not ended."""

    def close(self, world: int) -> None:
        """End whatever was started beside the ranks."""


def run_check(
    check: Check, setting: Setting, start: Callable[[Check, Setting, str], RankProcesses] | None = None
) -> CheckOutcome:
    """Run a check on ranks of its own. To be called by a process that has no group and no other threads.

    Args:
        check: Check.
        setting: Setting of the run.
        start: Function that starts the ranks, which share a folder. Default: they are forked.
    """
    start = start or _fork_ranks
    if check.needs_two and setting.world < 2:
        return CheckOutcome(NOT_RUN, "it needs two ranks")
    folder = tempfile.mkdtemp(prefix="torchdist_ref-acid-")
    files_before = _memory_files()
    begin = time.monotonic()
    ranks = start(check, setting, folder)
    codes, hung = _wait(ranks, setting.world, check, Path(folder), begin + setting.seconds_of(check))
    ranks.close(setting.world)
    _remove_memory(Path(folder), files_before)
    kind, detail = _judge(check, codes, hung, Path(folder), setting)
    shutil.rmtree(folder, ignore_errors=True)
    return CheckOutcome(kind, detail, round(time.monotonic() - begin, 2))


def try_import(module: str, seconds: float = 60.0) -> CheckOutcome:
    """Import a module in a process of its own, since it may end or block the interpreter."""
    folder = tempfile.mkdtemp(prefix="torchdist_ref-acid-")
    check = Check(f"import {module}", "values", lambda ranks: None, "The module can be imported.", "", False)
    begin = time.monotonic()
    ranks = _ForkedRanks([lambda: _in_child(Path(folder), 0, seconds, lambda: import_module(module))])
    codes, hung = _wait(ranks, 1, check, Path(folder), begin + seconds)
    kind, detail = _judge(check, codes, hung, Path(folder), Setting("", world=1, seconds=seconds))
    shutil.rmtree(folder, ignore_errors=True)
    return CheckOutcome(FAILED if kind == REFUSED else kind, detail, round(time.monotonic() - begin, 2))


# In a rank


def be_rank(check: Check, setting: Setting, rank: int, folder: str) -> NoReturn:
    """Make the calls of a check as one of its ranks, and end this process."""
    dist: Any = import_module(setting.api)
    count = 0

    def init(timeout: timedelta) -> None:
        nonlocal count
        count += 1
        address = f"file://{folder}/rendezvous-{count}"
        dist.init_process_group(
            setting.backend, init_method=address, rank=rank, world_size=setting.world, timeout=timeout
        )
        # A rank may be done with its group while others still connect, which Gloo takes for a failure: meet elsewhere.
        store = FileStore(f"{folder}/made-{count}", setting.world)
        store.set(f"{rank}", "made")
        _record_memory(Path(folder), os.getpid())
        store.wait([f"{other}" for other in range(setting.world)])

    def calls() -> None:
        if check.initialized:
            init(timedelta(seconds=_GROUP_SECONDS))
        check.run(Ranks(dist, rank, setting.world, setting.device, folder, init))
        if dist.is_initialized():
            dist.destroy_process_group()

    _in_child(Path(folder), rank, setting.seconds_of(check), calls)


def _in_child(folder: Path, rank: int, seconds: float, calls: Callable[[], object]) -> NoReturn:
    """Make the calls in this forked process, with its output in a file, and end it."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setpgid(0, 0)
    faulthandler.enable(output)
    faulthandler.dump_traceback_later(max(0.5, seconds - 1.0), file=output)
    code, program = 0, False
    try:
        calls()
        result = PASSED, ""
    except RankLeaves:
        result = PASSED, ""
    except SystemExit as end:
        result, program, code = (PASSED, ""), True, int(end.code or 0)
    except AssertionError as error:
        result = FAILED, str(error)
    except BaseException as error:
        traceback.print_exc()
        refused = isinstance(error, NotImplementedError) or _REFUSAL.search(str(error))
        result = (REFUSED if refused else FAILED), f"{type(error).__name__}: {error}"
    path = folder / f"result-{rank}"
    path.with_suffix(".part").write_text(json.dumps(result), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    if program:
        raise ProgramEnds(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# In the command


class _ForkedRanks:
    """Processes of the ranks of a check, forked from this one."""

    def __init__(self, programs: Sequence[Callable[[], NoReturn]]) -> None:
        self._pids = []
        for program in programs:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = fork_without_garbage()
            if not pid:
                program()
            self._pids.append(pid)

    def poll(self, rank: int) -> int | None:
        """Return the exit code of a rank, None while it runs; to be called until it has ended."""
        pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._pids[rank]

    def kill(self, rank: int) -> None:
        """Kill a rank that has not ended."""
        os.kill(self._pids[rank], signal.SIGKILL)
        os.waitpid(self._pids[rank], 0)

    def close(self, world: int) -> None:
        """Do nothing: no process but the ranks was started."""


def _fork_ranks(check: Check, setting: Setting, folder: str) -> RankProcesses:
    return _ForkedRanks([partial(be_rank, check, setting, rank, folder) for rank in range(setting.world)])


def _wait(
    ranks: RankProcesses, world: int, check: Check, folder: Path, deadline: float
) -> tuple[dict[int, int], list[int]]:
    """Wait until all ranks have ended; kill them at the deadline, and some seconds after the first failure.

    Returns:
        The exit code of each rank that has ended by itself, and the ranks that had to be killed.
    """
    codes: dict[int, int] = {}
    while len(codes) < world and time.monotonic() < deadline:
        for rank in range(world):
            if rank not in codes and (code := ranks.poll(rank)) is not None:
                codes[rank] = code
                if codes[rank] != check.ends(rank) or _result(folder, rank)[0] in (FAILED, REFUSED):
                    deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        time.sleep(_LOOK_SECONDS)
    hung = [rank for rank in range(world) if rank not in codes]
    for rank in hung:
        if pid := ranks.pid(rank):
            _record_memory(folder, pid)
        ranks.kill(rank)
    return codes, hung


def _memory_files() -> set[str]:
    return set(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.exists() else set()


def _record_memory(folder: Path, pid: int) -> None:
    """Record the files of shared memory that a rank has mapped: a rank that is killed cannot remove them."""
    with suppress(FileNotFoundError, ProcessLookupError):
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        names = re.findall(rf" {_SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE)
        (folder / f"memory-{pid}").write_text("\n".join(names), encoding="utf-8")


def _remove_memory(folder: Path, before: set[str]) -> None:
    """Remove the shared memory that ranks recorded and that did not exist before the check."""
    for record in folder.glob("memory-*"):
        for name in {*record.read_text(encoding="utf-8").split()} - before:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)


def _result(folder: Path, rank: int) -> tuple[str, str]:
    """Return what a rank has written; nothing if it ended before."""
    try:
        kind, detail = json.loads((folder / f"result-{rank}").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "", ""
    return kind, detail


def _judge(check: Check, codes: dict[int, int], hung: list[int], folder: Path, setting: Setting) -> tuple[str, str]:
    """Return the outcome of a check, and the fact that shows it: the first rank with the worst."""
    results = {rank: _result(folder, rank) for rank in range(setting.world)}
    crashed = [rank for rank, code in codes.items() if code != check.ends(rank)]
    for rank in crashed:
        kind, _ = results[rank]
        where = "after its calls" if kind else "in its calls"
        return CRASHED, f"rank {rank} ended with {_ending(codes[rank])} {where}. {_last_lines(folder, rank)}".strip()
    failed = {kind: [rank for rank, result in results.items() if result[0] == kind] for kind in (FAILED, REFUSED)}
    if failed[FAILED]:
        rank = failed[FAILED][0]
        return FAILED, f"rank {rank}: {results[rank][1]}"
    if failed[REFUSED]:
        rank = failed[REFUSED][0]
        return REFUSED, f"rank {rank}: {results[rank][1]}"
    if hung:
        seconds = f"{setting.seconds_of(check):g} s"
        return HUNG, f"rank {hung[0]} did not end within {seconds}. {_last_lines(folder, hung[0])}".strip()
    return PASSED, ""


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _last_lines(folder: Path, rank: int, count: int = 3) -> str:
    """Return where a rank was, from the stacks of `faulthandler`, or the end of its output or of the launcher's."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in (folder / f"output-{rank}", folder / "launcher")
        if path.exists()
    ]
    lines = next((text for text in texts if text.strip()), "").splitlines()
    frames = [line.strip() for line in lines if re.match(r'\s+File "', line)]
    shown = [re.sub(r'^File ".*?([^/"]+)"', r"\1", frame) for frame in frames[:count]] or [
        line.strip() for line in lines if re.search(r"\w", line)
    ][-count:]
    return f"({'; '.join(shown)})" if shown else ""
