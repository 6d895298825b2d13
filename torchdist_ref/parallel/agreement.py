"""What all ranks have to agree on before they may exchange gradients: the same parameters, holding the same numbers.

Three small conversations at construction time: `verify` (do all ranks have the same parameters?),
`share` (take rank 0's values) and `agree` (take rank 0's order of parameters). Tensors travel
packed: `Pack` views any mix of dtypes and shapes as one run of bytes, so that one broadcast moves
them all. Nothing of the backward pass belongs here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.errors import MismatchError

# Bytes of one broadcast when a model is shared: enough to be quick, few enough to cost little memory.
CHUNK = 25 * 1024 * 1024
ALIGNMENT = 16


def describe(parameter: torch.Tensor, sparse: bool) -> str:
    """All that has to be the same on every rank, as a person reads it.

    >>> describe(torch.empty(2, 3), False)
    'torch.float32 of shape (2, 3), strides (3, 1)'
    """
    kind = ", sparse gradients" if sparse else ""
    return f"{parameter.dtype} of shape {tuple(parameter.shape)}, strides {parameter.stride()}{kind}"


def verify(
    parameters: Sequence[torch.Tensor], names: Sequence[str], sparse: Sequence[bool], group: Any, device: torch.device
) -> None:
    """Check that every rank holds parameters of the same kinds, in the same order.

    Raises:
        MismatchError: Some rank's parameters differ. Every rank raises, naming the first parameter that differs, and
            which ranks hold what.
    """
    mine = [describe(parameter, flag) for parameter, flag in zip(parameters, sparse, strict=True)]
    text = "\n".join(mine).encode()
    digests = _gather(torch.tensor([len(text), zlib.crc32(text)], device=device), group)
    if all(torch.equal(digest, digests[0]) for digest in digests):
        return
    everyone = _gather_texts(text, [int(digest[0]) for digest in digests], group, device)
    raise MismatchError(_difference([lines.split("\n") for lines in everyone], names, groups.get_rank(group)))


def _gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(groups.get_world_size(group))]
    groups.all_gather(everyone, tensor, group=group)
    return everyone


def _gather_texts(text: bytes, lengths: Sequence[int], group: Any, device: torch.device) -> list[str]:
    padded = text.ljust(max(lengths), b"\0")
    everyone = _gather(torch.tensor(list(padded), dtype=torch.uint8, device=device), group)
    return [bytes(one.tolist()[:length]).decode() for one, length in zip(everyone, lengths, strict=True)]


def _difference(everyone: Sequence[Sequence[str]], names: Sequence[str], rank: int) -> str:
    """Say which parameter is the first to differ, and on which ranks it is what."""
    length = max(map(len, everyone))
    rows = [[lines[i] if i < len(lines) else "missing" for lines in everyone] for i in range(length)]
    index = next(i for i, row in enumerate(rows) if len(set(row)) > 1)
    name = repr(names[index]) if index < len(names) else "which this rank doesn't have"
    kinds = {kind: [r for r, other in enumerate(rows[index]) if other == kind] for kind in dict.fromkeys(rows[index])}
    found = "; ".join(f"{kind} on ranks {ranks}" for kind, ranks in kinds.items())
    return (
        f"DistributedDataParallel: parameter {index} ({name}) differs between ranks: {found} (this is rank {rank}). "
        "Build the model alike on every rank; the number and order of parameters count too."
    )


class Pack:
    """One run of bytes on one device, viewed as many tensors: what travels instead of the tensors themselves.

    >>> pack = Pack([torch.tensor([1.5]), torch.tensor([True, False])])
    >>> pack.load()
    >>> pack.flat.numel(), pack.views[1].tolist()
    (32, [True, False])
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        sizes = [_padded(tensor) for tensor in self.tensors]
        self.flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.tensors[0].device)
        pieces = torch.split(self.flat, sizes)
        self.views = [_as_kind(piece, tensor) for piece, tensor in zip(pieces, self.tensors, strict=True)]

    def load(self) -> None:
        """Copy the tensors into the bytes."""
        torch._foreach_copy_(self.views, self.tensors)

    def store(self) -> None:
        """Copy the bytes back into the tensors."""
        torch._foreach_copy_(self.tensors, self.views)

    def share(self, group: Any, root: int) -> None:
        """Give every rank the root's values. Tensors on the root are only read."""
        sending = groups.get_rank(group) == root
        if sending:
            self.load()
        groups.broadcast(self.flat, group=group, group_src=root)
        if not sending:
            self.store()


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _as_kind(piece: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return piece[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


def chunks(tensors: Sequence[torch.Tensor], limit: int = CHUNK) -> Iterator[list[torch.Tensor]]:
    """Divide tensors, in order, into runs of one device and at most ``limit`` bytes (or one larger tensor)."""
    run: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        full = size + _padded(tensor) > limit or bool(run and run[0].device != tensor.device)
        if run and full:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += _padded(tensor)
    if run:
        yield run


@torch.no_grad()
def share(tensors: Sequence[torch.Tensor], group: Any, root: int = 0) -> None:
    """Give every rank the root's values of ``tensors``, in place.

    Args:
        tensors: The same shapes and dtypes on all ranks; any mix of dtypes and devices.
        group: The group that takes part.
        root: Group rank whose values win. Default 0.
    """
    for run in chunks([tensor.detach() for tensor in tensors]):
        Pack(run).share(group, root)


def agree(order: Sequence[int], group: Any, device: torch.device) -> list[int]:
    """Rank 0's order of parameters, on every rank."""
    numbers = torch.tensor(list(order), dtype=torch.int64, device=device)
    groups.broadcast(numbers, group=group, group_src=0)
    return [int(number) for number in numbers.tolist()]
