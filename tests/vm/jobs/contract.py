"""``python contract.py <transport>``: the contract's body between machines. Machine 0 drives, and prints one line per check."""

from __future__ import annotations

import json
import sys
import time

from node import MACHINE, Node, RemoteNetwork, Wires, send, serve

from tests.transport.contract import CHECKS


def main(transport: str) -> None:
    wires = Wires()
    for name, check in CHECKS.items():
        node = Node(wires, transport)
        if MACHINE:
            serve(node, wires.all[0])
        else:
            begin = time.monotonic()
            check(RemoteNetwork(node, wires))
            for wire in wires.all:
                send(wire, ("end",))
            print(json.dumps({"check": name, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
        wires.exchange(b"")
        node.close()


if __name__ == "__main__":
    main(sys.argv[1])
