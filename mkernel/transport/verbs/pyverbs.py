"""The network cards of this host by pyverbs, which nothing names but this file and classic.py.

pyverbs is imported when a card is opened or its version is asked for. Its functions that block are not used: they would keep the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import os
import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mkernel import env
from mkernel.transport.verbs import classic, handles
from mkernel.transport.verbs.interface import (
    Access,
    Completion,
    CompletionQueue,
    Destination,
    Event,
    Handles,
    Limits,
    Nic,
    Port,
    QueuePair,
    Region,
    Remote,
    RetryPolicy,
    VerbsError,
)

__all__ = ["features", "open_nic", "version"]


@functools.cache
def _enums() -> Any:
    """The module ``pyverbs.enums``, which is ``pyverbs.libibverbs_enums`` in newer releases."""
    try:
        return importlib.import_module("pyverbs.enums")
    except ModuleNotFoundError:
        return importlib.import_module("pyverbs.libibverbs_enums")


def version() -> str:
    """The version of pyverbs, else of the loaded libibverbs, e.g. ``"44.0"``; empty if neither is known."""
    from importlib import metadata

    for name in ("pyverbs", "rdma-core"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    for library in sorted(Path("/proc/self/maps").read_text().split()):
        if "/libibverbs.so" in library:
            return ".".join(Path(os.path.realpath(library)).name.split(".")[-2:])  # libibverbs.so.1.14.44.0 -> 44.0
    return ""


def features() -> dict[str, bool]:
    """Which features that mkernel uses the installed pyverbs has. Raises ImportError if it, or a library of it, is missing."""
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
    """Turns errors of pyverbs into VerbsError."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        code = getattr(error, "error_code", 0)
        raise VerbsError(op, abs(code) if code not in (-1, 0) else 0, "" if code > 0 else str(error)) from error


def open_nic(device: str, port: int, gid_index: int, pkey_index: int = 0, *, classic: bool = False) -> Nic:
    """Open a port of a device. ``port`` counts from 1; ``gid_index`` and ``pkey_index`` are entries of its tables to speak with.

    ``classic``: post by ibv_post_send and poll by ibv_poll_cq, as it is done anyway where the provider has nothing newer.

    Raises
    ------
    ImportError
        pyverbs or its libraries are missing.
    VerbsError
        There is no such device, or it cannot be opened.
    """
    return _PyverbsNic(device, port, gid_index, pkey_index, classic=classic)


