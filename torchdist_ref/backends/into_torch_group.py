"""The group that torch sees, but for its collectives: who is in it, what it is called, how a request is started.

torch knows the same facts under different names in C++ and in Python; all of them are here. The collectives are
in `into_torch`. Don't add translation of torch's options: that is `into_torch_options`.
"""

# torch's stubs leave out some of its names, and give each collective several signatures.
# mypy: disable-error-code="attr-defined, override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from torchdist_ref.backends.base import Rows, uncut
from torchdist_ref.backends.into_torch_options import limit, usable
from torchdist_ref.backends.into_torch_work import RefWork
from torchdist_ref.backends.ref import Ref
from torchdist_ref.backends.sparse import start_sum
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain
from torchdist_ref.trace import Recorder
from torchdist_ref.work import Done

Tensors = Sequence[Tensor]
Request = tuple[Call, Tensors, Tensors]
CPU = torch.device("cpu")


class Hosted(c10d.ProcessGroup):
    """One group of torch's on the backend `ref`.

    Attributes:
        backend: What carries out the calls.
        members: The global rank of every member, in group order.
    """

    def __init__(self, backend: Ref, members: Sequence[int]) -> None:
        super().__init__(backend.link.rank, backend.link.size)  # type: ignore[call-arg]
        self.backend = backend
        self.members = tuple(members)
        self._name = self._description = ""

    @property
    def recorder(self) -> Recorder:
        """The last calls of this group on this rank."""
        return self.backend.recorder

    # What torch asks of a group besides its collectives. C++ and Python know the same thing under different names.

    def getBackendName(self) -> str:
        return "ref"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    _device_types = property(lambda self: [CPU])
    supports_splitting = supports_coalescing = property(lambda self: False)

    def _get_backend(self, device: torch.device) -> Hosted:
        if torch.device(device).type != "cpu":
            raise UnsupportedError(
                f"No backend type associated with device type {device}: 'ref' works on CPU tensors. "
                f"Name a backend for each device: init_process_group('cpu:gloo,cuda:nccl')."
            )
        return self

    def shutdown(self) -> None:
        self.backend.close()

    def abort(self) -> None:
        self.backend.abort("torch.distributed aborted the group")

    def _submit(self, opts: Any, *requests: Request) -> RefWork:
        """Start the calls; they are done on return if that is what torch asked for."""
        requests = tuple(request for request in requests if usable(request[0], uncut(request[1]), uncut(request[2])))
        seconds = limit(opts)
        wait = opts is not None and not opts.asyncOp and seconds is None
        works = [self.backend.submit(call, inputs, outputs, wait) for call, inputs, outputs in requests]
        outputs = [tensor for request in requests for tensor in uncut(request[2])]
        made = RefWork([Done("", outputs)] if wait else works, outputs, seconds)
        if opts is not None and not opts.asyncOp:
            made.wait()
        return made

    def _sum_sparse(self, tensor: Tensor, seconds: float | None) -> RefWork:
        works, add_up = start_sum(self.backend, self.size(), tensor)
        RefWork(works, [tensor], seconds).wait()
        add_up()
        return RefWork([Done("all_reduce", [tensor])], [tensor], None)

    def _root(self, op: str, opts: Any) -> int:
        if getattr(opts, "rootTensor", 0):
            raise UnsupportedError(f"{op}: 'ref' takes one tensor a call, so no rootTensor {opts.rootTensor}.")
        if not 0 <= opts.rootRank < self.size():
            expected = f"a group rank from 0 to {self.size() - 1}"
            raise ArgumentError(explain(op, "rootRank", expected, opts.rootRank, rank=self.rank()))
        return int(opts.rootRank)

    def _rows(self, op: str, argument: str, tensor: Tensor) -> Tensors:
        """A tensor as one equal block for each rank."""
        size = self.size()
        if tensor.numel() % size or not (tensor.is_contiguous() or tensor.shape[0] % size == 0):
            expected = f"a tensor that divides into {size} equal blocks, by its first dimension if it is not contiguous"
            raise ArgumentError(explain(op, argument, expected, list(tensor.shape), rank=self.rank()))
        return Rows(tensor, size) if size > 1 else (tensor,)

    def _fit(self, op: str, argument: str, blocks: Tensors, tensor: Tensor) -> None:
        """Raise unless there is a block for each rank, and this rank's has the size of the tensor."""
        if len(blocks) != self.size():
            expected = f"{self.size()} tensors, one a rank"
            raise ArgumentError(explain(op, argument, expected, len(blocks), rank=self.rank()))
        mine = blocks.tensor.numel() // len(blocks) if isinstance(blocks, Rows) else blocks[self.rank()].numel()
        if mine != tensor.numel():
            expected = f"{tensor.numel()} elements a rank"
            raise ArgumentError(explain(op, argument, expected, mine, rank=self.rank()))
