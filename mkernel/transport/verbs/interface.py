"""What transports need of a network card, in plain numbers: queue pairs, completion queues, registered memory.

``pyverbs.open_nic`` gives the real ones, tests give others. Nothing here waits.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import NamedTuple

from mkernel.transport.verbs.status import errno_name

__all__ = [
    "Access",
    "Completion",
    "CompletionQueue",
    "Destination",
    "Event",
    "Handles",
    "Limits",
    "Nic",
    "Port",
    "QueuePair",
    "Region",
    "Remote",
    "RetryPolicy",
    "VerbsError",
]


class VerbsError(Exception):
    """A call to a card failed.

    Attributes
    ----------
    op
        What was being done, e.g. ``"creating an RC queue pair"``.
    code, status
        The errno and its name; 0 and ``"no errno"`` where none is known.
    """

    def __init__(self, op: str, code: int, text: str = "") -> None:
        self.op, self.code = op, code
        self.status = errno_name(code)
        super().__init__(f"{op}: {self.status}" + (f" ({text or os.strerror(code)})" if code or text else ""))


class Access:
    """Bits that say what may be done to a region (ibv_access_flags).

    RELAXED_ORDERING is absent on purpose: with it a signal could overtake its data on PCIe.
    """

    local_write, remote_write, remote_read, remote_atomic = 1, 2, 4, 8


class Completion(NamedTuple):
    """The end of a work request."""

    wr_id: int
    status: int  # ibv_wc_status; on an error only wr_id, status, qp and vendor_error mean anything
    qp: int  # number of the local queue pair
    received: bool  # True: a receive has ended; False: a posted operation has
    size: int  # received bytes
    imm: int | None  # received immediate, host byte order
    source_qp: int  # number of the sender's queue pair, for receives of SRD queue pairs
    vendor_error: int


class Event(NamedTuple):
    """An asynchronous event: ``kind`` is an ibv_event_type."""

    kind: int


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the opened device and port can do."""

    max_send: int  # work requests in a send queue
    max_receive: int  # work requests in a receive queue
    max_completions: int  # entries of a completion queue
    max_message: int  # bytes of one RDMA write or send
    inline_bytes: int  # of a write whose bytes travel in the work request
    atomics: bool  # fetch-and-add works
    atomics_in_flight: int  # per queue pair
    rdma_write: bool = True  # False on older generations of EFA
    srd: bool = False  # the card has SRD queue pairs
    max_pairs: int = 1 << 24  # queue pairs of the device, which all its users share


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """An opened port."""

    device: str
    number: int  # on its device, from 1
    gid_index: int  # of the GID that this rank speaks with
    gid: str  # that GID: eight groups of four hex digits
    lid: int  # 0 on Ethernet and EFA
    infiniband: bool  # addressed by LID; else by GID
    mtu: int  # ibv_mtu of the active MTU: 1 (256 bytes) to 5 (4096)
    pkey_index: int = 0  # of the partition that this rank's queue pairs are in
    global_route: bool = False  # the port demands a global route (GRH) in every packet, also inside a subnet

    def routes_by_gid(self, gid: str) -> bool:
        """Whether packets to the port with that GID need a global route. Inside a subnet of InfiniBand the LID is enough for most ports."""
        return not self.infiniband or self.global_route or gid.split(":")[:4] != self.gid.split(":")[:4]


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """The far end of an RC queue pair: its port, its number and its first packet number."""

    gid: str
    lid: int
    qp: int
    psn: int


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often a card tries again. Always bounded: 7 would mean forever in ``rnr_retry``, and on rxe in ``retry_count`` too.

    Attributes
    ----------
    timeout
        Exponent: the card waits 4.096 us * 2**timeout for an answer.
    retry_count
        Tries after one that was not answered.
    rnr_retry
        Tries after one that met no posted receive.
    rnr_timer
        Code (ibv) of the pause before such a try.

    Raises
    ------
    ValueError
        A field is out of range, or would mean forever.
    """

    timeout: int = 16
    retry_count: int = 6
    rnr_retry: int = 6
    rnr_timer: int = 22  # 20.48 ms

    def __post_init__(self) -> None:
        if not (0 < self.timeout < 32 and 0 <= self.retry_count <= 6 and 0 <= self.rnr_retry <= 6 and 0 < self.rnr_timer < 32):
            raise ValueError(f"{self}: unbounded or out of range")

    @property
    def seconds(self) -> float:
        """The least time after which a card gives up."""
        return (self.retry_count + 1) * 4.096e-6 * float(1 << self.timeout)


class Handles(NamedTuple):
    """What a queue pair is to libibverbs: addresses in this process, for the compiled engine (``kernels_src/proxy/verbs.hpp``)."""

    pair: int  # struct ibv_qp
    sends: int  # struct ibv_cq of its send queue
    arrivals: int  # struct ibv_cq of its receive queue
    post_send: int  # the provider's functions
    post_receive: int
    poll: int
    stored: int = 0  # called after each flag that the engine stores (tests)


class Region(abc.ABC):
    """Memory that a card may read and write.

    Attributes
    ----------
    address
        Where it begins in work requests, local and remote: its virtual address, 0 for a dma-buf.
    size
        Bytes.
    lkey, rkey
        Its keys in work requests of this rank and of its peers.
    """

    address: int
    size: int
    lkey: int
    rkey: int

    @abc.abstractmethod
    def close(self) -> None:
        """Deregister the memory. Queue pairs that may still use it are closed, or failed, before. Raises VerbsError."""


class Destination(abc.ABC):
    """Where a datagram (SRD) goes: an address handle with the peer's queue pair and its key."""

    qp: int
    qkey: int

    def route(self, pair: Handles) -> int | None:
        """The address of its ``struct ibv_ah``, which is used with that queue pair, for the compiled engine; None if it cannot be told."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the handle. Nothing may be on its way there. Raises VerbsError."""