class _PyverbsNic(Nic):
    def __init__(self, device: str, port: int, gid_index: int, pkey_index: int = 0, *, classic: bool = False) -> None:
        from pyverbs.device import Context
        from pyverbs.pd import PD

        self.enums = _enums()
        before = _event_files()
        efa = _efa_module(device)
        with _verb(f"opening {device}"):
            self.context = efa.EfaContext(name=device) if efa is not None else Context(name=device)
        self._event_files = _event_files() - before  # pyverbs does not tell which descriptor delivers asynchronous events
        self._events = select.poll()  # not select, which takes no descriptors from 1024 on
        for fd in self._event_files:
            os.set_blocking(fd, False)
            self._events.register(fd, select.POLLIN)
        try:
            with _verb(f"asking {device} for its attributes"):
                attributes, port_attributes = self.context.query_device(), self.context.query_port(port)
                gid = str(self.context.query_gid(port, gid_index))
                self.pd = PD(self.context)
                srd = self.context.query_efa_device() if efa is not None else None
        except BaseException:
            self.context.close()
            raise
        self.efa, self._classic = efa, classic
        infiniband = port_attributes.link_layer == self.enums.IBV_LINK_LAYER_INFINIBAND
        global_route = bool(getattr(port_attributes, "flags", 0) & _GLOBAL_ROUTE)
        mtu = int(port_attributes.active_mtu)
        self.port = Port(device, port, gid_index, gid, port_attributes.lid, infiniband, mtu, pkey_index, global_route)
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
                max_pairs=attributes.max_qp,
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
            max_pairs=attributes.max_qp,
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
        if not self._classic:
            try:
                return _PyverbsCompletionQueue(self, capacity)
            except VerbsError as error:
                if self.efa is not None or error.code not in _NOT_THERE:
                    raise
                self._classic = True  # the first queue is made before any queue pair, so that all of them are of one kind
        return classic.ClassicQueue(self.context, capacity, _verb)

    def rc_pair(self, sends: CompletionQueue, receives: CompletionQueue, *, max_send: int, max_receive: int) -> QueuePair:
        from pyverbs.qp import QPEx

        assert isinstance(sends, _PyverbsCompletionQueue | classic.ClassicQueue)
        assert isinstance(receives, _PyverbsCompletionQueue | classic.ClassicQueue)
        operations = self.enums.ibv_qp_create_send_ops_flags
        flags = operations.IBV_QP_EX_WITH_RDMA_WRITE | operations.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        flags |= operations.IBV_QP_EX_WITH_SEND | operations.IBV_QP_EX_WITH_SEND_WITH_IMM
        if self.limits.atomics:
            flags |= operations.IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        if not self._classic:
            attributes = self._attributes(self.enums.IBV_QPT_RC, sends, receives, max_send, max_receive, flags, inline=_INLINE)
            try:
                with _verb("creating an RC queue pair"):
                    return _PyverbsQueuePair(self, QPEx(self.context, attributes))
            except VerbsError as error:
                if error.code not in _NOT_THERE:
                    raise
        # Queue pairs of this kind work with either kind of completion queue.
        pair = classic.queue_pair(self.pd, sends.queue, receives.queue, max_send, max_receive, _INLINE, _verb)
        return classic.ClassicPair(self, pair, _verb)

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
            state.qkey, state.pkey_index, state.sq_psn = qkey, self.port.pkey_index, 0
            pair.to_rts(state)
        return _PyverbsQueuePair(self, pair, "SRD")

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
            return _PyverbsDestination(AH(self.pd, attr=self.route(gid, 0)), qp, qkey)

    def route(self, gid: str, lid: int) -> Any:
        """The AHAttr that leads to a peer's port."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute

        is_global = 1 if self.port.routes_by_gid(gid) else 0
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.port.gid_index, hop_limit=64, traffic_class=env.TRAFFIC_CLASS.get())
        return AHAttr(dlid=lid, port_num=self.port.number, is_global=is_global, gr=route, sl=env.SERVICE_LEVEL.get())

    def connect(self, pair: Any, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        """Take a queue pair of pyverbs from RESET to RTS, as ``QueuePair.connect`` says."""
        from pyverbs.qp import QPAttr

        limits, port = self.limits, self.port
        state = QPAttr(port_num=port.number)
        state.pkey_index = port.pkey_index
        state.qp_access_flags = Access.local_write | Access.remote_write | (Access.remote_atomic if limits.atomics else 0)
        state.ah_attr = self.route(remote.gid, remote.lid)
        state.path_mtu, state.dest_qp_num, state.rq_psn, state.sq_psn = mtu, remote.qp, remote.psn, psn
        state.max_rd_atomic = state.max_dest_rd_atomic = limits.atomics_in_flight
        state.min_rnr_timer, state.timeout = retry.rnr_timer, retry.timeout
        state.retry_cnt, state.rnr_retry = retry.retry_count, retry.rnr_retry
        for step in ("init", "rtr", "rts"):
            with _verb(f"moving a queue pair to {step.upper()}"):
                getattr(pair, f"to_{step}")(state)

    def active(self) -> bool:
        with _verb("asking for the state of the port"):
            return bool(self.context.query_port(self.port.number).state == self.enums.IBV_PORT_ACTIVE)

    def events(self) -> list[Event]:
        if not self._events.poll(0):
            return []
        with _verb("reading an asynchronous event"):
            event = self.context.get_async_event()
        kind = int(event.event_type)
        event.ack()  # at once: destroying an object waits until its events are acknowledged
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

    def route(self, pair: Handles) -> int | None:
        return handles.find_route(self.handle, pair)

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
        # Not by next_poll: where it finds none, librxe before rdma-core 55 moves its index past the last entry.
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


_INLINE = 8  # bytes of a write that travel in the request
_GLOBAL_ROUTE = 1  # IBV_QPF_GRH_REQUIRED, of a port's flags
# How providers and the kernel say that they have no extended queues (create_cq_ex) or no posting by functions (ibv_wr_*).
_NOT_THERE = (0, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_RECEIVE = 128  # IBV_WC_RECV: a bit that the opcodes of all receives have


class _PyverbsQueuePair(QueuePair):
    def __init__(self, nic: _PyverbsNic, pair: Any, kind: Literal["RC", "SRD"] = "RC") -> None:
        from pyverbs.wr import SGE

        self._nic, self._pair, self._kind = nic, pair, kind
        self.number = pair.qp_num
        enums = nic.enums
        self._signaled, self._inline, self._fence = map(int, (enums.IBV_SEND_SIGNALED, enums.IBV_SEND_INLINE, enums.IBV_SEND_FENCE))
        self._entry = SGE(0, 0, 0)  # one for all operations: pyverbs allocates a C struct for each
        self._word = (ctypes.c_uint64 * 1)()
        self._word_address = ctypes.addressof(self._word)
        self._open = False  # whether a batch has begun

    def connect(self, remote: Remote, mtu: int, psn: int, retry: RetryPolicy) -> None:
        self._nic.connect(self._pair, remote, mtu, psn, retry)

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
        pair.wr_flags |= self._inline | (self._fence if fenced else 0)  # rxe needs the flag although inline data implies it
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
        classic.post_receive(self._pair, wr_id, local, size, lkey, _verb)

    def handles(self) -> Handles | None:
        return handles.find(self._pair, self.number, self._kind)

    def fail(self) -> None:
        classic.to_error(self._pair, self._nic.enums, _verb)

    def close(self) -> None:
        with _verb("destroying a queue pair"):
            self._pair.close()


def _efa_module(device: str) -> Any:
    """The module of pyverbs for EFA if the device is one, else None."""
    driver = Path(f"/sys/class/infiniband/{device}/device/driver")
    if not driver.exists() or driver.resolve().name != "efa":
        return None
    return importlib.import_module("pyverbs.providers.efa.efadv")


def _event_files() -> set[int]:
    """The descriptors of this process that deliver asynchronous events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "infinibandevent" in str(entry.readlink()):
                found.add(int(entry.name))
    return found
