"""Planted bugs of transport rc: each breaks the contract in its own way."""

from __future__ import annotations

from collections.abc import Sequence

from mkernel.transport import verbs
from mkernel.transport.base import Put
from mkernel.transport.rc import RcTransport, _Connection, _Pending

__all__ = ["BUGS", "EpochEarly", "FlagsDoNotWaitForThemselves", "SignalBeforeData", "SignalOnAnotherQueuePair"]


class SignalBeforeData(RcTransport):
    def _build(self, connection: _Connection, waiting: Sequence[_Pending]) -> None:
        for pending in waiting:
            if self.signal == "imm":
                self._tell(connection, pending, signaled=False)
            else:
                self._raise(connection, pending, signaled=False, fenced=False)
        super()._build(connection, waiting)


class SignalOnAnotherQueuePair(RcTransport):
    """Data stays on its queue pair, the signal goes by the next one."""

    def _raise(self, connection: _Connection, pending: _Pending, *, signaled: bool, fenced: bool) -> None:
        pairs = self._by_peer[connection.peer]
        other = pairs[(connection.index + 1) % len(pairs)]
        super()._raise(other, pending, signaled=False, fenced=fenced)
        other.pair.commit()
        if signaled:
            target, scratch = self._targets[connection.peer], self._scratch_region
            name = self._name(connection, pending, 1)
            connection.pair.fetch_add(name, scratch.address + 8, scratch.lkey, target.barrier, target.barrier_key, 0, signaled=True)


class NoFence(RcTransport):
    def _raise(self, connection: _Connection, pending: _Pending, *, signaled: bool, fenced: bool) -> None:
        super()._raise(connection, pending, signaled=signaled, fenced=False)


class NoAtomic(RcTransport):
    """A fence has nothing to wait for."""

    def _order(self, connection: _Connection, pending: _Pending) -> None:
        pass


class EmptyPutsNeverWait(RcTransport):
    """Also where bytes of their channel are under way."""

    def _needs_order(self, connection: _Connection, put: Put, last: int) -> bool:
        return put.bytes > 0


class FlagsDoNotWaitForThemselves(RcTransport):
    """Two values of a flag are under way, and nothing orders them."""

    def _needs_order(self, connection: _Connection, put: Put, last: int) -> bool:
        return super()._needs_order(connection, put, -1)


class EpochEarly(RcTransport):
    """The flag gets the value after the put's own."""

    def _build(self, connection: _Connection, waiting: Sequence[_Pending]) -> None:
        for pending in waiting:
            pending.put = pending.put._replace(signal_value=pending.put.signal_value + 1)
        super()._build(connection, waiting)


class ReceiversOwnEpoch(RcTransport):
    """The receiver raises the flag to a count of its own, not to the value that came."""

    counts: dict[int, int]

    def _raise_flag(self, completion: verbs.Completion) -> None:
        self.counts = getattr(self, "counts", {})
        assert completion.imm is not None
        self.counts[completion.imm] = self.counts.get(completion.imm, 0) + 1
        store, self._store = self._store, lambda address, value: None
        super()._raise_flag(completion)
        self._store = store
        assert store is not None
        store(self._signal_address + 8 * completion.imm, self.counts[completion.imm])


class CompletedAtPost(RcTransport):
    early: list[int]

    def post(self, put: Put) -> bool:
        accepted = super().post(put)
        if accepted:
            self.early = [*getattr(self, "early", []), put.ticket]
        return accepted

    def poll(self) -> list[int]:
        super().poll()
        done, self.early = getattr(self, "early", []), []
        return done


class LostByte(RcTransport):
    def _write(self, connection: _Connection, pending: _Pending) -> None:
        put = pending.put
        pending.put = put._replace(bytes=max(put.bytes - 1, 0))
        super()._write(connection, pending)
        pending.put = put


class NoChannels(RcTransport):
    """Puts take the queue pairs in turn."""

    turn = 0

    def _check(self, put: Put) -> tuple[_Connection, int]:
        _, data = super()._check(put)
        self.turn += 1
        connection = self._by_peer[put.dst_rank][self.turn % self._count]
        self._flags.clear()
        return connection, data


_EARLY = "visible before the bytes|never sent|went back"
BUGS: list[tuple[type[RcTransport], str, str]] = [
    (SignalBeforeData, "atomic", _EARLY),
    (SignalBeforeData, "imm", _EARLY),
    (SignalOnAnotherQueuePair, "atomic", _EARLY),
    (NoFence, "atomic", _EARLY),
    (NoAtomic, "atomic", _EARLY),
    (EmptyPutsNeverWait, "atomic", _EARLY),
    (EpochEarly, "atomic", _EARLY),
    (EpochEarly, "imm", _EARLY),
    (ReceiversOwnEpoch, "imm", "never sent|visible before the bytes|signals arrived"),
    (CompletedAtPost, "atomic", "visible before the bytes"),
    (LostByte, "atomic", "visible before the bytes"),
    (NoChannels, "atomic", _EARLY),
]
