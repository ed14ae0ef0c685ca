"""Queue pairs and completion queues by ibv_post_send and ibv_poll_cq, for providers without the newer functions.

pyverbs builds an object for each request and completion here, so that a put costs some microseconds more.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mkernel.transport.verbs import handles
from mkernel.transport.verbs.interface import Completion, CompletionQueue, Destination, Handles, QueuePair, Remote, RetryPolicy

__all__ = ["ClassicPair", "ClassicQueue", "post_receive", "queue_pair", "to_error"]

Verb = Callable[[str], AbstractContextManager[None]]  # turns errors of pyverbs into VerbsError

_WRITE, _WRITE_IMM, _SEND, _SEND_IMM, _FETCH_ADD = 0, 1, 2, 3, 6  # ibv_wr_opcode
_FENCE, _SIGNALED, _INLINE = 1, 2, 8  # ibv_send_flags
_RECEIVE = 128  # IBV_WC_RECV: a bit that the opcodes of all receives have
_WITH_IMM = 2  # IBV_WC_WITH_IMM


class ClassicQueue(CompletionQueue):
    """``queue`` is the CQ of pyverbs."""

    def __init__(self, context: Any, capacity: int, verb: Verb) -> None:
        from pyverbs.cq import CQ

        self.capacity, self._verb = capacity, verb
        with verb(f"creating a completion queue of {capacity} entries"):
            self.queue = CQ(context, capacity)

    def poll(self, limit: int) -> Sequence[Completion]:
        with self._verb("polling a completion queue"):
            _, found = self.queue.poll(limit)
        return [_completion(entry) for entry in found]

    def close(self) -> None:
        with self._verb("destroying a completion queue"):
            self.queue.close()


def _completion(entry: Any) -> Completion:
    if entry.status:
        return Completion(entry.wr_id, entry.status, entry.qp_num, False, 0, None, 0, entry.vendor_err)
    if not entry.opcode & _RECEIVE:
        return Completion(entry.wr_id, 0, entry.qp_num, False, 0, None, 0, 0)
    imm = socket.ntohl(entry.imm_data) if entry.wc_flags & _WITH_IMM else None
    return Completion(entry.wr_id, 0, entry.qp_num, True, entry.byte_len, imm, entry.src_qp, 0)


def queue_pair(pd: Any, sends: Any, receives: Any, max_send: int, max_receive: int, inline: int, verb: Verb) -> Any:
    """An RC queue pair of pyverbs, in RESET. Raises VerbsError."""
    from pyverbs.qp import QP, QPCap, QPInitAttr

    kind = 2  # IBV_QPT_RC
    cap = QPCap(max_send_wr=max_send, max_recv_wr=max_receive, max_send_sge=1, max_recv_sge=1, max_inline_data=inline)
    with verb("creating an RC queue pair"):
        return QP(pd, QPInitAttr(qp_type=kind, scq=sends, rcq=receives, cap=cap, sq_sig_all=0))


class ClassicPair(QueuePair):
    """An RC queue pair. Requests are built one by one, and ``commit`` posts them as one chain."""

    def __init__(self, nic: Any, pair: Any, verb: Verb) -> None:
        self._nic, self._pair, self._verb = nic, pair, verb
        self.number = pair.qp_num
        self._requests: list[tuple[Any, ...]] = []

    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        self._nic.connect(self._pair, remote, mtu, psn, retry)

    def write(
        self,
        wr_id: int,
        local: int,
        size: int,
        lkey: int,
        remote: int,
        rkey: int,
        *,
        signaled: bool,
        imm: int | None = None,
        to: Destination | None = None,
    ) -> None:
        opcode = _WRITE if imm is None else _WRITE_IMM
        self._requests.append((opcode, wr_id, _flags(signaled), (local, size, lkey), _wire(imm), (rkey, remote), None))

    def write_inline(self, wr_id: int, value: int, remote: int, rkey: int, *, signaled: bool, fenced: bool = False) -> None:
        word = ctypes.c_uint64(value)  # lives until it is posted
        flags = _flags(signaled) | _INLINE | (_FENCE if fenced else 0)
        self._requests.append((_WRITE, wr_id, flags, (ctypes.addressof(word), 8, 0), 0, (rkey, remote), word))

    def fetch_add(self, wr_id: int, local: int, lkey: int, remote: int, rkey: int, value: int, *, signaled: bool) -> None:
        self._requests.append((_FETCH_ADD, wr_id, _flags(signaled), (local, 8, lkey), 0, (rkey, remote, value), None))

    def send(
        self, wr_id: int, local: int, size: int, lkey: int, *, signaled: bool, imm: int | None = None, to: Destination | None = None
    ) -> None:
        opcode = _SEND if imm is None else _SEND_IMM
        self._requests.append((opcode, wr_id, _flags(signaled), (local, size, lkey), _wire(imm), None, None))

    def commit(self) -> None:
        from pyverbs.wr import SGE, SendWR

        requests, self._requests = self._requests, []
        chain = None
        built = []  # pyverbs keeps no reference to the next request of a chain
        with self._verb("posting to a queue pair"):
            for opcode, wr_id, flags, entry, imm, remote, _ in reversed(requests):
                chain = SendWR(wr_id=wr_id, opcode=opcode, num_sge=1, imm_data=imm, send_flags=flags, next_wr=chain, sg=[SGE(*entry)])
                if opcode == _FETCH_ADD:
                    chain.set_wr_atomic(*remote, 0)
                elif remote is not None:
                    chain.set_wr_rdma(*remote)
                built.append(chain)
            if chain is not None:
                self._pair.post_send(chain)

    def nudge(self) -> None:
        """Only rxe needs it, which has the newer functions."""

    def receive(self, wr_id: int, local: int, size: int, lkey: int) -> None:
        post_receive(self._pair, wr_id, local, size, lkey, self._verb)

    def handles(self) -> Handles | None:
        return handles.find(self._pair, self.number)

    def fail(self) -> None:
        to_error(self._pair, self._nic.enums, self._verb)

    def close(self) -> None:
        with self._verb("destroying a queue pair"):
            self._pair.close()


def _flags(signaled: bool) -> int:
    return _SIGNALED if signaled else 0


def _wire(imm: int | None) -> int:
    """An immediate in the order of bytes that a request wants; pyverbs swaps it in its newer functions only."""
    return socket.htonl(imm or 0)


def post_receive(pair: Any, wr_id: int, local: int, size: int, lkey: int, verb: Verb) -> None:
    """Post a receive to a queue pair of pyverbs. Raises VerbsError."""
    from pyverbs.wr import SGE, RecvWR

    with verb("posting a receive"):
        entry = SGE(local, size, lkey)
        pair.post_recv(RecvWR(wr_id=wr_id, num_sge=1, sg=[entry]))
        entry.close()


def to_error(pair: Any, enums: Any, verb: Verb) -> None:
    """Move a queue pair of pyverbs to the error state. Raises VerbsError."""
    from pyverbs.qp import QPAttr

    with verb("moving a queue pair to ERR"):
        pair.modify(QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)
