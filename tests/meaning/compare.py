"""One rank's part in checking a case: ours on each backend against the formula, and torch's Gloo against it too.

Ours is called on tensors placed in memory as the case says, and every byte of their buffers is compared. torch's is
called on plain copies of the same data: what it does to memory beside a strided view is a difference of its own (see
the page "Differences from torch"). Both are asked for the same kind of answer: None, a Work, a Future.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as oracle
from torch import Tensor

import torchdist_ref as dist
from tests.meaning.cases import COMPLEX, EIGHTHS, OBJECTS, Case
from tests.meaning.formulas import Meaning, meaning
from tests.meaning.memory import Placed

# How far results may lie apart that are rounded at every addition, relative to the largest.
ROUNDING = {
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "float32": 1e-5,
    "float64": 1e-12,
    "complex64": 1e-5,
    "complex128": 1e-12,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
}
SCATTERING = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
SINGLE = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
NO_WORK = ("ring", "from_anybody", *OBJECTS)


class Wrong(AssertionError):
    """A case does not come out as it should."""


@dataclass
class Rank:
    """One rank of a pool.

    Attributes:
        rank: Its number.
        members: For each group its members, in order.
        theirs: torch's groups.
        ours: Our groups, by backend.
    """

    rank: int
    members: Mapping[str, list[int]]
    theirs: Mapping[str, Any]
    ours: Mapping[str, Mapping[str, Any]]

    def check(self, case: Case) -> None:
        """Run a case on all backends.

        Raises:
            Wrong: With what differs.
        """
        if self.rank not in self.members[case.group]:
            self._check_outside(case)
            return
        kinds = {}
        if torch_can(case, len(self.members[case.group])):
            kinds["torch"] = self._torch(case)
        for backend, groups in self.ours.items():
            if backend == "gloo" and case.call in ("ring", "from_anybody") and len(self.members[case.group]) == 1:
                continue
            kinds[backend] = self._one(case, f"ours on {backend}", dist, groups[case.group], case.layout)
        if len(set(kinds.values())) > 1:
            raise Wrong(f"answers of other kinds: {kinds}")

    def _torch(self, case: Case) -> str:
        if case.call in SCATTERING and case.way != "sync":
            # Gloo's Work for these has no future, and says after a wait that it is not completed.
            self._one(replace(case, way="sync"), "torch's Gloo", oracle, self.theirs[case.group], "plain")
            return "Work True True" if case.way == "wait" else "Work of a Future"
        return self._one(case, "torch's Gloo", oracle, self.theirs[case.group], "plain")

    def _one(self, case: Case, who: str, library: Any, group: Any, layout: str) -> str:
        """Run a case once and compare; gives the kind of the answer."""
        part = self._meaning(case)
        inputs, outputs = Placed(layout, part.inputs), Placed(layout, part.outputs)
        wanted_in, wanted_out = Placed(layout, part.inputs), Placed(layout, part.outputs)
        answer = part.invoke(library, inputs.views, outputs.views, common(case, group))
        kind = settled(case, answer)
        for after, before in zip(wanted_out.views, wanted(part, outputs.views), strict=True):
            after.copy_(before)
        if part.own_results and answer != part.plain:
            raise Wrong(f"{who} gives {answer}, wanted {part.plain}")
        same(case, f"{who}: input", inputs.buffers, wanted_in.buffers)
        same(case, f"{who}: output", outputs.buffers, wanted_out.buffers)
        return kind

    def _meaning(self, case: Case) -> Meaning:
        members = self.members[case.group]
        return meaning(case, members.index(self.rank), members)

    def _check_outside(self, case: Case) -> None:
        """A rank that is not in the group gets what torch gives it, and its tensors are left alone."""
        # What a member would pass; which of them does not matter.
        part = meaning(case, 0, self.members[case.group])
        answers = {"torch": outside(part, oracle, common(case, self.theirs[case.group]))}
        for backend, groups in self.ours.items():
            answers[backend] = outside(part, dist, common(case, groups[case.group]))
        if len(set(answers.values())) > 1:
            raise Wrong(f"a rank outside the group gets {answers}")


def common(case: Case, group: Any) -> dict[str, Any]:
    """The arguments that all functions take."""
    return {"group": group, "async_op": case.way != "sync"} if case.call not in NO_WORK else {"group": group}


def settled(case: Case, answer: Any) -> str:
    """Wait as the case says; gives what kind of thing was there to wait for."""
    if case.call in NO_WORK:
        return "plain"
    if case.way == "sync":
        return f"{answer}"
    if case.call.endswith("_coalesced"):
        answer.wait()
        return "Future"
    if case.way == "wait":
        said = answer.wait()
        return f"Work {said} {answer.is_completed()}"
    answer.get_future().wait()
    return "Work of a Future"


def wanted(part: Meaning, now: list[Tensor]) -> list[Tensor]:
    """What the outputs must hold; what they hold, where nobody says."""
    return [tensor if formula is None else formula for formula, tensor in zip(part.expected, now, strict=True)]


def same(case: Case, what: str, got: list[Tensor], expected: list[Tensor]) -> None:
    """Raise unless whole buffers are equal, up to rounding where the case rounds."""
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        if torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
            continue
        if not (rounds(case) and close(case, one, other)):
            raise Wrong(f"{what} {number} is\n{one}\nwanted\n{other}")


def rounds(case: Case) -> bool:
    """Whether the results depend on the order of additions: whole numbers as small as these do not."""
    if case.dtype not in ROUNDING or case.op in ("MIN", "MAX"):
        return False
    return case.dtype in EIGHTHS or case.op in ("PRODUCT", "AVG", "PREMUL_SUM")


def close(case: Case, one: Tensor, other: Tensor) -> bool:
    """Whether two buffers are equal up to rounding."""
    wide = torch.complex128 if case.dtype in COMPLEX else torch.float64
    a, b = one.to(wide), other.to(wide)
    return bool((a - b).abs().max() <= ROUNDING[case.dtype] * b.abs().max())


def outside(part: Meaning, library: Any, arguments: dict[str, Any]) -> str:
    """What a rank outside the group is told."""
    inputs, outputs = Placed("plain", part.inputs), Placed("plain", part.outputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = ended(lambda: part.invoke(library, inputs.views, outputs.views, arguments))
    untouched = all(
        map(torch.equal, map(as_bytes, outputs.buffers), map(as_bytes, Placed("plain", part.outputs).buffers))
    )
    words = sorted(
        {str(w.message) for w in caught if w.category is UserWarning and "does not belong" in str(w.message)}
    )
    return f"{answer}, {len(words)} warning{'' if untouched else ', and its tensors are changed'}"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor."""
    return tensor.view(-1).view(torch.uint8)


