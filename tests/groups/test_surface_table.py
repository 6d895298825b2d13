"""Names, parameters, kinds and defaults match torch 2.15's on every torch, except for the differences with a reason."""

from __future__ import annotations

import pytest
import torch

import torchdist_ref as dist
from tests.groups import surface_table as table
from tests.torch_versions import torch_has

SHARED = sorted(name for name, known in table.known().items() if known is not None and name in dist.__all__)


@pytest.mark.parametrize("name", SHARED)
def test_parameters_match_torchs_or_have_a_reason(name: str) -> None:
    if name in table.DIFFERENT:
        assert name in table.differences(), f"{name} is as torch's now: take it out of DIFFERENT"
    else:
        assert table.signature(getattr(dist, name)) == table.known()[name]


def theirs(name: str) -> object:
    return getattr(torch.distributed, name, getattr(torch.distributed.distributed_c10d, name, None))


def test_every_name_of_torch_is_present_or_has_a_reason() -> None:
    absent = sorted(set(table.known()) - set(dist.__all__))
    assert absent == sorted(table.TORCHS_OWN)
    assert all(getattr(dist, name, None) is theirs(name) for name in absent)
    # CUDA builds have the classes of NCCL.
    expected = [name for name in absent if not name.startswith("ProcessGroupNCCL")]
    assert not torch_has("2.13") or all(theirs(name) is not None for name in expected)


def test_every_name_of_ours_is_torchs_or_has_a_reason() -> None:
    assert sorted(set(dist.__all__) - set(table.known())) == sorted(table.OWN)


def test_the_page_shows_the_table() -> None:
    again = "run `python -m tests.groups.surface_table`"
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), again


def test_the_kept_signatures_are_the_installed_torchs_or_extend_them() -> None:
    installed, kept = table.torchs_names(), table.known()
    assert {"all_reduce", "new_group", "Work"} <= set(installed)
    if torch_has("2.13") and not torch_has("2.16"):
        # Builds differ in their backends; older torches lack names and parameters.
        assert set(installed) <= set(kept)
        assert {name: table.without(found, kept[name]) for name, found in installed.items() if found} == {
            name: [] for name, found in installed.items() if found
        }
    if torch.__version__.startswith(table.VERSION):
        assert {name: installed[name] for name in kept if name in installed} == {
            name: known for name, known in kept.items() if name in installed
        }


def test_a_difference_would_be_noticed() -> None:
    def all_reduce(tensor: object, op: object = None, group: object = None) -> None:
        """Lack a parameter and have another default."""

    kept = table.known()["all_reduce"]
    assert kept is not None and len(kept) == 4
    assert table.signature(all_reduce) != kept
    assert table.signature(dist.all_reduce) == kept
