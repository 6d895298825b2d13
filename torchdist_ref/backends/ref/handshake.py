"""Handshake: ranks announce each call and compare the announcements before anything is written.

In the first round of a call every rank signals every other and waits for every other. So all ranks have seen each
other's announcement. If the announcements differ, all ranks see the same difference and raise, nothing has been
written, and the group remains usable.

Many ranks meet before the first round, in a number of steps that grows with the logarithm of their number
(`Link.hops`). In each step a rank compares its announcement with that of another one, and learns whether that one
knows of a difference. After the last step all ranks know of one or none does. Only if there is one do they signal every
other, to see all announcements. Do not add here: how data moves.
"""

from __future__ import annotations

from torch import Tensor, nonzero

from torchdist_ref.backends.ref.plan import ALGORITHM_BITS, EXECUTOR_VARIABLE, REFERENCE_BIT, Plan
from torchdist_ref.backends.worker_threads import OutOfOrderError
from torchdist_ref.errors import MismatchError
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import ANNOUNCEMENT_BYTES, COMPLETED, ZERO_COPY_BITS


class SomeUnregisteredError(Exception):
    """Internal signal: peers can access the tensors of some ranks only, so all use staging buffers."""


class Handshake:
    """Sequence of the calls of one link.

    Attributes:
        sequence: Number of the next call.
        fields: This rank's row of the status table.
        announced: By the parity of the call's sequence number, what this rank has announced and what the peers have;
            none of them if they meet by hops.
        meets_by_hops: Whether the ranks meet before the first round (`meet`), not in it.
        announce: Announces a call (sequence, record, number) to the peers, which read it once this rank has signaled.
    """

    def __init__(self, link: Link) -> None:
        self.sequence = 0
        self.announce = link.row.announce
        self._link, self.fields = link, link.row.fields
        hops = link.hops
        self.meets_by_hops = bool(hops)
        shown = [(link.layout.status_row(link.rank), ANNOUNCEMENT_BYTES)]
        self._hops = [
            (link.make_signal("ready", to, shown), link.ready_from[source], source, link.rows[source])
            for to, source in hops
        ]
        peers = () if hops else link.peers
        self.announced = [(link.row.compared[n], tuple(link.rows[p].compared[n] for p in peers)) for n in (0, 1)]

    def meet(self, plan: Plan) -> None:
        """Wait until all of many ranks have begun the call, and raise what `compare` does if they differ."""
        link, parity = self._link, self.sequence & 1
        mine, differs = link.row.compared[parity], link.row.differs[parity]
        differs[0] = 0
        for signal, semaphore, source, row in self._hops:
            signal()
            if not semaphore.acquire(False):
                link.acquire(semaphore, source, plan.text)
            # The other rank may know of a difference from a later step. It is one all the same.
            if row.differs[parity][0] or row.compared[parity] != mine:
                differs[0] = 1
        if differs[0]:
            shown = [(link.layout.status_row(link.rank), ANNOUNCEMENT_BYTES)]
            for peer in link.peers:
                link.make_signal("ready", peer, shown)()
            for peer in link.peers:
                link.acquire(link.ready_from[peer], peer, plan.text)
            raise self.difference(plan)

    def met(self, plan: Plan) -> bool:
        """Let many ranks `meet`, and return whether they have; few of them compare the call in its first round."""
        if self.meets_by_hops:
            self.meet(plan)
        return self.meets_by_hops

    def compare(self, plan: Plan) -> None:
        """Raise if a peer announced another call; used when all peers have signaled this rank.

        Raises:
            OutOfOrderError: The ranks are at different calls of their programs.
            SomeUnregisteredError: The ranks differ only in whether their tensors are registered.
            MismatchError: The ranks made different calls.
        """
        mine, theirs = self.announced[self.sequence & 1]
        if theirs.count(mine) < len(theirs):
            raise self.difference(plan)

    def complete(self) -> None:
        """Announcement that the call is done; peers that find this rank gone will not miss it."""
        self.fields[COMPLETED] = self.sequence
        self.sequence += 1

    def fail(self, plan: Plan, error: BaseException) -> None:
        """Announcement that the call has failed. Only after a difference the link remains usable."""
        if isinstance(error, (MismatchError, OutOfOrderError)):
            self._link.row.completed, self.sequence = self.sequence, self.sequence + 1
        else:
            self._link.abort(error, plan.text)

    def difference(self, plan: Plan) -> MismatchError | OutOfOrderError | SomeUnregisteredError:
        """Return the error; ranks at different calls begin with the smallest number."""
        headers = [row.headers[self.sequence & 1] for row in self._link.rows]
        numbers = {(header[2], header[3]) for header in headers}
        if len(numbers) > 1:
            return OutOfOrderError(min(numbers))
        if len({header[1] | ZERO_COPY_BITS for header in headers}) == 1:
            return SomeUnregisteredError()
        return self._mismatch(plan)

    def _mismatch(self, plan: Plan) -> MismatchError:
        link = self._link
        calls = "; ".join(f"{link.rank_names([r])}: {row.text(self.sequence)}" for r, row in enumerate(link.rows))
        fingerprints = [row.headers[self.sequence & 1][1] for row in link.rows]
        marks = [fingerprint & REFERENCE_BIT for fingerprint in fingerprints]
        hint = ""
        if len(set(marks)) > 1:
            fast, reference = ([r for r, mark in enumerate(marks) if bool(mark) == bit] for bit in (False, True))
            hint = (
                f" Set {EXECUTOR_VARIABLE} alike on all ranks: {link.rank_names(fast)} used the fast executor and "
                f"{link.rank_names(reference)} the reference executor."
            )
        if len({fingerprint & ALGORITHM_BITS for fingerprint in fingerprints}) > 1:
            hint += " Set TORCHDIST_REF_ALGORITHM alike on all ranks, and register the same function on each."
        return MismatchError(
            f"{link.context(plan.text)}: the ranks made different calls as call {self.sequence} of this group. "
            f"{calls}.{hint} Nothing was written, and the group can be used."
        )

    def compare_sizes(self, plan: Plan, sent: Tensor, expected: Tensor) -> None:
        """Raise if two ranks of an uneven exchange differ in the size of a block: the same message on all ranks.

        Args:
            plan: The exchange.
            sent: Elements that each rank (row) sends to each rank (column).
            expected: Elements that each rank (column) expects from each rank (row).
        """
        differing = nonzero(sent != expected)
        if not len(differing):
            return
        link = self._link
        source, target = differing[0].tolist()
        one, other = link.rank_names([source]), link.rank_names([target])
        sizes = f"{one} sends {sent[source, target]} elements to {other}, which expects {expected[source, target]}"
        raise MismatchError(
            f"{link.context(plan.text)}: {sizes}. input_split_sizes[{target}] of the sender must equal "
            f"output_split_sizes[{source}] of the receiver. Nothing was written, and the group can be used."
        )
