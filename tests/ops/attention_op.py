"""Attention to a rank's own keys, as an op: what ring attention builds on (``kernels_src/attention``), without communication."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.jit.spec import KernelSpec
from mkernel.ops.call import call
from mkernel.ops.op import Instance, Op, ResultSpec
from mkernel.planner.attention_tile import AttentionTile
from mkernel.planner.gemm import digest_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

if TYPE_CHECKING:
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["OP", "AttentionPlan", "AttentionProblem", "AttentionRows", "Parameters", "local_attention"]

_NAME = "attention"
_FOLDER = Path(__file__).resolve().parent / "kernels"
_PANEL = 64


class Parameters(ctypes.Structure):
    """``Parameters`` of ``attention.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("o", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("o_row_bytes", ctypes.c_uint64),
        ("o_head_bytes", ctypes.c_uint64),
        ("o_batch_bytes", ctypes.c_uint64),
        ("batches", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("kv_heads", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("keys", ctypes.c_uint32),
        ("map_keys", ctypes.c_uint32),
        ("tile_rows", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
        ("q_position", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
        ("waits", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("flag_offset", ctypes.c_uint64),
        ("partials", ctypes.c_uint64),
        ("missing", ctypes.c_uint32),
        ("key_bytes", ctypes.c_uint32),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("q_map", abi.TensorMap),
        ("k_map", abi.TensorMap),
        ("v_map", abi.TensorMap),
        ("o_map", abi.TensorMap),
    ]


class AttentionRows(NamedTuple):
    """Results: ``o`` like q, and ``lse`` (B, Hq, S) float32."""

    o: Any
    lse: Any


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """``tile_rows``: of a q tile, 0: all that it has room for. ``chunk``: keys that are waited for at once, 0: none are.

    ``keys``: how many of the keys there are, 0: all; the others are nobody's. ``parts``: CTAs that share a tile's keys; if several,
    ``shared_tiles`` says how many tiles there are. ``missing``: the chunk that never comes. ``reuses``: keys
    become NaNs when they have landed.
    ``tile``: not the usual one.
    """

    topology: Topology
    head_dim: int
    dtype: str
    causal: bool = False
    scale: float = 1.0
    q_position: int = 0
    tile_rows: int = 0
    chunk: int = 0
    keys: int = 0
    parts: int = 1
    missing: int = -1
    reuses: bool = False
    tile: AttentionTile | None = None
    shared_tiles: int = 0


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The same for any sizes."""

    problem: AttentionProblem
    rows: int
    split: Split

    op = _NAME
    packet_bytes = staging_bytes = 0

    @property
    def tile(self) -> AttentionTile:
        return self.problem.tile or AttentionTile.of(self.problem.head_dim, self.problem.causal)

    @property
    def _parts(self) -> int:
        return self.problem.shared_tiles * self.problem.parts

    @property
    def workspace_bytes(self) -> int:
        return self._parts * self.tile.partial_bytes

    @property
    def flag_words(self) -> int:
        return self._parts + (self.problem.missing >= 0)

    @property
    def digest(self) -> int:
        return digest_of(self)

    @property
    def grid(self) -> int:
        return self.split.total

    @property
    def spec(self) -> KernelSpec:
        problem, tile = self.problem, self.tile
        constants = tile.constants() | {
            "kFloat16": int(problem.dtype == "float16"),
            "kCausal": int(problem.causal),
            "kSplits": int(problem.parts > 1),
            "kNumNodes": problem.topology.num_nodes,
            "kRanksPerNode": problem.topology.ranks_per_node,
        }
        return KernelSpec(_NAME, tuple(constants.items()), tile.threads, tile.shared_bytes, ctypes.sizeof(Parameters), _FOLDER)

    def of_rows(self, rows: int) -> AttentionPlan:
        return dataclasses.replace(self, rows=rows)

    def flag_name(self, rank: int, index: int) -> str:
        return f"flag {index}"

    def describe(self) -> str:
        return f"{_NAME}: {self.problem}, {self.rows} rows, {self.split}"


class LocalAttention(Op[AttentionProblem]):
    """The op of ``local_attention``."""

    name = _NAME
    gives = "queries, keys, values"
    gets = "what the queries see of the values"
    operands = ("q", "k", "v")
    options: ClassVar[Mapping[str, Any]] = {
        "causal": False,
        "scale": 1.0,
        "q_position": 0,
        "tile_rows": 0,
        "chunk": 0,
        "keys": 0,
        "parts": 1,
        "missing": -1,
        "reuses": False,
        "tile": None,
    }
    result = AttentionRows
    parameters = Parameters

    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[AttentionProblem]:
        q, k, v = operands
        if k.shape != v.shape or q.shape[::3] != k.shape[::3] or q.shape[1] % k.shape[1]:
            raise ArgumentError("shapes", (q.shape, k.shape, v.shape), "do not fit each other")
        problem = AttentionProblem(world.topology, q.shape[3], q.dtype, **options)
        if problem.parts > 1:
            tile = problem.tile or AttentionTile.of(problem.head_dim, problem.causal)
            tiles = q.shape[0] * q.shape[1] * -(-q.shape[2] // (problem.tile_rows or tile.q_rows))
            problem = dataclasses.replace(problem, shared_tiles=tiles)
        return Instance(problem, math.prod(q.shape[:3]))

    def make_plan(
        self, problem: AttentionProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> AttentionPlan:
        chosen = (split or Split()).complete(Split(intra_comm=0, inter_send=0, inter_reduce=0), sm_count)
        return AttentionPlan(problem, rows, chosen)

    def results(self, instance: Instance[AttentionProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        q = operands[0]
        return [ResultSpec(q.shape, instance.problem.dtype), ResultSpec(q.shape[:3], "float32")]

    def check_results(self, instance: Instance[AttentionProblem], operands: Sequence[TensorView], results: Sequence[TensorView]) -> None:
        """``o`` may have any 16-byte-multiple strides, as the operands."""

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[AttentionProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        problem, (q, k, v), (o, lse) = instance.problem, operands, results
        plan: AttentionPlan = executable.plan
        tile = plan.tile
        (batches, heads, rows, _), (_, kv_heads, keys, _) = q.shape, k.shape

        def encoded(view: TensorView, box: int) -> abi.TensorMap:
            shape, (batch, head, row, _) = view.shape, view.strides
            raw = world.backend.tensor_map(
                view.address, problem.dtype, (shape[3], shape[2], shape[1], shape[0]), (row, head, batch), (_PANEL, box, 1, 1)
            )
            return abi.TensorMap.from_buffer_copy(raw)

        return Parameters(
            o=o.address,
            lse=lse.address,
            o_row_bytes=o.strides[2],
            o_head_bytes=o.strides[1],
            o_batch_bytes=o.strides[0],
            batches=batches,
            heads=heads,
            kv_heads=kv_heads,
            rows=rows,
            keys=problem.keys or keys,
            map_keys=keys,
            tile_rows=problem.tile_rows or tile.q_rows,
            chunk=problem.chunk or 1 << 30,
            q_position=problem.q_position,
            scale_log2=problem.scale * math.log2(math.e),
            waits=int(problem.chunk > 0),
            parts=problem.parts,
            key_bytes=k.strides[2] if problem.reuses else 0,
            k=k.address,
            v=v.address,
            missing=problem.missing & 0xFFFFFFFF,
            flag_offset=executable.flag_offset,
            partials=executable.scratch_offset,
            q_map=encoded(q, 64),
            k_map=encoded(k, tile.key_block),
            v_map=encoded(v, tile.key_block),
            o_map=encoded(o, 64),
        )


OP = LocalAttention()


def local_attention(
    q: Any, k: Any, v: Any, *, out: AttentionRows | None = None, split: Split | None = None, **options: Any
) -> AttentionRows:
    """``q`` (B, Hq, S, D), ``k`` and ``v`` (B, Hkv, S', D), of any strides; row i of q has position ``q_position`` + i, key j has j."""
    result: AttentionRows = call(OP, (q, k, v), OP.option_values(options), world=None, out=out, split=split, stream=None)
    return result
