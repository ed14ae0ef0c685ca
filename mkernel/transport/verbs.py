"""The verbs boundary: what transports need of a network card, and the only file that names pyverbs.

``Nic`` and what it hands out are interfaces in plain numbers; ``open_nic`` gives the real ones, tests give others. Nothing here waits: the
functions of pyverbs that block (they would keep the GIL) are not used.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import dataclasses
import errno
import functools
import importlib
import os
import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mkernel import env

__all__ = [
    "ERRNO_REMEDIES",
    "EVENTS",
    "STATUSES",
    "Access",
    "Completion",
    "CompletionQueue",
    "Destination",
    "Event",
    "Limits",
    "Nic",
    "Remote",
    "Port",
    "QueuePair",
    "Region",
    "RetryPolicy",
    "VerbsError",
    "features",
    "open_nic",
    "version",
]

SUCCESS = 0  # IBV_WC_SUCCESS
FLUSHED = 5  # IBV_WC_WR_FLUSH_ERR: the queue pair had failed before; the first other status says why
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # ibv_mtu

# ibv_wc_status: number -> (name, what it means here, remedy)
STATUSES: dict[int, tuple[str, str, str]] = {
    0: ("IBV_WC_SUCCESS", "completed", ""),
    1: ("IBV_WC_LOC_LEN_ERR", "the message is longer than the port or the receive buffer takes", "a bug: report it"),
    2: ("IBV_WC_LOC_QP_OP_ERR", "the card could not process the request", "check the card's firmware and driver logs (dmesg)"),
    3: ("IBV_WC_LOC_EEC_OP_ERR", "the card could not process the request", "check the card's firmware and driver logs (dmesg)"),
    4: ("IBV_WC_LOC_PROT_ERR", "the local memory is not registered for this", "a bug, or memory that was freed under the transport"),
    5: ("IBV_WC_WR_FLUSH_ERR", "the queue pair was already in error", "look for the first error of this queue pair, on either side"),
    6: ("IBV_WC_MW_BIND_ERR", "a memory window could not be bound", "a bug: none are used"),
    7: ("IBV_WC_BAD_RESP_ERR", "the peer's card sent an unexpected answer", "check that both cards run the same kind of firmware"),
    8: ("IBV_WC_LOC_ACCESS_ERR", "the local memory is not registered for this", "a bug, or memory that was freed under the transport"),
    9: ("IBV_WC_REM_INV_REQ_ERR", "the peer's card refused the request as invalid", "do all ranks run the same version of mkernel?"),
    10: ("IBV_WC_REM_ACCESS_ERR", "the peer's memory is not registered for this (key or range)", "has the peer closed its world?"),
    11: ("IBV_WC_REM_OP_ERR", "the peer's card could not process the request", "check the peer's driver logs (dmesg)"),
    12: ("IBV_WC_RETRY_EXC_ERR", "the peer's card does not answer", "is the peer alive, its link up, the fabric lossless (PFC, ECN)?"),
    13: ("IBV_WC_RNR_RETRY_EXC_ERR", "the peer posted no receive in time", "is the peer's engine process starved of CPU time?"),
    14: ("IBV_WC_LOC_RDD_VIOL_ERR", "wrong reliable datagram domain", "a bug: none are used"),
    15: ("IBV_WC_REM_INV_RD_REQ_ERR", "the peer's card refused a read or an atomic", "set MKERNEL_RC_SIGNAL=imm if the card lacks atomics"),
    16: ("IBV_WC_REM_ABORT_ERR", "the peer's card aborted the operation", "check the peer's driver logs (dmesg)"),
    17: ("IBV_WC_INV_EECN_ERR", "invalid end-to-end context", "a bug: none are used"),
    18: ("IBV_WC_INV_EEC_STATE_ERR", "invalid end-to-end context", "a bug: none are used"),
    19: ("IBV_WC_FATAL_ERR", "the card failed", "check the card's driver logs (dmesg)"),
    20: ("IBV_WC_RESP_TIMEOUT_ERR", "the peer's card does not answer", "is the peer alive, its link up?"),
    21: ("IBV_WC_GENERAL_ERR", "the card reports an error of its own", "check the card's driver logs (dmesg); the vendor error says more"),
    22: ("IBV_WC_TM_ERR", "tag matching failed", "a bug: none is used"),
    23: ("IBV_WC_TM_RNDV_INCOMPLETE", "tag matching failed", "a bug: none is used"),
}

# ibv_event_type: number -> (name, fatal, what it means, remedy)
EVENTS: dict[int, tuple[str, bool, str, str]] = {
    0: ("IBV_EVENT_CQ_ERR", True, "a completion queue overran", "a bug: report it"),
    1: ("IBV_EVENT_QP_FATAL", True, "a queue pair failed", "check the card's driver logs (dmesg)"),
    2: ("IBV_EVENT_QP_REQ_ERR", True, "a peer sent an invalid request", "do all ranks run the same version of mkernel?"),
    3: ("IBV_EVENT_QP_ACCESS_ERR", True, "a peer asked for memory it may not touch", "do all ranks run the same version of mkernel?"),
    4: ("IBV_EVENT_COMM_EST", False, "a queue pair heard from its peer", ""),
    5: ("IBV_EVENT_SQ_DRAINED", False, "a send queue is empty", ""),
    6: ("IBV_EVENT_PATH_MIG", False, "a path has migrated", ""),
    7: ("IBV_EVENT_PATH_MIG_ERR", True, "a path could not migrate", "check the fabric"),
    8: ("IBV_EVENT_DEVICE_FATAL", True, "the card failed or was removed", "check the card's driver logs (dmesg)"),
    9: ("IBV_EVENT_PORT_ACTIVE", False, "the port is up", ""),
    10: ("IBV_EVENT_PORT_ERR", True, "the port is down", "check cable, switch port and `ibv_devinfo`"),
    11: ("IBV_EVENT_LID_CHANGE", True, "the port's address has changed", "start again: the subnet manager has renumbered the fabric"),
    12: ("IBV_EVENT_PKEY_CHANGE", False, "the port's partition table has changed", ""),
    13: ("IBV_EVENT_SM_CHANGE", False, "another subnet manager has taken over", ""),
    14: ("IBV_EVENT_SRQ_ERR", True, "a shared receive queue failed", "a bug: none is used"),
    15: ("IBV_EVENT_SRQ_LIMIT_REACHED", False, "a shared receive queue runs low", ""),
    16: ("IBV_EVENT_QP_LAST_WQE_REACHED", False, "a failed queue pair has no more receives", ""),
    17: ("IBV_EVENT_CLIENT_REREGISTER", False, "the subnet manager asks clients to register again", ""),
    18: ("IBV_EVENT_GID_CHANGE", False, "the port's GID table has changed", ""),
    19: ("IBV_EVENT_WQ_FATAL", True, "a work queue failed", "check the card's driver logs (dmesg)"),
}

# What may be done about a call that failed while connections were set up.
ERRNO_REMEDIES: dict[int, str] = {
    errno.EPERM: "allow locked memory: `ulimit -l unlimited`, LimitMEMLOCK=infinity for services",
    errno.EACCES: "give the user access to /dev/infiniband",
    errno.ENOENT: "load the card's kernel modules and ib_uverbs",
    errno.ENODEV: "the device has gone: see `python -m mkernel doctor`",
    errno.ENOMEM: "allow locked memory (`ulimit -l unlimited`), or pass a smaller heap_bytes",
    errno.EINVAL: "is the GID still there, and the peer's network reachable? see `python -m mkernel doctor`",
    errno.EOPNOTSUPP: "the card or its driver cannot do this: see docs/transports.md",
    errno.ETIMEDOUT: "the peer's address cannot be resolved: check routes and `ip neigh`",
    errno.EHOSTUNREACH: "no route to the peer: check routes, or choose another GID with MKERNEL_GID_INDEX",
    errno.ENETUNREACH: "no route to the peer: check routes, or choose another GID with MKERNEL_GID_INDEX",
    errno.ENOSPC: "the card is out of resources: fewer MKERNEL_RC_QUEUE_PAIRS",
}


_ERRNOS = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP"}  # which has two names, and verbs mean this one


class VerbsError(Exception):
    """A call across the boundary failed. ``op`` says which, ``code`` is its errno (0: unknown), ``status`` its name."""

    def __init__(self, op: str, code: int, text: str = "") -> None:
        self.op, self.code = op, code
        self.status = _ERRNOS.get(code, f"errno {code}") if code else "no errno"
        super().__init__(f"{op}: {self.status}" + (f" ({text or os.strerror(code)})" if code or text else ""))


class Access:
    """Bits of what may be done to a region (ibv_access_flags). Never RELAXED_ORDERING: a signal could overtake its data on PCIe."""

    local_write, remote_write, remote_read, remote_atomic = 1, 2, 4, 8


class Completion(NamedTuple):
    wr_id: int
    status: int  # ibv_wc_status; on an error only wr_id, status, qp and vendor_error mean anything
    qp: int  # number of the local queue pair
    received: bool  # of a receive; else of a posted operation
    size: int  # received bytes
    imm: int | None  # received immediate, host byte order
    source_qp: int  # of a receive on an SRD queue pair: the sender's queue pair
    vendor_error: int


class Event(NamedTuple):
    """An asynchronous event: ``kind`` is an ibv_event_type."""

    kind: int


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the opened device and port can do."""

    max_send: int  # work requests in a send queue
    max_receive: int
    max_completions: int  # entries of a completion queue
    max_message: int  # bytes of one RDMA write or send
    inline_bytes: int
    atomics: bool  # fetch-and-add works
    atomics_in_flight: int  # per queue pair
    rdma_write: bool = True  # EFA: only newer generations
    srd: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """The opened port, as a peer needs to know it."""

    device: str
    number: int
    gid_index: int
    gid: str  # eight groups of four hex digits
    lid: int  # 0 on Ethernet and EFA
    infiniband: bool  # addressed by LID; else by GID
    mtu: int  # ibv_mtu of the active MTU


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """The far end of an RC queue pair."""

    gid: str
    lid: int
    qp: int
    psn: int


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded always: 7 would mean forever in ``rnr_retry``, and on rxe in ``retry_count`` too.

    Attributes
    ----------
    timeout
        Exponent: the card waits 4.096 us * 2**timeout for an answer.
    rnr_timer
        ibv code of how long a sender waits when the receiver had no receive posted.
    """

    timeout: int = 16
    retry_count: int = 6
    rnr_retry: int = 6
    rnr_timer: int = 22  # 20.48 ms

    def __post_init__(self) -> None:
        if not (0 < self.timeout < 32 and 0 <= self.retry_count <= 6 and 0 <= self.rnr_retry <= 6 and 0 < self.rnr_timer < 32):
            raise ValueError(f"{self}: unbounded or out of range")


class Region(abc.ABC):
    """Registered memory. ``address`` is where it begins in work requests, local and remote (0 for a dma-buf)."""

    address: int
    size: int
    lkey: int
    rkey: int

    @abc.abstractmethod
    def close(self) -> None: ...


class Destination(abc.ABC):
    """Where a datagram (SRD) goes: an address handle with the peer's queue pair and its key."""

    @abc.abstractmethod
    def close(self) -> None: ...


