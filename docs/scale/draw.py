"""``python docs/scale/draw.py``: draws the curves of docs/scale.md from the cost model, into this folder. Needs no GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from mkernel.bench.scale import SCALED, curve  # noqa: E402
from mkernel.planner.machine import H200, PYTHON_PUT, RDMA, Machine, Network  # noqa: E402
from mkernel.runtime.pictures import linechart  # noqa: E402

NODES = [1 << power for power in range(13)]
X, Y = "nodes of 8 ranks", "share of the time that the products alone take on a rested GPU"


def on(network: Network) -> Machine:
    return H200.with_network(network)


def efficiency(op: str, growth: str, network: Network) -> list[tuple[float, float]]:
    return [(point.nodes, point.efficiency) for point in curve(op, growth, on(network), NODES) if point.prediction]


def by_op(growth: str, title: str) -> str:
    return linechart.draw(title, X, Y, {op: efficiency(op, growth, RDMA) for op in SCALED}, doublings=True)


def by_network() -> str:
    networks = {
        "50 GB/s per GPU, no oversubscription": RDMA,
        "2:1 above leaves of 32 nodes": dataclasses.replace(RDMA, oversubscription=2.0, leaf_nodes=32),
        "4:1 above leaves of 32 nodes": dataclasses.replace(RDMA, oversubscription=4.0, leaf_nodes=32),
        "8:1 above leaves of 32 nodes": dataclasses.replace(RDMA, oversubscription=8.0, leaf_nodes=32),
        "100 GB/s per GPU, no oversubscription": dataclasses.replace(RDMA, bandwidth=2 * RDMA.bandwidth),
        "50 GB/s per GPU, the engine in Python": dataclasses.replace(RDMA, put=PYTHON_PUT),
    }
    lines = {name: efficiency("gemm_allreduce", "weak", network) for name, network in networks.items()}
    return linechart.draw("gemm_allreduce of 8192 x 8192, K 4096 of each rank: what the network changes", X, Y, lines, doublings=True)


def pictures() -> dict[str, str]:
    """SVG text by file name."""
    return {
        "strong.svg": by_op("strong", "Strong scaling, predicted: the shape of all ranks together stays"),
        "weak.svg": by_op("weak", "Weak scaling, predicted: the shape of each rank stays"),
        "network.svg": by_network(),
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).write_text(text, encoding="utf-8")
        print(HERE / name)
