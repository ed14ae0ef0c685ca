"""What transports over RDMA share below the compiled engine: their handles, their tables, and their failures in words."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence
from typing import NoReturn

from mkernel.transport import verbs
from mkernel.transport.base import Put
from mkernel.transport.compiled import Kind, Report, Setup, Side, Target, Trouble, UnfitError
from mkernel.transport.rdma import RdmaTransport

__all__ = ["RdmaSide"]


class RdmaSide(Side):
    """``transport`` is connected. From now on it posts and polls nothing by itself, unless the engine has failed.

    Parameters
    ----------
    pairs
        Its queue pairs, by peer and then by number.

    Raises
    ------
    UnfitError
        The card's queue pairs do not tell what they are to libibverbs.
    """

    kind: Kind
    _targets: ctypes.Array[Target]

    def __init__(self, transport: RdmaTransport, pairs: Sequence[verbs.QueuePair]) -> None:
        self._rdma, self._pairs = transport, pairs
        found = [pair.handles() for pair in pairs]
        self._handles = [handle for handle in found if handle is not None]
        if len(self._handles) < len(found):
            raise UnfitError("pyverbs does not show what its queue pairs are to libibverbs")
        if not self._handles:
            raise UnfitError("there are no peers")
        if len({handle[1:] for handle in self._handles}) > 1:
            raise UnfitError("its queue pairs do not share their completion queues and functions")
        self._addresses = (ctypes.c_uint64 * len(found))(*(handle.pair for handle in self._handles))

    def fill(self, setup: Setup) -> None:
        transport, handles = self._rdma, self._handles[0]
        setup.kind = self.kind
        setup.post_send, setup.post_receive, setup.poll = handles.post_send, handles.post_receive, handles.poll
        setup.stored, setup.sends, setup.arrivals = handles.stored, handles.sends, handles.arrivals
        setup.pairs, setup.targets = ctypes.addressof(self._addresses), ctypes.addressof(self._targets)
        setup.num_peers, setup.queue_pairs = len(self._targets), len(self._pairs) // len(self._targets)
        setup.heap, setup.heap_bytes, setup.heap_key = transport._heap.address, transport._heap.size, transport._heap.lkey
        setup.signal_bytes, setup.max_message = transport._signal_bytes, transport._max_message

    @abc.abstractmethod
    def check(self, put: Put) -> None:
        """Raise the TransportError for a put that cannot be."""

    def explain(self, report: Report, put: Put) -> NoReturn:
        transport, trouble = self._rdma, Trouble(report.trouble)
        if trouble == Trouble.bad_put:
            self.check(put)
        elif trouble == Trouble.failed:
            queue = transport._arrivals if report.arrivals else transport._sends
            failed = report.failed[: report.num_failed]
            raise transport._failure(
                queue, [verbs.Completion(end.id, end.status, end.pair, False, 0, None, 0, end.vendor_error) for end in failed]
            )
        elif trouble == Trouble.poll:
            error = verbs.VerbsError("polling a completion queue", report.code)
            raise transport._refused("poll", error) from error
        elif trouble in (Trouble.post, Trouble.receive):
            op, text = ("post", "posting to a queue pair") if trouble == Trouble.post else ("receive", "posting a receive")
            error = verbs.VerbsError(text, report.code)
            raise transport._refused(op, error, self._pairs[report.pair]) from error
        raise self.miscounted(report)

    def look(self, report: Report, under_way: list[int]) -> tuple[()]:
        """Look for asynchronous events."""
        self._rdma._look_at_events()
        self._rdma.arrived = report.arrived
        return ()
