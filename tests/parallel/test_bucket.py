"""GradBucket: views, strides, replaced buffers and invalid arguments."""

from __future__ import annotations

import pytest
import torch

from torchdist_ref.algorithms.bucket import dense_strides, split
from torchdist_ref.parallel import GradBucket
from torchdist_ref.testing import fill


def test_gradients_are_views_of_the_buffer_in_order() -> None:
    parts = [fill(0, (3, 2)), fill(1, ()), fill(2, (5,))]
    bucket = GradBucket(4, torch.cat([p.flatten() for p in parts]), parts, is_last=False)
    assert all(torch.equal(a, b) for a, b in zip(bucket.gradients(), parts, strict=True))
    bucket.gradients()[1].fill_(99)
    assert bucket.buffer()[6] == 99
    assert (bucket.index(), bucket.is_last()) == (4, False)


def test_set_buffer_changes_what_gradients_show() -> None:
    bucket = GradBucket(buffer=fill(0, (6,)), gradients=[torch.empty(2, 2), torch.empty(2)])
    bucket.set_buffer(fill(3, (6,)).to(torch.float16))
    assert [g.dtype for g in bucket.gradients()] == [torch.float16] * 2
    assert torch.equal(bucket.gradients()[0].flatten().float(), fill(3, (6,))[:4])


def test_views_take_the_parameters_strides() -> None:
    template = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    buffer = fill(1, (120,))
    (view,) = split(buffer, [template])
    assert view.stride() == template.stride()
    assert torch.equal(view.permute(0, 2, 3, 1).flatten(), buffer)


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.empty(4, 6).t(), (1, 6)),
        (torch.empty(4, 6)[:, ::2], (3, 1)),
        (torch.empty(6).expand(4, 6), (6, 1)),
        (torch.empty(1, 5, 1), (5, 1, 1)),
        (torch.empty(0, 3), (3, 1)),
    ],
)
def test_strides_of_views_never_leave_gaps(tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    assert dense_strides(tensor) == wanted


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "'buffer' must be a one-dimensional tensor"),
        ({"buffer": torch.empty(2, 2)}, "one-dimensional"),
        ({"buffer": torch.empty(4), "gradients": [torch.empty(3)]}, "4 elements together"),
        ({"buffer": torch.empty(4), "parameters": [torch.empty(2)] * 2}, "one per gradient"),
    ],
)
def test_unsuitable_arguments_raise(arguments: dict[str, torch.Tensor], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        GradBucket(**arguments)


def test_set_buffer_raises_on_another_length() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\).*got \(3,\)"):
        GradBucket(buffer=torch.empty(4)).set_buffer(torch.empty(3))


def test_repr_shows_index_size_and_dtype() -> None:
    assert repr(GradBucket(2, torch.empty(4))) == "GradBucket(index 2, last: 1 gradients, 4 x torch.float32 on cpu)"
