"""torch's place for meshes, so that programs that import them from there change one word. They live in `groups`."""

from __future__ import annotations

from torchdist_ref.groups import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
