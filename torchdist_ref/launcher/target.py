"""Script, module or executable that the ranks run: checked before any rank starts.

Do not add checks that import or run the user's code here: the ranks do that.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile

_SAMPLE_BYTES = 4096


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter, as ``--run-path`` does in each rank.

    Args:
        training_script: Absolute path of the script.
        *training_script_args: Its arguments.
    """
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def target_error(name: str, is_module: bool, is_executable: bool, is_run_path: bool) -> str:
    """Return a sentence if this cannot be run; else an empty string.

    Args:
        name: Path of the script or executable, or name of the module.
        is_module: Whether ``-m`` is given.
        is_executable: Whether ``--no-python`` is given.
        is_run_path: Whether ``--run-path`` is given, which has precedence over ``--no-python``.

    >>> target_error("this", True, False, False)
    ''
    >>> target_error("/bin/sh", False, False, False)
    "the script '/bin/sh' is a binary, not Python source (to run an executable, add --no-python)"
    """
    if is_module and is_run_path:
        return "-m (--module) and --run-path contradict each other; leave out one of them"
    if is_module:
        return _module_error(name)
    if is_executable and not is_run_path:
        return _executable_error(name)
    if is_run_path and not os.path.isabs(name):
        return f"--run-path needs an absolute path, got {name!r}; give {os.path.abspath(name)}"
    return _script_error(name)


def _script_error(path: str) -> str:
    if os.path.isdir(path):
        runnable = os.path.isfile(os.path.join(path, "__main__.py"))
        return "" if runnable else f"the script {path!r} is a folder without a __main__.py"
    if not os.path.exists(path):
        return f"there is no script {path!r} in {os.getcwd()} (to run a module by its name, add -m)"
    if not os.access(path, os.R_OK):
        return f"the script {path!r} cannot be read; change its permissions"
    # A pipe or another special file could be read only once.
    if os.path.isfile(path) and _is_binary(path):
        return f"the script {path!r} is a binary, not Python source (to run an executable, add --no-python)"
    return ""


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    return b"\0" in sample and not sample.startswith(importlib.util.MAGIC_NUMBER) and not zipfile.is_zipfile(path)


def _executable_error(name: str) -> str:
    if shutil.which(name):
        return ""
    if os.path.isfile(name):
        return f"--no-python: {name!r} is not executable (chmod +x it, or leave out --no-python to run it with python)"
    return f"--no-python: there is no executable {name!r}, neither at this path nor in PATH"


def _module_error(name: str) -> str:
    # Only the first part: a search for the others would import it, and perhaps torch with it.
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        found = None
    return "" if found else f"there is no module {name!r} on the path (to run a file, leave out -m)"
