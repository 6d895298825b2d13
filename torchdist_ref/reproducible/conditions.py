"""Conditions that change bits before a gradient reaches the library, as far as they can be seen."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["hazards"]


def hazards(model: nn.Module) -> list[str]:
    """Return what makes a model's gradients depend on the number of ranks or on the run, one sentence each.

    Seen are modules and settings of torch: batch normalization, dropout, several threads, nondeterministic kernels. A
    function that a module calls, such as `torch.nn.functional.dropout`, is not seen.

    Args:
        model: The model, in the mode (training or evaluation) in which it will run.

    Example:
        >>> import torch
        >>> from torchdist_ref.reproducible import hazards
        >>> [text.partition(":")[0] for text in hazards(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))][:1]
        ["'0' is a BatchNorm1d"]
    """
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            found.append(
                f"{name!r} is a {kind}: it normalizes by the statistics of a micro-batch, and keeps an average."
            )
        elif isinstance(module, _DropoutNd) and module.training and module.p > 0:
            found.append(f"{name!r} is a {kind}: seed torch's generator before each micro-batch with its number.")
    if torch.get_num_threads() > 1:
        found.append(f"torch uses {torch.get_num_threads()} threads: kernels divide sums by them. Set the same number.")
    on_devices = any(not parameter.is_cpu for parameter in model.parameters())
    if on_devices and not torch.are_deterministic_algorithms_enabled():
        found.append("Kernels of devices may be nondeterministic: call torch.use_deterministic_algorithms(True).")
    return found
