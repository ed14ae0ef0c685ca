"""Transport rc below the compiled engine: its tables, and its failures in words."""

from __future__ import annotations

import ctypes
import time
from typing import NoReturn

from mkernel.transport import verbs
from mkernel.transport.base import Put, Transport
from mkernel.transport.compiled import Kind, Report, Setup, Side, Signal, Target, Trouble, UnfitError
from mkernel.transport.rc import RcTransport

__all__ = ["RcSide"]

_NO_IMM = 1 << 32


class RcSide(Side):
    """``transport`` is connected. From now on it posts and polls nothing by itself, unless the engine has failed.

    Raises
    ------
    UnfitError
        There are several cards; or the card's queue pairs do not tell what they are to libibverbs.
    """

    def __init__(self, transport: Transport) -> None:
        if not isinstance(transport, RcTransport):
            raise UnfitError("it does not spread puts over several cards")
        self._transport = transport
        found = [connection.pair.handles() for connection in transport._connections]
        handles = [handle for handle in found if handle is not None]
        if len(handles) < len(found):
            raise UnfitError("pyverbs does not show what its queue pairs are to libibverbs")
        if not handles:
            raise UnfitError("there are no peers")
        if len({handle[1:] for handle in handles}) > 1:
            raise UnfitError("its queue pairs do not share their completion queues and functions")
        self._handles = handles[0]
        self._pairs = (ctypes.c_uint64 * len(handles))(*(handle.pair for handle in handles))
        targets = [(peer, transport._targets[peer]) for peer in transport._by_peer]
        self._targets = (Target * len(targets))(
            *(Target(rank, to.heap, to.heap_key, to.signals, to.signal_key, to.barrier, to.barrier_key) for rank, to in targets)
        )

    def fill(self, setup: Setup) -> None:
        transport, handles = self._transport, self._handles
        setup.kind = Kind.rc
        setup.post_send, setup.post_receive, setup.poll = handles.post_send, handles.post_receive, handles.poll
        setup.stored, setup.sends, setup.arrivals = handles.stored, handles.sends, handles.arrivals
        setup.pairs, setup.targets = ctypes.addressof(self._pairs), ctypes.addressof(self._targets)
        setup.num_peers, setup.queue_pairs = len(self._targets), transport._count
        setup.signal = Signal[transport.signal]
        setup.heap, setup.heap_bytes, setup.heap_key = transport._heap.address, transport._heap.size, transport._heap.lkey
        setup.signals, setup.signal_bytes = transport._signal_address, transport._signal_bytes
        setup.scratch, setup.scratch_registered = ctypes.addressof(transport._scratch), transport._scratch_region.address
        setup.scratch_key = transport._scratch_region.lkey
        setup.max_message, setup.depth = transport._max_message, transport._depth
        setup.receives, setup.completions = transport._receives, transport._sends.capacity

    def explain(self, report: Report, put: Put) -> NoReturn:
        transport, trouble = self._transport, Trouble(report.trouble)
        if trouble == Trouble.bad_put:
            transport._check_addresses(put)
        elif trouble == Trouble.too_long:
            raise transport._too_long(put)
        elif trouble == Trouble.two_channels:
            raise transport._two_channels(put)
        elif trouble == Trouble.failed:
            queue = transport._arrivals if report.arrivals else transport._sends
            failed = report.failed[: report.num_failed]
            raise transport._failure(
                queue, [verbs.Completion(end.id, end.status, end.pair, False, 0, None, 0, end.vendor_error) for end in failed]
            )
        elif trouble == Trouble.poll:
            error = verbs.VerbsError("polling a completion queue", report.code)
            raise transport._refused("poll", error) from error
        elif trouble in (Trouble.post, Trouble.receive, Trouble.bad_message):
            connection = transport._connections[report.pair]
            if trouble == Trouble.bad_message:
                raise transport._bad_message(connection, report.bytes, None if report.imm == _NO_IMM else report.imm)
            op, text = ("post", "posting to a queue pair") if trouble == Trouble.post else ("receive", "posting a receive")
            error = verbs.VerbsError(text, report.code)
            raise transport._refused(op, error, connection.pair) from error
        super().explain(report, put)

    def look(self, report: Report, under_way: list[int]) -> None:
        """Look for asynchronous events, and ring doorbells again where nothing completes (``RcTransport._nudge``)."""
        transport = self._transport
        transport._look_at_events()
        transport.arrived = report.arrived
        if under_way and transport.signal == "atomic":
            transport._moved_ns = max(transport._moved_ns, report.moved_ns)
            transport._nudge([transport._connections[position] for position in under_way], time.monotonic_ns())
