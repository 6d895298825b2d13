"""Skip connections: tensors that leave the line of modules at one place and come back at a later one.

`skippable` is what a model is written with; `tracker` carries the tensors; `layout` says which cross partitions.
"""

from __future__ import annotations

from torchdist_ref.pipeline.sync.skip.namespace import Namespace
from torchdist_ref.pipeline.sync.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
