"""Build of the simulated device: one call of the C++ compiler, whose result is kept in the user's cache.

The library is compiled against the headers of the torch that is installed. It uses no header of Python, so that one
command builds it; `torch.utils.cpp_extension` would add setuptools and ninja as requirements for that one command.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from importlib.resources import as_file, files
from pathlib import Path

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
FLAGS = ("-shared", "-fPIC", "-O1", "-std=c++20")


class BuildError(RuntimeError):
    """The simulated device can't be built on this machine; the message says what is missing."""


def cache() -> Path:
    """Return the directory of built libraries: torch's own for extensions, if the user has chosen one."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen) / "torchdist_ref"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchdist_ref"


def compiler() -> list[str]:
    """Return the command of the C++ compiler: that of the variable CXX, else g++ or clang++."""
    command = shlex.split(os.environ.get("CXX", "")) or [
        next((name for name in ("g++", "clang++") if shutil.which(name)), "g++")
    ]
    if not shutil.which(command[0]):
        raise BuildError(
            f"the simulated device needs a C++ compiler, and {command[0]} is not there: install g++ or clang++ "
            "(for Debian and Ubuntu: apt install g++), or set CXX"
        )
    return command


def check_version() -> None:
    """Raise BuildError for a torch that the device was not written for."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        raise BuildError(
            f"the simulated device is written for torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
            f"not for {torch.__version__}: install one of those"
        )


def build() -> Path:
    """Return the library for the installed torch, after compiling it if it was not in the cache."""
    check_version()
    command = compiler()
    home = Path(torch.__file__).parent
    with as_file(files(__package__) / "device.cpp") as source:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
        abi = int(torch.compiled_with_cxx11_abi())
        key = (source.read_text(), torch.__version__, str(torch.version.git_version), str(home), version, *FLAGS)
        name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
        built = cache() / f"simulated_device_{name}.so"
        if built.exists():
            return built
        built.parent.mkdir(parents=True, exist_ok=True)
        # One process compiles, the others wait for it; the name appears when the file is complete.
        with open(built.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                unfinished = built.with_suffix(".unfinished")
                includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
                libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
                abi_flag = f"-D_GLIBCXX_USE_CXX11_ABI={abi}"
                done = subprocess.run(
                    [*command, *FLAGS, abi_flag, *includes, str(source), "-o", str(unfinished), *libraries],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
                    raise BuildError(
                        f"{command[0]} can't compile the simulated device for {torch.__version__}: {first}"
                    )
                unfinished.rename(built)
    return built
