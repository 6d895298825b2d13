"""Kernels of layers for which the CPU's kernels do not stand in by themselves: convolutions and `SyncBatchNorm`.

torch has the five kernels of `torch.nn.SyncBatchNorm` for accelerators only. Statistics are of the second dimension of
a tensor, the channels. Inverse standard deviations include the layer's epsilon. A convolution has a way of its own for
devices that are added from outside, which raises unless they have a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _by_channel(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).flatten(1)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """Return the values of channels in a shape that broadcasts against a tensor."""
    return values.view(-1, *[1] * (tensor.dim() - 2))


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and inverse standard deviation of each channel."""
    variance, mean = torch.var_mean(_by_channel(input), 1, correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join the statistics of several ranks, one in a row, and update the running ones."""
    shares, total = (counts / counts.sum())[:, None], counts.sum()
    joint = (mean * shares).sum(0)
    variance = ((invstd**-2 - eps + (mean - joint) ** 2) * shares).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(joint.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return joint, (variance + eps).rsqrt()


def elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Normalize a tensor."""
    result = (input - _like(mean, input)) * _like(invstd if weight is None else invstd * weight, input)
    return (result if bias is None else result + _like(bias, input)).to(input.dtype)


def backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums over each channel from which all gradients follow, and the gradients of weight and bias."""
    total = _by_channel(grad_out).sum(1)
    moment = _by_channel(grad_out * (input - _like(mean, input))).sum(1)
    return total, moment, moment * invstd, total.clone()


def backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the gradient of the input, from sums over the batches of all ranks."""
    total, scale = count.sum(), invstd if weight is None else invstd * weight
    centered = (input - _like(mean, input)) * _like(sum_dy_xmu / total * invstd**2, input)
    return ((grad_out - _like(sum_dy / total, input) - centered) * _like(scale, input)).to(input.dtype)


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Convolve on the CPU."""
    host = None if bias is None else bias.cpu()
    result: Tensor = torch.ops.aten.convolution(input.cpu(), weight.cpu(), host, *options)
    return result.to(input.device)


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, of those that the mask marks, computed on the CPU."""
    bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]] if output_mask[2] else None
    options = bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
    found = torch.ops.aten.convolution_backward(grad_output.cpu(), input.cpu(), weight.cpu(), *options)
    return tuple(None if each is None else each.to(input.device) for each in found)


# torch forgets kernels together with this.
KERNELS = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Register the kernels with torch."""
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        KERNELS.impl(f"batch_norm_{kernel.__name__}", kernel, "PrivateUse1")
    KERNELS.impl("convolution_overrideable", convolution, "PrivateUse1")
    KERNELS.impl("convolution_backward_overrideable", convolution_backward, "PrivateUse1")
