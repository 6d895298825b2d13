"""Backend `ref`: collectives of this project's own schedules, run over its own transports."""

from torchdist_ref.backends.ref.backend import Ref

__all__ = ["Ref"]
