"""``mkernel.transport.verbs`` over the real pyverbs: what rxe does, and what it refuses, which then is at least built and named."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mkernel.transport import verbs
from mkernel.transport.devices import choose_gid, find
from mkernel.transport.verbs import handles, pyverbs
from tests.transport.standin_datagrams import FUNCTIONS, ExtendedPair

QKEY = 0x1234
GRH = 40  # bytes in front of a datagram on a UD queue pair


def main() -> None:
    (port,) = find()
    gid = choose_gid(port)
    assert gid is not None
    nic = pyverbs.open_nic(port.device, port.port, gid.index)
    told: dict[str, Any] = {"port": [nic.port.device, nic.port.mtu, nic.port.infiniband], "gid": str(gid.address.ipv4_mapped)}
    told["features"], told["version"] = pyverbs.features(), pyverbs.version()
    told["events"] = [event.kind for event in nic.events()]
    queue = nic.completion_queue(16)
    file = os.memfd_create("not-a-dma-buf")
    os.ftruncate(file, 4096)
    told["refused"] = {
        "srd": refusal(lambda: nic.srd_pair(queue, queue, max_send=4, max_receive=4, qkey=QKEY)),
        "dmabuf": refusal(lambda: nic.register_dmabuf(file, 4096, verbs.Access.local_write | verbs.Access.remote_write)),
        "device": refusal(lambda: pyverbs.open_nic("mlx5_9", 1, 0)),
    }
    told["datagram"] = datagram(nic, queue)
    queue.close()
    nic.close()
    print(json.dumps(told))


def refusal(call: Callable[[], object]) -> list[Any]:
    try:
        call()
    except verbs.VerbsError as error:
        return [error.op, error.code]
    return []


def datagram(nic: verbs.Nic, queue: verbs.CompletionQueue) -> dict[str, Any]:
    """A message to a destination, as srd sends it, on the only kind of queue pair with destinations that rxe has."""
    from pyverbs.enums import IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QPT_UD, ibv_qp_create_send_ops_flags
    from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx

    flags = ibv_qp_create_send_ops_flags.IBV_QP_EX_WITH_SEND | ibv_qp_create_send_ops_flags.IBV_QP_EX_WITH_SEND_WITH_IMM
    mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
    ends = []
    for _ in range(2):
        cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
        attributes = QPInitAttrEx(
            qp_type=IBV_QPT_UD, scq=queue.queue, rcq=queue.queue, cap=cap, pd=nic.pd, comp_mask=mask, send_ops_flags=flags, sq_sig_all=0
        )
        pair = QPEx(nic.context, attributes)
        state = QPAttr(port_num=1)
        state.qkey = QKEY
        pair.to_rts(state)
        ends.append(pyverbs._PyverbsQueuePair(nic, pair))
    memory = (ctypes.c_char * 300)()
    region = nic.register(ctypes.addressof(memory), len(memory), verbs.Access.local_write)
    there = nic.destination(nic.port.gid, ends[1].number, QKEY)
    for slot in range(3):
        ends[1].receive(10 + slot, region.address + 100 * slot, 80, region.lkey)
    memory[280:288] = b"datagram"
    ends[0].send(1, region.address + 280, 8, region.lkey, signaled=True, to=there)
    ends[0].send(2, region.address + 284, 4, region.lkey, signaled=True, imm=0x10002, to=there)
    ends[0].commit()
    send_as_compiled(ends[0], 3, region.address + 282, 6, region.lkey, there)
    found: list[verbs.Completion] = []
    end = time.monotonic() + 10
    while len(found) < 6 and time.monotonic() < end:
        found += queue.poll(16)
    received = sorted((c for c in found if c.received), key=lambda c: c.wr_id)
    result = {
        "sent": sorted(c.wr_id for c in found if not c.received and not c.status),
        "sizes": [c.size - GRH for c in received],
        "imms": [c.imm for c in received],
        "sources": [c.source_qp == ends[0].number for c in received],
        "bytes": [bytes(memory[100 * i + GRH : 100 * i + c.size]).decode() for i, c in enumerate(received)],
    }
    for pair in ends:
        pair.fail()
        pair.close()
    there.close()
    region.close()
    return result


def send_as_compiled(pair: Any, wr_id: int, local: int, size: int, lkey: int, to: Any) -> None:
    """The same by the structures that the compiled engine uses for srd: the queue pair's own functions, and the address handle."""
    handles._KINDS["UD"] = 4  # IBV_QPT_UD
    known = handles.find(pair._pair, pair.number, "UD")  # type: ignore[arg-type]
    assert known is not None, "the queue pair is not recognized"
    route = to.route(known)
    assert route is not None, "the address handle is not recognized"
    structure = ExtendedPair.from_address(known.pair)

    def call(name: str, *arguments: int) -> Any:
        return FUNCTIONS[name](getattr(structure, name))(known.pair, *arguments)

    call("start")
    structure.id, structure.flags = wr_id, 2  # IBV_SEND_SIGNALED
    call("send")
    call("set_route", route, to.qp, to.qkey)
    call("set_entry", lkey, local, size)
    assert call("complete") == 0


if __name__ == "__main__":
    main()
