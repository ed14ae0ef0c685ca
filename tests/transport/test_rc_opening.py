"""Transport rc from its card to its first put: what is refused, what ranks must agree on, how long it tries, how it closes."""

from __future__ import annotations

import errno
import itertools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mkernel import env
from mkernel.errors import ArgumentError, TransportError
from mkernel.planner.topology import Topology
from mkernel.transport import Card, rdma, srd, verbs
from mkernel.transport.loopback import loopback
from mkernel.transport.rc import MOST_QUEUE_PAIRS, RcTransport, create, open_transport, retry_policy
from mkernel.transport.striped import StripedTransport
from tests.transport.rc_standin import issue, opener, wiring
from tests.transport.standin import Fabric, Mood, StandinNetwork


@pytest.mark.parametrize("where", ["register", "completion_queue", "rc_pair"])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EOPNOTSUPP, errno.EPERM, 0])
def test_setup_errors_are_transport_errors(where: str, code: int) -> None:
    fabric = Fabric()
    nic = fabric.nic(0)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise verbs.VerbsError(f"doing {where}", code)

    setattr(nic, where, refuse)
    with pytest.raises(TransportError) as caught:
        open_transport(nic, wiring(), signal="atomic", queue_pairs=2)
    assert caught.value.op == f"doing {where}"
    assert caught.value.status == {errno.ENOMEM: "ENOMEM", errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EPERM: "EPERM", 0: "no errno"}[code]
    assert caught.value.remedy
    assert nic.closed
    assert not nic.pairs


def test_connecting_fails_with_the_errno() -> None:
    fabric = Fabric()
    ends = [open_transport(fabric.nic(rank), wiring(), signal="atomic", queue_pairs=1) for rank in range(2)]

    def refuse(*args: Any) -> None:
        raise verbs.VerbsError("moving a queue pair to RTR", errno.ETIMEDOUT)

    ends[0]._connections[0].pair.connect = refuse  # type: ignore[method-assign]
    address = ends[1].address.replace(b'"pairs": {"1"', b'"pairs": {"0"')
    with pytest.raises(TransportError, match=r"RTR.*ETIMEDOUT.*routes") as caught:
        ends[0].connect([b"", address])
    assert caught.value.status == "ETIMEDOUT"
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (b'"signal": "atomic"', b'"signal": "imm"', "MKERNEL_RC_SIGNAL"),
        (b'"infiniband": false', b'"infiniband": true', "link layer"),
        (b'"heap": [4096, 4096', b'"heap": [4096, 8192', "heap_bytes"),
        (b'"1": [[', b'"7": [[', "MKERNEL_RC_QUEUE_PAIRS"),
    ],
)
def test_ranks_that_differ_are_told(before: bytes, after: bytes, what: str) -> None:
    transport = open_transport(Fabric().nic(0), wiring(), signal="atomic", queue_pairs=1)
    address = transport.address
    assert before in address
    with pytest.raises(TransportError, match=what):
        transport.connect([b"", address.replace(before, after).replace(b'"1": [[', b'"0": [[')])
    transport.close()


def test_without_atomics_the_receiver_raises_flags() -> None:
    fabric = Fabric(Mood(atomics=False))
    transport = open_transport(fabric.nic(0), wiring(), signal="auto", queue_pairs=1)
    assert transport.signal == "imm"
    transport.close()
    with pytest.raises(ArgumentError, match=r"MKERNEL_RC_SIGNAL.*no atomics.*imm"):
        open_transport(fabric.nic(1), wiring(), signal="atomic", queue_pairs=1)


def test_flags_in_gpu_memory_need_atomics_or_writes() -> None:
    with pytest.raises(ArgumentError, match="MKERNEL_RC_SIGNAL"):
        open_transport(Fabric().nic(0), wiring(signal_address=0), signal="imm", queue_pairs=1)


def test_flags_in_host_memory_are_asked_for() -> None:
    """Without atomics, and with the flags in GPU memory: which of them goes was decided before the card was opened."""
    nic = Fabric(Mood(atomics=False)).nic(0)
    given = wiring(signal_address=0, signal_dmabuf=8)
    with pytest.raises(ArgumentError, match=r"MKERNEL_RC_SIGNAL.*no atomics.*imm on all ranks"):
        open_transport(nic, given, signal="auto", queue_pairs=1)
    assert nic.closed


def test_gpu_memory_is_addressed_by_offset() -> None:
    fabric = Fabric()
    with StandinNetwork(opener(), ranks=2) as real:
        fabric = real.fabric
        fabric.dmabufs.update({7: real.heaps[0].address(), 8: real.signals[0].address()})
        given = wiring(heap_dmabuf=7, signal_dmabuf=8, heap_bytes=real.heaps[0].size)
        transport = open_transport(fabric.nic(5), given, signal="atomic", queue_pairs=1)
        assert (transport._heap.address, transport._signals.address) == (0, 0)
        transport.close()


def test_close_twice_and_with_puts_under_way() -> None:
    """The stand-in checks the order: queue pairs to ERR, then memory."""
    with StandinNetwork(opener("imm")) as network:
        issue(network, 50)
        network.turn()
        network.transports[0].close()
        network.transports[0].close()
        assert network.transports[0]._nic.closed


@pytest.mark.parametrize("timeout", [0.5, 1.0, 5.0, 30.0, 600.0])
def test_retries_end_before_the_kernels_give_up(timeout: float) -> None:
    policy = retry_policy(timeout)
    assert policy.retry_count <= 6
    assert policy.rnr_retry <= 6
    assert 0.12 <= 6 * {22: 0.02048, 24: 0.04096, 26: 0.08192, 28: 0.16384}[policy.rnr_timer] <= max(timeout / 2, 0.13)
    longest = 4 * 7 * 4.096e-6 * 2**policy.timeout
    assert longest <= max(timeout / 2, 0.05)
    assert longest >= min(timeout / 4, 10)


