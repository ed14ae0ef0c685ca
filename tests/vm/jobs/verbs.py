"""Bare pyverbs between two machines: what the transports build on, without any of mkernel."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
    IBV_QP_EX_WITH_RDMA_WRITE,
    IBV_QP_INIT_ATTR_PD,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
    IBV_QPT_RC,
    IBV_QPT_UD,
    IBV_SEND_SIGNALED,
)
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx

ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
MASK = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
SIZE = 1 << 20
FLAG = 0  # offset of the counter that the peer adds to


def main() -> None:
    machine = int(os.environ["TEST_MACHINE"])
    (device,) = get_device_list()
    context = Context(name=device.name.decode())
    pd = PD(context)
    cq = CQ(context, 64)
    cap = QPCap(max_send_wr=64, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    qp = QPEx(context, QPInitAttrEx(qp_type=IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, pd=pd, comp_mask=MASK, send_ops_flags=flags, sq_sig_all=0))
    heap = MR(pd, SIZE, ACCESS)
    heap.write(bytes(SIZE), SIZE)
    address = f"10.78.0.{machine + 1}"
    index = next(i for i in range(8) if str(context.query_gid(1, i)).endswith(mapped(address)))
    mine = {"qp": qp.qp_num, "psn": 7 + machine, "gid": str(context.query_gid(1, index)), "buf": heap.buf, "rkey": heap.rkey}
    with meet(machine) as wire:
        theirs = exchange(wire, mine)
        connect(qp, index, mine, theirs)
        exchange(wire, {"ready": True})
        start = time.monotonic()
        put(qp, cq, heap, theirs, machine)
        took = time.monotonic() - start
        end = time.monotonic() + 20
        while int.from_bytes(heap.read(8, FLAG), "little") != 5 and time.monotonic() < end:
            time.sleep(0.001)
        flag = int.from_bytes(heap.read(8, FLAG), "little")
        arrived = heap.read(1000, 4096) == bytes([machine ^ 1]) * 1000
        exchange(wire, {"done": True})
    print(
        json.dumps(
            {"machine": machine, "flag": flag, "arrived": arrived, "ms": round(took * 1e3, 2), "refusals": refusals(context, pd, cq)}
        )
    )
    for thing in (qp, heap, cq, pd, context):
        thing.close()


def mapped(address: str) -> str:
    a, b, c, d = map(int, address.split("."))
    return f"ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def meet(machine: int) -> socket.socket:
    if machine == 0:
        with socket.create_server(("10.77.0.1", 5000)) as server:
            return server.accept()[0]
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("10.77.0.1", 5000), 1)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def exchange(wire: socket.socket, mine: dict[str, Any]) -> dict[str, Any]:
    wire.settimeout(30)
    wire.sendall(json.dumps(mine).encode() + b"\n")
    return dict(json.loads(wire.makefile("rb", buffering=0).readline()))


def connect(qp: QP, index: int, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = ACCESS
    qp.to_init(attr)
    route = GlobalRoute(dgid=GID(theirs["gid"]), sgid_index=index)
    attr = QPAttr(port_num=1)
    attr.path_mtu, attr.rq_psn, attr.dest_qp_num = 5, theirs["psn"], theirs["qp"]
    attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 12
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    qp.to_rtr(attr)
    attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = mine["psn"], 14, 6, 6, 1
    qp.to_rts(attr)


def put(qp: QPEx, cq: CQ, heap: MR, theirs: dict[str, Any], machine: int) -> None:
    heap.write(bytes([machine]) * 1000, 1000, 8192)
    qp.wr_start()
    qp.wr_id, qp.wr_flags = 1, 0
    qp.wr_rdma_write(theirs["rkey"], theirs["buf"] + 4096)
    qp.wr_set_sge(heap_sge(heap, 8192, 1000))
    qp.wr_id, qp.wr_flags = 2, IBV_SEND_SIGNALED
    qp.wr_atomic_fetch_add(theirs["rkey"], theirs["buf"] + FLAG, 5)
    qp.wr_set_sge(heap_sge(heap, 16384, 8))
    qp.wr_complete()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        count, completions = cq.poll(4)
        if count:
            assert [(wc.wr_id, wc.status) for wc in completions] == [(2, 0)], [str(wc) for wc in completions]
            return
    raise AssertionError("the put never completed")


def heap_sge(heap: MR, offset: int, size: int) -> Any:
    from pyverbs.wr import SGE

    return SGE(heap.buf + offset, size, heap.lkey)


def refusals(context: Context, pd: PD, cq: CQ) -> dict[str, str]:
    """Calls that rxe refuses: only that they are built and reach the driver can be seen here."""
    from pyverbs.providers.efa.efadv import SRDQP, EfaContext, EfaQPInitAttr, SRDQPEx  # noqa: F401 - that they exist

    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    file = os.memfd_create("not-a-dma-buf")
    os.ftruncate(file, 4096)
    calls = {
        "dmabuf": lambda: DmaBufMR(pd, 4096, ACCESS, file, 0),
        "srd": lambda: SRDQP(pd, QPInitAttr(qp_type=IBV_QPT_UD, scq=cq, rcq=cq, cap=cap)),
        "srdex": lambda: SRDQPEx(
            context, QPInitAttrEx(qp_type=IBV_QPT_UD, scq=cq, rcq=cq, cap=cap, pd=pd, comp_mask=IBV_QP_INIT_ATTR_PD), EfaQPInitAttr()
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call().close()
            found[name] = "accepted"
        except PyverbsError as error:
            found[name] = f"{type(error).__name__} {getattr(error, 'error_code', None)}: {error}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    os.close(file)
    return found


if __name__ == "__main__":
    main()
