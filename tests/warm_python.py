"""A Python that has torch loaded already, for tests of programs that start others: launchers, `mpiexec`, spawning.

`started` starts a server that imports torch, which takes seconds, and writes an executable. The executable takes the
arguments of Python, of which it knows `-B`, `-P`, `-u`, `-c` and `-m`. It passes them, its environment, its folder and
its open files to the server, which forks a process that runs the program, and the functions of `atexit`, as a new
interpreter would. The executable forwards signals to that process, and ends as it ends. If the executable is killed,
the process is killed too.

A program differs from one in a new interpreter in this: torch and its compiler are loaded, without the backends that
torch loads itself, and the parent of its process is the server. This library is not loaded.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# More than a program has open at its start, and fewer than a process may have.
MANY = 200
# Loaded by its path: the library is not.
LINUX_CALLS = Path(__file__).parents[1] / "torchdist_ref" / "processes" / "linux_calls.py"
LOADED = ("torch", "torch._dynamo")
# The exit code of a program, once it is known; None if Python finds it.
ENDS: dict[str, int | None] = {"with": None}
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def started(folder: Path) -> Iterator[str]:
    """Run the server; yields the path of the executable."""
    import subprocess

    address, executable = folder / "socket", folder / "python"
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" ask "{address}" "$@"\n')
    executable.chmod(0o755)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, __file__, "serve", str(executable)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        # A program that asks while the server imports torch waits.
        listener.listen(MANY)
        server = subprocess.Popen(
            [*command, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
    try:
        yield str(executable)
    finally:
        # The end of its input ends the server.
        server.communicate()


def ask(address: str, *arguments: str) -> None:
    """Have the server run a program with this process's files, and end as it ends."""
    # A signal that arrives before the process is known waits: the program may have shown that it runs by then.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        inside = [int(name) for name in os.listdir("/proc/self/fd")]
        files = [number for number in inside if number != server.fileno() and is_open(number)]
        request = {"arguments": arguments, "files": files, "folder": os.getcwd(), "environment": dict(os.environ)}
        text = json.dumps(request).encode()
        server.sendmsg([len(text).to_bytes(4)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        server.sendall(text)
        pid = int.from_bytes(read(server, 4))
        for number in FORWARDED:
            signal.signal(number, lambda given, _: os.kill(pid, given))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = int.from_bytes(read(server, 4), signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_open(number: int) -> bool:
    """Return whether a file is open; the one by which a folder was listed is not."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def read(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes; the process ends if the other one has."""
    parts = b""
    while len(parts) < size:
        more = connection.recv(size - len(parts))
        if not more:
            os._exit(1)
        parts += more
    return parts


def serve(executable: str, number: str) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request until the input ends. Return, in the process of a program, its request and its files."""
    import gc

    # Modules that start Pythons read it when they are imported.
    sys.executable = executable
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # 0.4 s, and two forks of each program take 22 ms less. This file is not in a package here.
    runpy.run_path(str(Path(__file__).with_name("huge_pages.py")))["collapse"]()
    pidfd_open = runpy.run_path(str(LINUX_CALLS))["pidfd_open"]
    with socket.socket(fileno=int(number)) as listener:
        while True:
            readable = select.select([listener.fileno(), 0], [], [])[0]
            if 0 in readable:
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
            # Until one runs, or none is left.
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    return accept(connection, pidfd_open)


def accept(connection: socket.socket, pidfd_open: Callable[[int], int]) -> tuple[dict[str, Any], list[int]]:
    """Fork the process of a program, where this returns; here, wait until it or the process that asked ends."""
    # A program that kills its group kills neither the server nor the tests.
    os.setsid()
    length, files, *_ = socket.recv_fds(connection, 4, MANY)
    request = json.loads(read(connection, int.from_bytes(length)))
    pid = os.fork()
    if pid == 0:
        return request, files
    for number in files:
        os.close(number)
    connection.sendall(pid.to_bytes(4))
    handle = pidfd_open(pid)
    if handle not in select.select([handle, connection.fileno()], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        connection.sendall(code.to_bytes(4, signed=True))
    os._exit(0)


def take_over(request: dict[str, Any], files: list[int]) -> None:
    """Give this process the files, folder and environment of the one that asked."""
    import multiprocessing.process
    import random

    end = max(MANY, *files, *request["files"]) + 1
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, end) for number in files]
    os.closerange(3, end)
    for number, wanted in zip(aside, request["files"], strict=True):
        os.dup2(number, wanted)
    os.closerange(end, max(aside) + 1)
    os.chdir(request["folder"])
    vars(multiprocessing.process)["ORIGINAL_DIR"] = os.getcwd()
    os.environ.clear()
    os.environ.update(request["environment"])
    # What a new interpreter draws from the system.
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def execute(arguments: list[str]) -> None:
    """Run a program as Python does that gets these arguments."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    with_folder = True
    while arguments[0] in ("-u", "-B", "-P"):
        unbuffered |= arguments[0] == "-u"
        sys.dont_write_bytecode |= arguments[0] == "-B"
        with_folder &= arguments[0] != "-P"
        arguments = arguments[1:]
    if unbuffered:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    kind, *others = arguments
    # In place of the folder of this file.
    sys.path[:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if with_folder:
        folders = {"-m": os.getcwd(), "-c": ""}
        sys.path.insert(0, folders.get(kind, os.path.dirname(os.path.realpath(kind))))
    if kind == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *others[1:]]
        program = compile(others[0], "<string>", "exec")
    else:
        sys.argv = arguments
        main.__file__ = kind
        program = compile(Path(kind).read_bytes(), kind, "exec")
    exec(program, vars(main))


def finish() -> None:
    """End the process as the last function of `atexit`: what Python does then would copy the server's memory, 0.3 s."""
    # MPI ends in a function that C has registered, after those of `atexit`.
    if ENDS["with"] is not None and "mpi4py.MPI" not in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(ENDS["with"])


def main() -> None:
    """Be the executable or the server, and the process of each program of it."""
    if sys.argv[1] == "ask":
        ask(*sys.argv[2:])
    # The first function runs last.
    atexit.register(finish)
    request, files = serve(*sys.argv[2:])
    take_over(request, files)
    try:
        execute(request["arguments"])
        ENDS["with"] = 0
    except SystemExit as end:
        ENDS["with"] = end.code & 255 if isinstance(end.code, int) else None
        raise
    except Exception:
        ENDS["with"] = 1
        raise


if __name__ == "__main__":
    main()
