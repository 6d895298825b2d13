"""Errors lead to the error index: the last line of a traceback is ``See: ID``."""

from __future__ import annotations

import copy
import pickle
import re
import traceback

import pytest

from tests.wrong_calls.table import load
from torchdist_ref import error_index, errors
from torchdist_ref.error_index import ENTRIES, entry_of, general_entry
from torchdist_ref.notebook import CellError
from torchdist_ref.notebook.rank import CellFailure
from torchdist_ref.notebook.report import Report

PUBLIC = [cls for name, cls in vars(errors).items() if name.endswith("Error") and not name.startswith("_")]


def lines(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception_only(error)).splitlines()


def test_every_entry_is_a_kind_of_the_table_and_every_kind_has_an_entry() -> None:
    kinds = {kind.id for kind in load() if kind.error != "warning"}
    # Its message is that of calls that differ.
    assert {entry for entry, _ in ENTRIES} == kinds - {"orders-of-threads-differ"}
    assert not kinds & {general_entry(cls.__name__) for cls in PUBLIC}


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_an_error_ends_with_one_id_also_after_copies(cls: type[Exception]) -> None:
    error = cls("all_reduce: something that no entry has")
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert lines(each)[-1] == f"See: {entry_of(error)}" and "".join(lines(each)).count("See: ") == 1
        assert re.fullmatch("[a-z0-9-]+", entry_of(error))
    assert str(error).endswith("something that no entry has") or str(error).endswith("something that no entry has'")


def test_the_message_decides_before_the_class() -> None:
    assert entry_of(errors.ArgumentError("gather: Must specify dst or group_dst.")) == "root-missing-or-twice"
    assert entry_of(errors.RankDiedError("new_group: rank 1 died")) == "rank-died"
    assert entry_of(errors.DistStoreError("x")) == "dist-store-error"
    forged = errors.AuthenticationError("all_gather_object: the object of rank 1 was not written by a member")
    assert entry_of(forged) == "not-of-this-job"


def test_the_error_of_a_cell_leads_to_the_entry_of_its_first_cause() -> None:
    failed = {0: CellFailure("MismatchError", "all_reduce: the ranks made different calls:", "")}
    late = Report(late={0, 2}, silent={0, 2}, waited=5)
    assert entry_of(CellError(Report(failures=failed))) == "calls-differ"
    assert entry_of(CellError(Report(failures=failed, died={1: -9}))) == "rank-died"
    assert entry_of(CellError(Report(died={1: 3}))) == "rank-died"
    assert entry_of(CellError(late)) == "ranks-did-not-finish"
    assert entry_of(CellError(Report(failures={1: CellFailure("ValueError", "", "")}))) == "function-raised"


def test_a_subclass_elsewhere_leads_to_the_entry_of_its_base() -> None:
    class OfAUser(errors.UsageError):
        pass

    assert lines(OfAUser("x"))[-1] == "See: usage-error"


def test_errors_of_torchs_types_have_an_id() -> None:
    """A group's module makes torch's types the bases of ours."""
    import torch.distributed

    import torchdist_ref.groups  # noqa: F401 - for its effect

    assert torch.distributed.DistError in errors.DistError.__bases__
    assert lines(errors.DistError("x"))[-1] == "See: dist-error"


def test_a_note_of_a_user_stays() -> None:
    error = errors.MismatchError("x")
    error.add_note("at step 7")
    assert lines(error)[1:] == [error_index.PREFIX + "calls-differ", "at step 7"]
