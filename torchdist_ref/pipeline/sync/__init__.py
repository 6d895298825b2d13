"""GPipe: a batch is cut in micro-batches, which follow each other through the parts of a model.

Reading order: `schedule` (who works on what when), `microbatch` (cutting and joining), `checkpoint` (forgetting
activations and computing them again), `dependency` (the order of the backward pass), `pipeline` (all of it together),
`pipe` (the module that users see). Y. Huang et al., *GPipe*, NeurIPS 2019; C. Kim et al., *torchgpipe*,
arXiv:2004.09910.
"""

from __future__ import annotations

from torchdist_ref.pipeline.sync.checkpoint import is_checkpointing, is_recomputing
from torchdist_ref.pipeline.sync.microbatch import NoChunk
from torchdist_ref.pipeline.sync.pipe import Pipe

__all__ = ["NoChunk", "Pipe", "is_checkpointing", "is_recomputing"]
