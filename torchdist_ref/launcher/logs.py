"""Log files of workers: which streams go to a file, which also to the console, and the paths of one attempt.

Names and file layout are those of torch's launcher. `DefaultLogsSpecs` writes
``<log_dir>/<run id>_<random>/attempt_<restart count>/<local rank>/{stdout.log,stderr.log,error.json}``. Do not add the
forwarding of output here: it belongs to `torchdist_ref.launcher.worker`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from torchdist_ref.elastic.attempt import LogsDest
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.processes.failure_record import ERROR_FILE

CONSOLE = ""
_ONE = re.compile(r"[0-3]")
_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


def temporary_folder(prefix: str, parent: str | None = None) -> str:
    """Create a folder with a new name and return its path.

    Args:
        prefix: Start of its name.
        parent: Folder to create it in. Default: that of temporary files.

    Raises:
        ArgumentError: It cannot be created, for example because the disk is full or read-only.
    """
    with _naming_folder(f"a folder in {parent}" if parent else "a folder for temporary files"):
        return tempfile.mkdtemp(prefix=prefix, dir=parent)


@contextmanager
def _naming_folder(what: str) -> Iterator[None]:
    """Raise an error that names the folder, and what to do, if it cannot be created in the block."""
    try:
        yield
    except OSError as error:
        text = f"the launcher cannot create {what}: {error.strerror or error}."
        cure = "Free space there, or name a folder that can be written with --log-dir or TMPDIR."
        raise ArgumentError(f"{text} {cure}") from error


class Std(IntFlag):
    """Set of standard output streams.

    Attributes:
        NONE: No stream.
        OUT: Standard output.
        ERR: Standard error.
        ALL: Both.
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse a value of ``--redirects`` or ``--tee``.

        Args:
            vm: A number from 0 to 3 for all workers, or ``LOCAL_RANK:NUMBER`` pairs with commas between them.

        Returns:
            The streams of all workers, or those of each listed local rank.

        Raises:
            ArgumentError: The text has neither form.

        >>> from torchdist_ref.elastic.multiprocessing import Std
        >>> Std.from_str("3") == Std.ALL, Std.from_str("0:3,12:1") == {0: Std.ALL, 12: Std.OUT}
        (True, True)
        """
        if _ONE.fullmatch(vm):
            return cls(int(vm))
        if _BY_RANK.fullmatch(vm):
            pairs = (pair.split(":") for pair in vm.split(","))
            return {int(rank): cls(int(value)) for rank, value in pairs}
        expected = "0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:NUMBER pairs such as 0:3,1:1"
        raise ArgumentError(explain("Std.from_str", "vm", expected, vm))


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return the streams of each local rank.

    Args:
        val_or_map: One value for all local ranks, or a mapping; ranks that it lacks get `Std.NONE`.
        local_world_size: Number of workers.

    >>> from torchdist_ref.elastic.multiprocessing import Std, to_map
    >>> to_map({1: Std.OUT}, 2) == {0: Std.NONE, 1: Std.OUT}
    True
    """
    ranks = range(local_world_size)
    if isinstance(val_or_map, Std):
        return dict.fromkeys(ranks, val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in ranks}


