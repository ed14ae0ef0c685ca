"""A rank that makes random sequences of calls of every op: ``python sequences.py <scenario>``. Prints one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import mkernel as mk
from mkernel.planner.topology import Topology
from mkernel.transport.devices import choose_gid, find
from tests.ops.sequence_body import KINDS, Step, draw_each, program, small_plans
from tests.shared.puts import Puts

HEAP = 64 << 20
MOST_ROWS = 64  # processors emulate floating point slowly
TIMEOUT = 120.0  # of the worlds whose calls go well: emulated processors stand still at times
IMPATIENT = 40.0  # of the others: a call of attention takes seconds
GOOD = 3  # calls that go well before
DEADLINE = 200.0  # seconds until something must have broken
LONGEST_REST = 0.02  # seconds, of a late rank
AMID = "off amid a put:"  # what a machine that goes off says last, and of which put
JOB = Path(os.environ.get("TEST_JOB", ""))  # what the host sees
CARDS = Path("/sys/class/infiniband")
CUT_AFTER = 4  # calls
MTU = 4096  # of the card's path


def steps_of(world: Topology, seed: int, count: int, *kinds: str) -> list[Step]:
    """The steps of a seed, the same on every rank and on the host."""
    return draw_each(np.random.default_rng(seed), world, count, MOST_ROWS, kinds)


def steps_told(world: Any) -> list[Step]:
    """Those that the environment names."""
    kinds = [kind for kind in os.environ.get("TEST_KINDS", "").split(",") if kind]
    return steps_of(world.topology, int(os.environ["TEST_SEED"]), int(os.environ["TEST_CALLS"]), *kinds)


def counts(puts: Puts) -> dict[str, list[int]]:
    """Of each op: calls, puts, puts with bytes, bytes."""
    return {op: list(dataclasses.astuple(count)) for op, count in sorted(puts.by_op.items())}


def rest(world: Any, step: Step, number: int) -> None:
    """A late rank comes later than the others, by as much as the seed says."""
    time.sleep(LONGEST_REST * np.random.default_rng([step.seed, number]).random())


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _packets() -> dict[str, int]:
    """That the cards of this machine have sent."""
    return {card.name: int((card / "ports/1/hw_counters/sent_pkts").read_text()) for card in sorted(CARDS.iterdir())}


def _second_card() -> None:
    """Over the wire for control; it lasts as long as the machine."""
    subprocess.run(["rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "eth0"], check=False, capture_output=True)  # by any rank
    end = time.monotonic() + DEADLINE
    while not any(port.active and choose_gid(port) is not None for port in find() if port.device == "rxe1"):
        assert time.monotonic() < end, "there is no second card"
        time.sleep(0.1)


def _cut(puts: Puts) -> None:
    """The wire of the first card, amid the calls."""
    while sum(count.calls for count in puts.by_op.values()) < CUT_AFTER:
        time.sleep(0.02)
    subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)


def calls() -> None:
    """A sequence, and what of it went over the card."""
    if "+" in os.environ.get("MKERNEL_NIC", ""):
        _second_card()
    before = _packets()
    with mk.init(target="cpu", heap_bytes=HEAP, timeout=float(os.environ.get("TEST_TIMEOUT", TIMEOUT))) as world, small_plans():
        puts, steps = Puts(world), steps_told(world)
        if os.environ.get("TEST_CUT") == str(world.rank):
            threading.Thread(target=_cut, args=(puts,), daemon=True).start()
        begin = time.monotonic()
        wrong = program(world, steps, rest)
        took = time.monotonic() - begin
        world.barrier()  # all puts of this rank have left its machine
        told = {
            "wrong": [steps[number].kind for number in wrong],
            "counts": counts(puts),
            "packets": {name: sent - before[name] for name, sent in _packets().items()},
        }
        tell(rank=world.rank, shape=f"{world.num_nodes}x{world.ranks_per_node}", took=round(took, 1), **told)


def finds() -> None:
    """A sequence in which something is planted: what is wrong with it, or how it ends."""
    world = mk.init(target="cpu", heap_bytes=HEAP, timeout=IMPATIENT)
    rank, steps = world.rank, steps_told(world)
    try:
        with small_plans():
            found = [steps[number].kind for number in program(world, steps, rest)]
    except mk.Error as error:
        found = [f"{type(error).__name__}: {error}"]
    world.close()
    tell(rank=rank, found=found)


def goes_off() -> None:
    """Call after call until the machine of rank ``TEST_DIES`` goes off, amid a call of ``TEST_OP`` that has bytes under way."""
    world = mk.init(target="cpu", heap_bytes=HEAP, timeout=IMPATIENT)
    puts, steps = Puts(world), steps_told(world)
    if world.rank == int(os.environ["TEST_DIES"]):
        threading.Thread(target=_go_off_amid, args=(puts, os.environ["TEST_OP"], os.environ["TEST_FLAG"]), daemon=True).start()
    told: dict[str, Any] = {"error": None}
    good, end = 0, time.monotonic() + DEADLINE
    with small_plans():
        while told["error"] is None and time.monotonic() < end:
            step = steps[good % len(steps)]
            try:
                assert KINDS[step.kind](world, step), f"{step} is wrong"
                good += 1
            except mk.Error as error:
                told = {"error": type(error).__name__, "message": str(error)}
            if good == GOOD:
                (JOB / f"going{world.rank}").touch()
    world.close()
    tell(rank=world.rank, good=good, **told)


def _go_off_amid(puts: Puts, op: str, flag: str) -> None:
    """When the host says so, and then bytes of such a call are under way whose flag tells ``flag``."""
    while not (JOB / "go").exists():
        time.sleep(0.05)
    console, trigger = os.open("/dev/kmsg", os.O_WRONLY), os.open("/proc/sysrq-trigger", os.O_WRONLY)
    while True:
        plan = puts.plan
        if plan is not None and plan.op == op:
            for size, name in puts.under_way():
                if re.search(flag, name):  # off at once: nothing is flushed, nobody is told but the console
                    os.write(console, f"<0>{AMID} {json.dumps({'bytes': size, 'flag': name})}".encode())
                    os.write(trigger, b"b")
        time.sleep(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
