"""Build hook: adds to the wheel a stub file for each import path without a file, since type checkers look for files."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface[Any]):
    """Writes the stubs that `torchdist_ref.torch_paths` yields, and adds them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the stubs; hatchling calls it before it builds a wheel."""
        # By its file: the package is not installed where it is built.
        spec = importlib.util.spec_from_file_location("torch_paths", Path(self.root, "torchdist_ref", "torch_paths.py"))
        assert spec is not None and spec.loader is not None
        torch_paths = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(torch_paths)
        self._folder = tempfile.TemporaryDirectory()
        for name, text in torch_paths.stubs():
            stub = Path(self._folder.name, name)
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(text, encoding="utf-8")
            build_data["force_include"][str(stub)] = f"torchdist_ref/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the written stubs; hatchling calls it when the wheel is built."""
        self._folder.cleanup()