@pytest.mark.parametrize("count", [0, MOST_QUEUE_PAIRS + 1])
def test_queue_pairs_have_a_maximum(count: int) -> None:
    """A work request's number has room for no more."""
    nic = Fabric().nic(0)
    with pytest.raises(ArgumentError, match=r"MKERNEL_RC_QUEUE_PAIRS.*from 1 to 256"):
        open_transport(nic, wiring(), signal="atomic", queue_pairs=count)
    assert nic.closed
    with env.override(MKERNEL_RC_QUEUE_PAIRS=count), pytest.raises(ArgumentError, match="MKERNEL_RC_QUEUE_PAIRS"):
        env.RC_QUEUE_PAIRS.get()


@pytest.mark.parametrize("transport", ["rc", "srd"])
def test_a_card_with_too_few_queue_pairs(transport: str) -> None:
    """Said before any is made, and how many it would take."""
    nic = Fabric(Mood(max_pairs=3)).nic(0, srd=transport == "srd")
    given = wiring(peers=dict.fromkeys(range(1, 5), (0, 0)))
    with pytest.raises(TransportError, match=r"\d+ queue pairs are needed, and the card has 3.*fewer"):
        srd.open_transport(nic, given) if transport == "srd" else open_transport(nic, given, signal="atomic", queue_pairs=4)
    assert nic.closed and not nic.pairs


@pytest.mark.parametrize("nodes", [8, 64])
def test_queue_pairs_are_linear_in_nodes(nodes: int) -> None:
    """In nodes of 8 ranks, 28 and 252 for each rank with 4 to each peer: it connects to its rail, which is what its wiring names."""
    topology = Topology(8 * nodes, 8)
    nic = Fabric().nic(0)
    given = wiring(rank=13, peers=dict.fromkeys(topology.rail_peers(13), (0, 0)))
    transport = open_transport(nic, given, signal="atomic", queue_pairs=4)
    assert len(nic.pairs) == 4 * (nodes - 1)
    assert set(json.loads(transport.address)["pairs"]) == {str(rank) for rank in range(8 * nodes) if rank % 8 == 5 and rank != 13}
    transport.close()


def ends(monkeypatch: pytest.MonkeyPatch, cards: Sequence[int], mood: Mood | None = None, signal: str = "auto") -> list[Any]:
    """What ``create`` gives to two ranks with so many cards each, or raises."""
    fabrics, gathered, barrier = [Fabric(mood) for _ in range(3)], {}, threading.Barrier(2)
    monkeypatch.setattr(rdma, "open_card", lambda card, rank: fabrics[int(card.device[-1])].nic(rank))

    def open_rank(rank: int) -> Any:
        turn = itertools.count()

        def exchange(part: bytes) -> list[bytes]:
            gathered[rank, number := next(turn)] = part
            barrier.wait(20)
            return [gathered[other, number] for other in range(2)]

        of = [Card(f"card{number}", 1, 0, 0, 100.0 + 100 * number) for number in range(cards[rank])]
        try:
            return create(wiring(rank=rank, peers={1 - rank: (0, 0)}, card=of[0], more_cards=of[1:], exchange=exchange))
        except Exception as error:
            return error

    with env.override(MKERNEL_RC_SIGNAL=signal), ThreadPoolExecutor(2) as pool:
        return list(pool.map(open_rank, range(2)))


def test_a_rank_with_several_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in ends(monkeypatch, (2, 2)):
        assert isinstance(transport, StripedTransport)
        assert [way.link.rate for way in transport._ways] == [100, 200]
        assert [link.transport._retry.timeout for link in (way.link for way in transport._ways)] == [retry_policy(15.0).timeout] * 2
        transport.close()
    for transport in ends(monkeypatch, (1, 1)):
        assert isinstance(transport, RcTransport)
        transport.close()


def test_ranks_with_unequal_numbers_of_cards_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends(monkeypatch, (2, 1))
    assert all(isinstance(error, TransportError) and error.status == "mismatch" for error in found), found
    assert "rank 1 has 1 cards, and this one 2 (name as many for every rank)" in str(found[0])


@pytest.mark.parametrize(("mood", "signal"), [(Mood(atomics=False), "auto"), (None, "imm"), (None, "write")])
def test_several_cards_need_atomics(monkeypatch: pytest.MonkeyPatch, mood: Mood | None, signal: str) -> None:
    """Elsewhere a completion does not say that bytes are in the peer's memory, and a flag could overtake them by the other card."""
    for error in ends(monkeypatch, (2, 2), mood, signal):
        assert isinstance(error, ArgumentError) and "only where flags are raised behind atomics" in str(error)


def test_srd_takes_one_card() -> None:
    with pytest.raises(ArgumentError, match=r"MKERNEL_NIC = 2 cards: srd uses one card per rank"):
        srd.create(wiring(card=Card("efa0", 1, 0), more_cards=[Card("efa1", 1, 0)]))


def test_loopback() -> None:
    fabric = Fabric()

    def open_card(card: Card, rank: int) -> verbs.Nic:
        return fabric.nic(rank)

    polls = RcTransport.poll

    def poll(self: RcTransport) -> list[int]:
        fabric.step()
        return polls(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RcTransport, "poll", poll)
        assert loopback(Card("standin0", 1, 0), open_card=open_card) == "atomic"
        fabric.cut.add(1)
        with pytest.raises(TransportError, match="RETRY_EXC"):
            loopback(Card("standin0", 1, 0), open_card=open_card)
