"""``python contract.py <transport> <signal> ...``: the contract's body between machines, for each way to raise signals.

``classic-atomic`` is ``atomic`` over ibv_post_send and ibv_poll_cq, as for providers that have nothing newer; ``compiled-atomic`` and
``classic-compiled-atomic`` are the same below the compiled engine, the others below the one in Python. Machine 0 drives, and prints one
line per check.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time

from node import MACHINE, Node, RemoteNetwork, Wires, send, serve

from mkernel.transport.verbs import pyverbs
from tests.transport.contract import CHECKS

OPEN_NIC = pyverbs.open_nic


def main(transport: str, signals: list[str]) -> None:
    wires = Wires()
    for signal, name in itertools.product(signals, CHECKS):
        os.environ["MKERNEL_RC_SIGNAL"] = signal.rpartition("-")[2]
        os.environ["MKERNEL_ENGINE"] = "compiled" if "compiled-" in signal else "python"
        pyverbs.open_nic = functools.partial(OPEN_NIC, classic=signal.startswith("classic-"))
        node = Node(wires, transport)
        if MACHINE:
            serve(node, wires.all[0])
        else:
            begin = time.monotonic()
            CHECKS[name](RemoteNetwork(node, wires))
            for wire in wires.all:
                send(wire, ("end",))
            print(json.dumps({"signal": signal, "check": name, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
        wires.exchange(b"")
        node.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