def ended(act: Callable[[], Any]) -> str:
    """How a call came out: its answer, or which of the common exceptions it raised."""
    try:
        answer = act()
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return next(
            kind.__name__ for kind in (ValueError, TypeError, RuntimeError, AttributeError) if isinstance(error, kind)
        )
    return "something" if isinstance(answer, list | dict) else repr(answer)


# What torch 2.13's Gloo refuses or does wrong; each is a row of the page "Differences from torch".
def torch_can(case: Case, size: int) -> bool:
    """Whether torch's Gloo gives the right answer to a case in a group of this size."""
    if case.call in OBJECTS or case.call == "barrier":
        return True
    if torch.__version__ < "2.13" and (case.call == "all_to_all" or case.call in SINGLE):
        # Some of these names are newer, and Gloo did not take lists of blocks.
        return False
    if case.dtype in ("int16", "uint16", "uint32", "uint64", *EIGHTHS):
        return False
    if case.dtype == "bool" and case.op == "SUM" and (case.call.startswith(("all_reduce", "reduce"))):
        return False
    if case.call == "gather" and case.dtype in COMPLEX:
        return False
    if case.call in SINGLE and not case.shape:
        # It refuses to gather, and in a reduce_scatter it hangs or ends the process.
        return False
    count = torch.Size(case.shape).numel()
    if case.call in ("ring", "from_anybody") and (size == 1 or not count):
        return False
    return case.op != "PREMUL_SUM" and not (case.uneven and case.call == "all_gather")
