"""Check of a case on one rank: our function on each backend, and torch's on Gloo, against the formula.

Our function gets tensors in the layout of the case, and every byte of their buffers is compared. torch's function gets
contiguous copies of the same data: it overwrites memory beside a strided view (see the page "Differences from torch").
Both have to return the same kind of result: None, a Work, a Future.
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
from tests.meaning.cases import COMPLEX, FLOATS8, OBJECTS, Case
from tests.meaning.formulas import Meaning, meaning
from tests.meaning.memory import Placed
from tests.torch_versions import torch_has

# Largest difference of results that are rounded at every addition, relative to the largest element.
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
NO_WORK = ("ring", "from_any_source", *OBJECTS)


class WrongResult(AssertionError):
    """Result of a case that differs from its formula."""


@dataclass
class Rank:
    """One rank of a pool.

    Attributes:
        rank: Rank in the world.
        members: Global ranks of each group, in group order.
        theirs: torch's groups, by name.
        ours: Our groups, by backend and name.
    """

    rank: int
    members: Mapping[str, list[int]]
    theirs: Mapping[str, Any]
    ours: Mapping[str, Mapping[str, Any]]

    def check(self, case: Case) -> None:
        """Run a case on all backends.

        Raises:
            WrongResult: With the difference.
        """
        if self.rank not in self.members[case.group]:
            self._check_outside(case)
            return
        kinds = {}
        if torch_can(case, len(self.members[case.group])):
            kinds["torch"] = self._torch(case)
        for backend, groups in self.ours.items():
            if backend == "gloo" and case.call in ("ring", "from_any_source") and len(self.members[case.group]) == 1:
                continue
            kinds[backend] = self._one(case, f"ours on {backend}", dist, groups[case.group], case.layout)
        if len(set(kinds.values())) > 1:
            raise WrongResult(f"results of different kinds: {kinds}")

    def _torch(self, case: Case) -> str:
        if case.call in SCATTERING and case.way != "sync":
            # Gloo's Work for these has no future, and reports itself as not completed after a wait.
            self._one(replace(case, way="sync"), "torch's Gloo", oracle, self.theirs[case.group], "contiguous")
            return "Work True True" if case.way == "wait" else "Work of a Future"
        return self._one(case, "torch's Gloo", oracle, self.theirs[case.group], "contiguous")

    def _one(self, case: Case, name: str, library: Any, group: Any, layout: str) -> str:
        """Run a case once, compare, and return the kind of the result."""
        part = self._meaning(case)
        inputs, outputs = Placed(layout, part.inputs), Placed(layout, part.outputs)
        expected_in, expected_out = Placed(layout, part.inputs), Placed(layout, part.outputs)
        result = part.invoke(library, inputs.views, outputs.views, common(case, group))
        kind = wait_for(case, result)
        for after, before in zip(expected_out.views, expected_outputs(part, outputs.views), strict=True):
            after.copy_(before)
        if part.own_results and result != part.plain:
            raise WrongResult(f"{name} returns {result}, expected {part.plain}")
        same(case, f"{name}: input", inputs.buffers, expected_in.buffers)
        same(case, f"{name}: output", outputs.buffers, expected_out.buffers)
        return kind

    def _meaning(self, case: Case) -> Meaning:
        members = self.members[case.group]
        return meaning(case, members.index(self.rank), members)

    def _check_outside(self, case: Case) -> None:
        """Check that a rank outside the group gets the same as from torch, and that its tensors are unchanged."""
        # The arguments of any member.
        part = meaning(case, 0, self.members[case.group])
        results = {}
        if not newer_name(case):
            results["torch"] = outside(part, oracle, common(case, self.theirs[case.group]))
        for backend, groups in self.ours.items():
            results[backend] = outside(part, dist, common(case, groups[case.group]))
        if len(set(results.values())) > 1:
            raise WrongResult(f"a rank outside the group gets {results}")


def common(case: Case, group: Any) -> dict[str, Any]:
    """Return the arguments that all functions have."""
    return {"group": group, "async_op": case.way != "sync"} if case.call not in NO_WORK else {"group": group}


def wait_for(case: Case, answer: Any) -> str:
    """Wait as the case specifies, and return the kind of the result."""
    if case.call in NO_WORK:
        return "no work"
    if case.way == "sync":
        return f"{answer}"
    if case.call.endswith("_coalesced"):
        answer.wait()
        return "Future"
    if case.way == "wait":
        waited = answer.wait()
        return f"Work {waited} {answer.is_completed()}"
    answer.get_future().wait()
    return "Work of a Future"


def expected_outputs(part: Meaning, now: list[Tensor]) -> list[Tensor]:
    """Return the expected values of the outputs; their present ones where they are unspecified."""
    return [tensor if formula is None else formula for formula, tensor in zip(part.expected, now, strict=True)]


def same(case: Case, what: str, got: list[Tensor], expected: list[Tensor]) -> None:
    """Raise unless whole buffers are equal, up to rounding where the case rounds."""
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        if torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
            continue
        if not (rounds(case) and close(case, one, other)):
            raise WrongResult(f"{what} {number} is\n{one}\nexpected\n{other}")


def rounds(case: Case) -> bool:
    """Return whether results depend on the order of additions: sums of small integers do not."""
    if case.dtype not in ROUNDING or case.op in ("MIN", "MAX"):
        return False
    return case.dtype in FLOATS8 or case.op in ("PRODUCT", "AVG", "PREMUL_SUM")


def close(case: Case, one: Tensor, other: Tensor) -> bool:
    """Return whether two buffers are equal up to rounding."""
    wide = torch.complex128 if case.dtype in COMPLEX else torch.float64
    a, b = one.to(wide), other.to(wide)
    return bool((a - b).abs().max() <= ROUNDING[case.dtype] * b.abs().max())


def outside(part: Meaning, library: Any, arguments: dict[str, Any]) -> str:
    """Return the result, the warnings and the state of the tensors on a rank outside the group."""
    inputs, outputs = Placed("contiguous", part.inputs), Placed("contiguous", part.outputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = ended(lambda: part.invoke(library, inputs.views, outputs.views, arguments))
    untouched = all(
        map(torch.equal, map(as_bytes, outputs.buffers), map(as_bytes, Placed("contiguous", part.outputs).buffers))
    )
    messages = sorted(
        {str(w.message) for w in caught if w.category is UserWarning and "does not belong" in str(w.message)}
    )
    return f"{answer}, {len(messages)} warning{'' if untouched else ', and its tensors are changed'}"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return tensor.view(-1).view(torch.uint8)


def newer_name(case: Case) -> bool:
    """Return whether the installed torch is older than the name of the function."""
    if case.call == "gather_single":
        return not torch_has("2.14")
    return case.call in ("all_gather_single", "reduce_scatter_single") and not torch_has("2.13")


def ended(act: Callable[[], Any]) -> str:
    """Return the result of a call, or the name of the built-in exception that it raised."""
    try:
        answer = act()
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return next(
            kind.__name__ for kind in (ValueError, TypeError, RuntimeError, AttributeError) if isinstance(error, kind)
        )
    return "something" if isinstance(answer, list | dict) else repr(answer)


# Errors and limits of torch 2.13's Gloo; each is a row of the page "Differences from torch".
def torch_can(case: Case, size: int) -> bool:
    """Return whether torch's Gloo runs a case correctly in a group of this size."""
    if case.call in OBJECTS or case.call == "barrier":
        return True
    if newer_name(case) or (case.call == "all_to_all" and not torch_has("2.13")):
        # Older versions of Gloo do not support lists of blocks.
        return False
    if case.call == "gather_single":
        # Only NCCL has it.
        return False
    if case.dtype in ("int16", "uint16", "uint32", "uint64", *FLOATS8):
        return False
    if case.dtype == "bool" and case.op == "SUM" and (case.call.startswith(("all_reduce", "reduce"))):
        return False
    if case.call == "gather" and case.dtype in COMPLEX:
        return False
    if case.call in SINGLE and not case.shape:
        # It refuses to gather, and in a reduce_scatter it hangs or ends the process.
        return False
    count = torch.Size(case.shape).numel()
    if case.call in ("ring", "from_any_source") and (size == 1 or not count):
        return False
    return case.op != "PREMUL_SUM" and not (case.uneven and case.call == "all_gather")