class CompletionQueue(abc.ABC):
    """Collects the completions of queue pairs. Its owner sees to it that there are never more than ``capacity``."""

    capacity: int

    @abc.abstractmethod
    def poll(self, limit: int) -> Sequence[Completion]:
        """Take the oldest completions, at most ``limit``. Never waits. Raises VerbsError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the queue. Its queue pairs are closed before. Raises VerbsError."""


class QueuePair(abc.ABC):
    """A send queue and a receive queue.

    Operations are collected, and ``commit`` hands them to the card with one doorbell. The caller counts them: a full queue is an error.

    These arguments mean the same in all operations:

    - ``wr_id`` comes back in the completion.
    - ``local`` and ``remote`` are a ``Region.address`` plus an offset in bytes; ``lkey`` and ``rkey`` are the keys of those regions.
    - ``signaled`` asks for a completion when the operation succeeds; one that fails always has a completion.
    - ``to`` is the destination on SRD queue pairs, and None on RC ones.
    """

    number: int

    @abc.abstractmethod
    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        """RC: go from RESET to RTS, joined to ``remote``. Raises VerbsError.

        ``mtu`` is an ibv_mtu, ``psn`` this side's first packet number.
        """

    @abc.abstractmethod
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
        """Write ``size`` bytes from ``local`` to the peer's ``remote``; with ``imm`` this also consumes a receive of the peer."""

    @abc.abstractmethod
    def write_inline(self, wr_id: int, value: int, remote: int, rkey: int, *, signaled: bool, fenced: bool = False) -> None:
        """RC: write a 64-bit word, which is copied at once. A ``fenced`` write begins when all atomics before it have been answered."""

    @abc.abstractmethod
    def fetch_add(self, wr_id: int, local: int, lkey: int, remote: int, rkey: int, value: int, *, signaled: bool) -> None:
        """RC: add ``value`` atomically (modulo 2**64) to the peer's 64-bit word at ``remote``; its old value is written to ``local``."""

    @abc.abstractmethod
    def send(
        self, wr_id: int, local: int, size: int, lkey: int, *, signaled: bool, imm: int | None = None, to: Destination | None = None
    ) -> None:
        """Send ``size`` bytes from ``local`` into the peer's next receive."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Ring the doorbell. Raises VerbsError, ENOMEM if the queue was full; then no operation of the batch was posted."""

    @abc.abstractmethod
    def nudge(self) -> None:
        """Ring the doorbell without a new operation: the card looks again at those that it has. Raises VerbsError."""

    @abc.abstractmethod
    def receive(self, wr_id: int, local: int, size: int, lkey: int) -> None:
        """Post a receive at once. Raises VerbsError.

        A write with an immediate consumes a receive and leaves its memory alone; ``size`` may be 0 then.
        """

    def handles(self) -> Handles | None:
        """What the queue pair is to libibverbs; None if that cannot be told."""
        return None

    @abc.abstractmethod
    def fail(self) -> None:
        """Move to the error state: all operations are flushed, and the card touches no memory for them any more. Raises VerbsError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the queue pair. Raises VerbsError."""


class Nic(abc.ABC):
    """An opened network card: one port of a device, and a protection domain. Close what it handed out before the Nic.

    Every method that opens something raises VerbsError if the card refuses.
    """

    port: Port
    limits: Limits

    @abc.abstractmethod
    def register(self, address: int, size: int, access: int) -> Region:
        """Register ``size`` bytes of this process's memory. ``access`` is made of the bits of ``Access``."""

    @abc.abstractmethod
    def register_dmabuf(self, fd: int, size: int, access: int) -> Region:
        """Register GPU memory by its dma-buf; ``Region.address`` is 0."""

    @abc.abstractmethod
    def completion_queue(self, capacity: int) -> CompletionQueue:
        """A completion queue of ``capacity`` entries, at most ``limits.max_completions``."""

    @abc.abstractmethod
    def rc_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int) -> QueuePair:
        """An RC queue pair in RESET: ``connect`` it. ``max_send`` and ``max_receive`` count work requests."""

    @abc.abstractmethod
    def srd_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int, qkey: int) -> QueuePair:
        """An SRD queue pair in RTS, ready to use. Datagrams for it carry ``qkey``."""

    @abc.abstractmethod
    def destination(self, gid: str, qp: int, qkey: int) -> Destination:
        """The way to queue pair ``qp`` of the port with that GID."""

    @abc.abstractmethod
    def active(self) -> bool:
        """Whether the port is up now. Raises VerbsError."""

    @abc.abstractmethod
    def events(self) -> list[Event]:
        """Take and acknowledge asynchronous events of the device, oldest first; more may be left. Never waits. Raises VerbsError.

        Events of its other ports are among them.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close the device. Raises VerbsError."""