class LogsSpecs(ABC):
    """Rule that maps workers to log files; subclass it to write logs elsewhere.

    Args:
        log_dir: Base folder. Default None: the subclass decides.
        redirects: Streams to write to a file instead of the console, for all workers or by local rank.
        tee: Streams to write to a file and to the console.
        local_ranks_filter: Local ranks whose output appears on the console. Default None: all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the folders of one attempt and return its paths.

        Args:
            envs: Environment of each worker by local rank; the method sets TORCHELASTIC_ERROR_FILE in each.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """Base folder."""


class DefaultLogsSpecs(LogsSpecs):
    """Log files of torch's layout: a folder for each job, in it one for each attempt, in it one for each worker.

    Args:
        log_dir: Base folder, created if needed. Default None: a new temporary folder. `os.devnull`: no files at all.
        redirects: Streams to write to a file instead of the console, for all workers or by local rank.
        tee: Streams to write to a file and to the console.
        local_ranks_filter: Local ranks whose output appears on the console. Default None: all.

    Raises:
        NotADirectoryError: `log_dir` is a file.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if not log_dir:
            log_dir = temporary_folder("torchelastic_")
        elif log_dir != os.devnull:
            if os.path.isfile(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file; name a folder")
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        """Base folder."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the folders of one attempt, emptying an earlier one of the same number, and return its paths.

        Args:
            envs: Environment of each worker by local rank; the method sets TORCHELASTIC_ERROR_FILE in each.
        """
        count, first = len(envs), envs.get(0, {})
        redirects, tees = to_map(self._redirects, count), to_map(self._tee, count)
        if self._root_log_dir == os.devnull:
            return self._without_files(envs)
        attempt = Path(self._run_dir(first), f"attempt_{first.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        shutil.rmtree(attempt, ignore_errors=True)
        found = LogsDest(
            filtered_stdout=str(attempt / "filtered_stdout.log"), filtered_stderr=str(attempt / "filtered_stderr.log")
        )
        for rank in range(count):
            folder = attempt / str(rank)
            with _naming_folder(f"the folder {folder}"):
                folder.mkdir(parents=True)
            streams = (
                (Std.OUT, "stdout", found.stdouts, found.tee_stdouts),
                (Std.ERR, "stderr", found.stderrs, found.tee_stderrs),
            )
            for std, name, paths, teed in streams:
                path = str(folder / f"{name}.log") if std & (redirects[rank] | tees[rank]) else CONSOLE
                if std & tees[rank] and self._on_console(rank):
                    teed[rank] = path
                paths[rank] = path or (CONSOLE if self._on_console(rank) else os.devnull)
            found.error_files[rank] = envs[rank][ERROR_FILE] = str(folder / "error.json")
        return found

    def _run_dir(self, environment: Mapping[str, str]) -> str:
        if not self._run_log_dir:
            run_id = environment.get("TORCHELASTIC_RUN_ID", "test_run_id")
            self._run_log_dir = temporary_folder(f"{run_id.replace(os.sep, '_')}_", self.root_log_dir)
        return self._run_log_dir

    def _on_console(self, rank: int) -> bool:
        return not self._local_ranks_filter or rank in self._local_ranks_filter

    def _without_files(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = range(len(envs))
        for rank in ranks:
            envs[rank][ERROR_FILE] = ""
        console, null = dict.fromkeys(ranks, CONSOLE), dict.fromkeys(ranks, os.devnull)
        paths = [os.path.join(os.devnull, f"filtered_{name}.log") for name in ("stdout", "stderr")]
        return LogsDest(console, dict(console), null, dict(null), dict(null), *paths)

    def __repr__(self) -> str:
        """Return the arguments."""
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, tee={self._tee}, "
            f"local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        """Return whether the arguments are equal."""
        if not isinstance(other, DefaultLogsSpecs):
            return False
        return repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Output:
    """Destination of one output stream of one worker.

    Attributes:
        path: File; an empty string for the console alone, `os.devnull` for none.
        tee: Whether what goes to the file appears on the console too.
        prefix: Start of each line on the console and in the filtered file.
        filters: Texts, one of which a line of the filtered file contains.
        filtered: Filtered file. It is written only if there are filters.
    """

    path: str = CONSOLE
    tee: bool = False
    prefix: bytes = b""
    filters: tuple[bytes, ...] = ()
    filtered: str = ""


def outputs(
    logs: LogsDest, rank: int, prefixes: tuple[bytes, bytes], filters: tuple[Sequence[str], Sequence[str]]
) -> tuple[Output, Output]:
    """Return the destinations of standard output and standard error of one local rank.

    Args:
        logs: Paths of the attempt.
        rank: Local rank.
        prefixes: Start of each line: of streams that have no file, and of streams that have one too.
        filters: Texts of the filtered file of standard output, and of that of standard error.
    """
    streams = (
        (logs.stdouts, logs.tee_stdouts, logs.filtered_stdout),
        (logs.stderrs, logs.tee_stderrs, logs.filtered_stderr),
    )

    def destination(paths: dict[int, str], tees: dict[int, str], filtered: str, texts: Sequence[str]) -> Output:
        tee = bool(paths[rank]) and tees.get(rank, os.devnull) != os.devnull
        wanted = tuple(text.encode() for text in texts) if tee else ()
        return Output(paths[rank], tee, prefixes[tee], wanted, filtered)

    out, errors = (destination(*stream, texts) for stream, texts in zip(streams, filters, strict=True))
    return out, errors