class CompletionQueue(abc.ABC):
    capacity: int

    @abc.abstractmethod
    def poll(self, limit: int) -> Sequence[Completion]:
        """At most ``limit`` completions. Never waits. Raises VerbsError."""

    @abc.abstractmethod
    def close(self) -> None: ...


class QueuePair(abc.ABC):
    """Operations are collected, and handed to the card by ``commit`` (one doorbell). The caller counts: a full queue is an error.

    ``to`` is needed on SRD queue pairs and must be None on RC ones. Addresses are those of ``Region.address`` plus an offset.
    """

    number: int

    @abc.abstractmethod
    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        """RC: INIT, RTR, RTS. ``psn`` is the first packet number of this side."""

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
        """RDMA write; with ``imm`` it also consumes a receive of the peer."""

    @abc.abstractmethod
    def write_inline(self, wr_id: int, value: int, remote: int, rkey: int, *, signaled: bool, fenced: bool = False) -> None:
        """RC: RDMA write of a 64-bit word that is taken over at once. ``fenced``: begins when all atomics before it have been answered."""

    @abc.abstractmethod
    def fetch_add(self, wr_id: int, local: int, lkey: int, remote: int, rkey: int, value: int, *, signaled: bool) -> None:
        """RC: atomic add of ``value`` (modulo 2**64) to a 64-bit word; the old one is written to ``local``."""

    @abc.abstractmethod
    def send(
        self, wr_id: int, local: int, size: int, lkey: int, *, signaled: bool, imm: int | None = None, to: Destination | None = None
    ) -> None:
        """A message into the peer's next receive."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Ring the doorbell. Raises VerbsError (ENOMEM: the queue was full); then nothing of the batch was posted."""

    @abc.abstractmethod
    def nudge(self) -> None:
        """Ring the doorbell although nothing is posted: the card looks again at what it has."""

    @abc.abstractmethod
    def receive(self, wr_id: int, local: int, size: int, lkey: int) -> None:
        """Post a receive (at once). Writes with an immediate consume one and leave its memory alone (size 0 is fine then)."""

    @abc.abstractmethod
    def fail(self) -> None:
        """Move to the error state: everything under way is flushed, and the card no longer touches memory for it."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Nic(abc.ABC):
    """An opened device, one of its ports, and a protection domain. Close what it handed out first, then the Nic."""

    port: Port
    limits: Limits

    @abc.abstractmethod
    def register(self, address: int, size: int, access: int) -> Region:
        """Memory of this process."""

    @abc.abstractmethod
    def register_dmabuf(self, fd: int, size: int, access: int) -> Region:
        """GPU memory by its dma-buf. ``Region.address`` is 0."""

    @abc.abstractmethod
    def completion_queue(self, capacity: int) -> CompletionQueue: ...

    @abc.abstractmethod
    def rc_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int) -> QueuePair:
        """An RC queue pair, not connected."""

    @abc.abstractmethod
    def srd_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int, qkey: int) -> QueuePair:
        """An SRD queue pair, ready to use."""

    @abc.abstractmethod
    def destination(self, gid: str, qp: int, qkey: int) -> Destination: ...

    @abc.abstractmethod
    def events(self) -> list[Event]:
        """Asynchronous events since the last call, acknowledged. Never waits."""

    @abc.abstractmethod
    def close(self) -> None: ...


# ---- pyverbs
@functools.cache
def _enums() -> Any:
    """``pyverbs.enums``; in newer releases ``pyverbs.libibverbs_enums``."""
    try:
        return importlib.import_module("pyverbs.enums")
    except ModuleNotFoundError:
        return importlib.import_module("pyverbs.libibverbs_enums")


def version() -> str:
    """The version of pyverbs, or of the libibverbs beside it; empty where neither tells."""
    from importlib import metadata

    for name in ("pyverbs", "rdma-core"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    for library in sorted(Path("/proc/self/maps").read_text().split()):
        if "/libibverbs.so" in library:
            return ".".join(Path(os.path.realpath(library)).name.split(".")[-2:])  # libibverbs.so.1.14.44.0 -> 44.0
    return ""


def features() -> dict[str, bool]:
    """What the installed pyverbs offers, by name. Raises ImportError where there is none, or its libraries are missing."""
    import pyverbs.mr
    import pyverbs.qp

    try:
        efa = importlib.import_module("pyverbs.providers.efa.efadv")
    except ImportError:
        efa = None
    return {
        "batched posting (QPEx)": hasattr(pyverbs.qp.QPEx, "wr_rdma_write"),
        "dma-buf (DmaBufMR)": hasattr(pyverbs.mr, "DmaBufMR"),
        "SRD (SRDQPEx)": hasattr(efa, "SRDQPEx"),
    }


@contextlib.contextmanager
def _verb(op: str) -> Iterator[None]:
    """Errors of pyverbs become VerbsError."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        code = getattr(error, "error_code", 0)
        raise VerbsError(op, abs(code) if code not in (-1, 0) else 0, "" if code > 0 else str(error)) from error


