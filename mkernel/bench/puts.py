"""What the engine and the network sustain under a kernel that only sends (``kernels_src/ops/puts.cuh``)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.planner.gemm import digest_of

if TYPE_CHECKING:
    from mkernel.bench.timing import Call
    from mkernel.planner.topology import Topology

__all__ = ["PutsPlan", "puts"]

_SENDERS = 2  # CTAs, as the reductions have; allgather_gemm has 4
_THREADS = 64


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/puts.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("source_offset", ctypes.c_uint64),
        ("target_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("padding", ctypes.c_char * (-(ctypes.sizeof(abi.World) + 32) % 64)),
    ]


@dataclasses.dataclass(frozen=True)
class PutsPlan:
    """``bytes`` from every rank to its rail peer on each other node, in puts of ``put_bytes``."""

    topology: Topology
    bytes: int
    put_bytes: int

    op = "puts"
    grid = _SENDERS
    packet_bytes = staging_bytes = 0

    @property
    def digest(self) -> int:
        return digest_of(self)

    @property
    def spec(self) -> KernelSpec:
        constants = {
            "kPutBytes": self.put_bytes,
            "kNumNodes": self.topology.num_nodes,
            "kRanksPerNode": self.topology.ranks_per_node,
            "kInterSend": _SENDERS,
        }
        return KernelSpec(self.op, tuple(constants.items()), _THREADS, 0, ctypes.sizeof(Parameters))

    @property
    def workspace_bytes(self) -> int:
        return self.topology.num_nodes * self.bytes

    @property
    def flag_words(self) -> int:
        return (self.topology.num_nodes - 1) * math.ceil(self.bytes / self.put_bytes)

    def flag_name(self, rank: int, index: int) -> str:
        return f"put {index}"

    def describe(self) -> str:
        return f"puts: {self.bytes} bytes to each of {self.topology.num_nodes - 1} rail peers, {self.put_bytes} at a time"


def puts(world: Any, plan: PutsPlan) -> Call:
    """A launch of the plan. Collective."""
    chosen = world.executable(plan, lambda: plan)
    source = chosen.scratch_offset
    parameters = Parameters(source_offset=source, target_offset=source + plan.bytes, flag_offset=chosen.flag_offset, bytes=plan.bytes)
    return functools.partial(world.launch, chosen, parameters)