def open_nic(device: str, port: int, gid_index: int) -> Nic:
    """Open a port of a device by pyverbs.

    Raises
    ------
    ImportError
        pyverbs or its libraries are missing.
    VerbsError
        There is no such device, or it cannot be opened.
    """
    return _PyverbsNic(device, port, gid_index)


class _PyverbsNic(Nic):
    def __init__(self, device: str, port: int, gid_index: int) -> None:
        from pyverbs.device import Context
        from pyverbs.pd import PD

        self.enums = _enums()
        before = _event_files()
        efa = _efa_module(device)
        with _verb(f"opening {device}"):
            self.context = efa.EfaContext(name=device) if efa is not None else Context(name=device)
        self._event_files = _event_files() - before  # pyverbs does not tell the descriptor of asynchronous events
        for fd in self._event_files:
            os.set_blocking(fd, False)
        try:
            with _verb(f"asking {device} for its attributes"):
                attributes, port_attributes = self.context.query_device(), self.context.query_port(port)
                gid = str(self.context.query_gid(port, gid_index))
                self.pd = PD(self.context)
                srd = self.context.query_efa_device() if efa is not None else None
        except BaseException:
            self.context.close()
            raise
        self.efa = efa
        infiniband = port_attributes.link_layer == self.enums.IBV_LINK_LAYER_INFINIBAND
        self.port = Port(device, port, gid_index, gid, port_attributes.lid, infiniband, int(port_attributes.active_mtu))
        self.limits = self._limits(attributes, port_attributes, srd)

    def _limits(self, attributes: Any, port: Any, srd: Any) -> Limits:
        depth = attributes.max_qp_wr
        if srd is not None:
            caps = importlib.import_module("pyverbs.providers.efa.efa_enums")
            writes = srd.device_caps & getattr(caps, "EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE", 0)  # absent before rdma-core 46
            return Limits(
                max_send=srd.max_sq_wr,
                max_receive=srd.max_rq_wr,
                max_completions=attributes.max_cqe,
                max_message=srd.max_rdma_size or port.max_msg_sz,
                inline_bytes=srd.inline_buf_size,
                atomics=False,
                atomics_in_flight=0,
                rdma_write=bool(writes),
                srd=True,
            )
        return Limits(
            max_send=depth,
            max_receive=depth,
            max_completions=attributes.max_cqe,
            max_message=port.max_msg_sz,
            inline_bytes=8,
            atomics=attributes.atomic_caps != self.enums.IBV_ATOMIC_NONE,
            # 16 is what cards offer. rxe offers 128: a retransmission of so much takes longer than the timeout, and never ends.
            atomics_in_flight=min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom, 16),
        )

    def register(self, address: int, size: int, access: int) -> Region:
        from pyverbs.mr import MR

        with _verb(f"registering {size} bytes"):
            return _PyverbsRegion(MR(self.pd, size, access, address=address), address, size)

    def register_dmabuf(self, fd: int, size: int, access: int) -> Region:
        from pyverbs.mr import DmaBufMR

        with _verb(f"registering {size} bytes of GPU memory by dma-buf"):
            return _PyverbsRegion(DmaBufMR(self.pd, size, access, dmabuf=fd, offset=0), 0, size)

    def completion_queue(self, capacity: int) -> CompletionQueue:
        return _PyverbsCompletionQueue(self, capacity)

    def rc_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int) -> QueuePair:
        from pyverbs.qp import QPEx

        operations = self.enums.ibv_qp_create_send_ops_flags
        flags = operations.IBV_QP_EX_WITH_RDMA_WRITE | operations.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        flags |= operations.IBV_QP_EX_WITH_SEND | operations.IBV_QP_EX_WITH_SEND_WITH_IMM
        if self.limits.atomics:
            flags |= operations.IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        attributes = self._attributes(self.enums.IBV_QPT_RC, sends, receives, max_send, max_receive, flags, inline=8)
        with _verb("creating an RC queue pair"):
            return _PyverbsQueuePair(self, QPEx(self.context, attributes))

    def srd_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int, qkey: int) -> QueuePair:
        from pyverbs.qp import QPAttr

        efadv = self.efa or importlib.import_module("pyverbs.providers.efa.efadv")
        kinds = importlib.import_module("pyverbs.providers.efa.efa_enums")
        operations = self.enums.ibv_qp_create_send_ops_flags
        flags = operations.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | operations.IBV_QP_EX_WITH_RDMA_WRITE
        flags |= operations.IBV_QP_EX_WITH_SEND | operations.IBV_QP_EX_WITH_SEND_WITH_IMM
        attributes = self._attributes(self.enums.IBV_QPT_DRIVER, sends, receives, max_send, max_receive, flags, inline=0)
        kind = efadv.EfaQPInitAttr()
        kind.driver_qp_type = kinds.EFADV_QP_DRIVER_TYPE_SRD
        with _verb("creating an SRD queue pair"):
            pair = efadv.SRDQPEx(self.context, attributes, kind)
        with _verb("starting an SRD queue pair"):
            state = QPAttr(port_num=self.port.number)
            state.qkey, state.pkey_index, state.sq_psn = qkey, 0, 0
            pair.to_rts(state)
        return _PyverbsQueuePair(self, pair)

    def _attributes(
        self, kind: Any, sends: CompletionQueue, receives: CompletionQueue, max_send: int, max_receive: int, flags: int, *, inline: int
    ) -> Any:
        from pyverbs.qp import QPCap, QPInitAttrEx

        assert isinstance(sends, _PyverbsCompletionQueue)
        assert isinstance(receives, _PyverbsCompletionQueue)
        masks = self.enums.ibv_qp_init_attr_mask
        return QPInitAttrEx(
            qp_type=kind,
            scq=sends.queue,
            rcq=receives.queue,
            cap=QPCap(max_send_wr=max_send, max_recv_wr=max_receive, max_send_sge=1, max_recv_sge=1, max_inline_data=inline),
            sq_sig_all=0,
            comp_mask=masks.IBV_QP_INIT_ATTR_PD | masks.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd=self.pd,
            send_ops_flags=flags,
        )

    def destination(self, gid: str, qp: int, qkey: int) -> Destination:
        from pyverbs.addr import AH

        with _verb(f"making an address handle for {gid}"):
            return _PyverbsDestination(AH(self.pd, attr=self.address(gid, 0)), qp, qkey)

    def address(self, gid: str, lid: int) -> Any:
        """An AHAttr for a peer's port."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute

        # On InfiniBand the LID alone does inside a subnet; a global route is needed, and harmless, everywhere else.
        same_subnet = self.port.infiniband and gid.split(":")[:4] == self.port.gid.split(":")[:4]
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.port.gid_index, hop_limit=64, traffic_class=env.TRAFFIC_CLASS.get())
        return AHAttr(dlid=lid, port_num=self.port.number, is_global=0 if same_subnet else 1, gr=route, sl=env.SERVICE_LEVEL.get())

    def events(self) -> list[Event]:
        if not self._event_files or not select.select(list(self._event_files), [], [], 0)[0]:
            return []
        with _verb("reading an asynchronous event"):
            event = self.context.get_async_event()
        kind = int(event.event_type)
        event.ack()  # at once: destroying what an event is about waits for this
        return [Event(kind)]

    def close(self) -> None:
        with _verb("closing the device"):
            self.pd.close()
            self.context.close()


class _PyverbsRegion(Region):
    def __init__(self, region: Any, address: int, size: int) -> None:
        self._region = region
        self.address, self.size = address, size
        self.lkey, self.rkey = region.lkey, region.rkey

    def close(self) -> None:
        with _verb("deregistering memory"):
            self._region.close()


class _PyverbsDestination(Destination):
    def __init__(self, handle: Any, qp: int, qkey: int) -> None:
        self.handle, self.qp, self.qkey = handle, qp, qkey

    def close(self) -> None:
        with _verb("destroying an address handle"):
            self.handle.close()


class _PyverbsCompletionQueue(CompletionQueue):
    def __init__(self, nic: _PyverbsNic, capacity: int) -> None:
        from pyverbs.cq import CQEX, CqInitAttrEx, PollCqAttr

        enums = nic.enums
        fields = enums.ibv_create_cq_wc_flags
        flags = fields.IBV_WC_EX_WITH_BYTE_LEN | fields.IBV_WC_EX_WITH_IMM | fields.IBV_WC_EX_WITH_QP_NUM | fields.IBV_WC_EX_WITH_SRC_QP
        self._with_imm = int(enums.IBV_WC_WITH_IMM)
        self._attributes = PollCqAttr()
        self.capacity = capacity
        with _verb(f"creating a completion queue of {capacity} entries"):
            self.queue = CQEX(nic.context, CqInitAttrEx(cqe=capacity, wc_flags=flags))

    def poll(self, limit: int) -> Sequence[Completion]:
        # Each by itself: librxe before rdma-core 55 moves its index past the last entry when end_poll follows a vain next_poll.
        queue = self.queue
        found: list[Completion] = []
        while len(found) < limit:
            state = queue.start_poll(self._attributes)
            if state == errno.ENOENT:
                break
            if state:
                raise VerbsError("polling a completion queue", abs(state))
            found.append(self._read())
            queue.end_poll()
        return found

    def _read(self) -> Completion:
        queue = self.queue
        wr_id, status, qp = queue.wr_id, queue.status, queue.read_qp_num()
        if status:
            return Completion(wr_id, status, qp, False, 0, None, 0, queue.read_vendor_err())
        if not queue.read_opcode() & _RECEIVE:
            return Completion(wr_id, 0, qp, False, 0, None, 0, 0)
        imm = socket.ntohl(queue.read_imm_data()) if queue.read_wc_flags() & self._with_imm else None
        return Completion(wr_id, 0, qp, True, queue.read_byte_len(), imm, queue.read_src_qp(), 0)

    def close(self) -> None:
        with _verb("destroying a completion queue"):
            self.queue.close()


_RECEIVE = 128  # IBV_WC_RECV, a bit of all opcodes of receives


class _PyverbsQueuePair(QueuePair):
    def __init__(self, nic: _PyverbsNic, pair: Any) -> None:
        from pyverbs.wr import SGE

        self._nic, self._pair = nic, pair
        self.number = pair.qp_num
        enums = nic.enums
        self._signaled, self._inline, self._fence = map(int, (enums.IBV_SEND_SIGNALED, enums.IBV_SEND_INLINE, enums.IBV_SEND_FENCE))
        self._entry = SGE(0, 0, 0)  # one for all: pyverbs makes a C struct of each
        self._word = (ctypes.c_uint64 * 1)()
        self._word_address = ctypes.addressof(self._word)
        self._open = False  # a batch has begun

    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        from pyverbs.qp import QPAttr

        limits, port = self._nic.limits, self._nic.port
        state = QPAttr(port_num=port.number)
        state.pkey_index = 0
        state.qp_access_flags = Access.local_write | Access.remote_write | (Access.remote_atomic if limits.atomics else 0)
        state.ah_attr = self._nic.address(remote.gid, remote.lid)
        state.path_mtu, state.dest_qp_num, state.rq_psn, state.sq_psn = mtu, remote.qp, remote.psn, psn
        state.max_rd_atomic = state.max_dest_rd_atomic = limits.atomics_in_flight
        state.min_rnr_timer, state.timeout = retry.rnr_timer, retry.timeout
        state.retry_cnt, state.rnr_retry = retry.retry_count, retry.rnr_retry
        for step in ("init", "rtr", "rts"):
            with _verb(f"moving a queue pair to {step.upper()}"):
                getattr(self._pair, f"to_{step}")(state)

    def _begin(self, wr_id: int, signaled: bool) -> Any:
        pair = self._pair
        if not self._open:
            pair.wr_start()
            self._open = True
        pair.wr_id = wr_id
        pair.wr_flags = self._signaled if signaled else 0
        return pair

    def _end(self, pair: Any, local: int, size: int, lkey: int, to: Destination | None) -> None:
        if to is not None:
            assert isinstance(to, _PyverbsDestination)
            pair.wr_set_ud_addr(to.handle, to.qp, to.qkey)
        entry = self._entry
        entry.addr, entry.length, entry.lkey = local, size, lkey
        pair.wr_set_sge(entry)

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
        pair = self._begin(wr_id, signaled)
        if imm is None:
            pair.wr_rdma_write(rkey, remote)
        else:
            pair.wr_rdma_write_imm(rkey, remote, imm)
        self._end(pair, local, size, lkey, to)

    def write_inline(self, wr_id: int, value: int, remote: int, rkey: int, *, signaled: bool, fenced: bool = False) -> None:
        pair = self._begin(wr_id, signaled)
        pair.wr_flags |= self._inline | (self._fence if fenced else 0)  # inline is implied by what follows, but rxe wants to be told
        pair.wr_rdma_write(rkey, remote)
        self._word[0] = value
        pair.wr_set_inline_data(self._word_address, 8)

    def fetch_add(self, wr_id: int, local: int, lkey: int, remote: int, rkey: int, value: int, *, signaled: bool) -> None:
        pair = self._begin(wr_id, signaled)
        pair.wr_atomic_fetch_add(rkey, remote, value)
        self._end(pair, local, 8, lkey, None)

    def send(
        self, wr_id: int, local: int, size: int, lkey: int, *, signaled: bool, imm: int | None = None, to: Destination | None = None
    ) -> None:
        pair = self._begin(wr_id, signaled)
        if imm is None:
            pair.wr_send()
        else:
            pair.wr_send_imm(imm)
        self._end(pair, local, size, lkey, to)

    def commit(self) -> None:
        if self._open:
            self._open = False
            with _verb("posting to a queue pair"):
                self._pair.wr_complete()

    def nudge(self) -> None:
        with _verb("ringing a doorbell"):
            self._pair.wr_start()
            self._pair.wr_complete()

    def receive(self, wr_id: int, local: int, size: int, lkey: int) -> None:
        from pyverbs.wr import SGE, RecvWR

        with _verb("posting a receive"):
            entry = SGE(local, size, lkey)
            self._pair.post_recv(RecvWR(wr_id=wr_id, num_sge=1, sg=[entry]))
            entry.close()

    def fail(self) -> None:
        from pyverbs.qp import QPAttr

        with _verb("moving a queue pair to ERR"):
            self._pair.modify(QPAttr(qp_state=self._nic.enums.IBV_QPS_ERR), self._nic.enums.IBV_QP_STATE)

    def close(self) -> None:
        with _verb("destroying a queue pair"):
            self._pair.close()


def _efa_module(device: str) -> Any:
    """The module of pyverbs for EFA, if the device is one."""
    driver = Path(f"/sys/class/infiniband/{device}/device/driver")
    if not driver.exists() or driver.resolve().name != "efa":
        return None
    return importlib.import_module("pyverbs.providers.efa.efadv")


def _event_files() -> set[int]:
    """Descriptors of this process that deliver asynchronous events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "infinibandevent" in str(entry.readlink()):
                found.add(int(entry.name))
    return found
